"""How fast a machine is: a few numbers per kind of call, measured once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenyard.engines.known import COLLECTIVE

CALLS = ("dispatch", "in_place", "combine", COLLECTIVE, f"{COLLECTIVE}_back")
"""Fields of :class:`Rates` that are fitted to measured times."""
DECODE = ("low_dispatch", "low_combine")
"""Those of engine low_latency."""

LEAST, MOST = 1e-6, 1e9
"""Of rates and latencies that are given, so that times stay finite."""


@dataclass(frozen=True, slots=True)
class CallRates:
    """One kind of call inside a node.

    Attributes:
        fixed_us: what an empty call takes: launch, announcements, last signal.
        link_gbs: bytes (1e9 a second) that leave a GPU for others, one way, with programs to spare.
        program_gbs: of a program that moves rows, in a combine all that it reads and stores; None:
            no limit.
    """

    fixed_us: float
    link_gbs: float
    program_gbs: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a machine. GB are 1e9 bytes.

    Attributes:
        dispatch, in_place, combine: engines with kernels; in place is nvlink's dispatch in place.
        collective, collective_back: engine ``collective``, cached dispatch and combine.
        low_dispatch, low_combine: engine low_latency.
        results_gbs: a reducer's results in a combine of nvlink through rings.
        copy_gbs: rows copied inside a GPU (each byte read and written).
        turns_gbs, turns_back_gbs: what one program of engine twolevel copies, all its tasks
            together, in dispatch and combine, were memory endless.
        nic_gbs: a GPU's share of the network, one way; latency_us: one way, put and signal; put_us:
            what each put costs besides its bytes.
        source: where these come from.
    """

    dispatch: CallRates
    in_place: CallRates
    combine: CallRates
    collective: CallRates
    collective_back: CallRates
    low_dispatch: CallRates
    low_combine: CallRates
    results_gbs: float
    copy_gbs: float
    turns_gbs: float
    turns_back_gbs: float
    nic_gbs: float
    latency_us: float
    put_us: float
    source: str

    def with_links(
        self, *, nvlink: float | None = None, nic: float | None = None, latency: float | None = None
    ) -> Rates:
        """The same machine with other links; all calls scale with ``nvlink``, which is dispatch's.
        ValueError: one is outside of :data:`LEAST` and :data:`MOST`."""
        links = dict(nvlink=nvlink, nic=nic, latency=latency)  # noqa: C408
        for name, value in links.items():
            if value is not None and not LEAST <= value <= MOST:
                raise ValueError(
                    f"{name} ({value}) must be from {LEAST:g} to {MOST:g}: give GB/s, or us for "
                    f"latency"
                )
        scale = 1.0 if nvlink is None else nvlink / self.dispatch.link_gbs
        names = (*CALLS, *DECODE)
        calls: dict[str, CallRates] = {name: getattr(self, name) for name in names}
        calls = {
            name: replace(call, link_gbs=call.link_gbs * scale) for name, call in calls.items()
        }
        given = ", ".join(f"{name} {value:g}" for name, value in links.items() if value)
        return replace(
            self,
            **calls,
            nic_gbs=nic or self.nic_gbs,
            latency_us=latency or self.latency_us,
            source=f"{self.source}, given: {given}" if given else self.source,
        )


HOPPER = Rates(
    dispatch=CallRates(13.1, 360.0, 46.0),
    in_place=CallRates(12.4, 361.0, 46.6),
    combine=CallRates(15.4, 348.0, 65.9),
    collective=CallRates(269.0, 275.0),
    collective_back=CallRates(459.0, 115.0),
    low_dispatch=CallRates(8.0, 250.0),
    low_combine=CallRates(6.5, 300.0),
    results_gbs=25.3,
    copy_gbs=2074.0,
    turns_gbs=34.0,
    turns_back_gbs=27.0,
    nic_gbs=45.0,
    latency_us=5.0,
    put_us=0.1,
    source="H100 and H200 over NV18: docs/benchmarks/nvlink-2xh200-20261127 and "
    "collective-4xh200-20261121",
)
"""Of H100 and H200, whose calls with all multiprocessors take as long on NVLink 4. Fitted
(``planner/record.py``; a test fits them again) to the records in ``source``: ``dispatch``,
``in_place`` and ``combine`` to two H200.
``copy_gbs`` is half of what a local copy was seen to read and write, in no record. ``turns_*``:
chosen to suit two figures each, 23 and 128 programs on two GPUs as two nodes, of shapes that
changed since (docs/benchmarks/experiments-twolevel.md); four GPUs as 2x2 test them
(docs/how-to/planner.md). Programs of ``dispatch``: chosen to suit cached ones through rings with 24
multiprocessors (docs/benchmarks/experiments-nvlink.md: 244 us on two, 550 on four GPUs), as records
have none. ``results_gbs``: fitted to a record of two GPUs when all combines took rings
(docs/benchmarks/nvlink-2xh200-20261122.md). ``low_*``: chosen to suit two and four GPUs with up to
256 tokens (docs/benchmarks/low_latency-*.json). The network was not measured: 90 % of a 400 Gb/s
NIC per GPU, guesses for the rest."""
