"""What an object has done so far, as counted by its engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import nan
from typing import NamedTuple


class Traffic(NamedTuple):
    """Rows and bytes to and from some ranks together."""

    rows_sent: int
    rows_received: int
    bytes_sent: int
    bytes_received: int


_LABELS = ("rank", "op", "direction", "peer", "for", "source")


def _shown(labels: Mapping[str, object]) -> str:
    """Labels as Prometheus reads them."""
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    told = (f'{name}="{str(value).translate(escaped)}"' for name, value in labels.items())
    return "{" + ",".join(told) + "}"


@dataclass(slots=True, kw_only=True)
class Stats:
    """Totals since construction; one entry per rank in each list.

    Attributes:
        nodes: the node of each rank.
        calls: exchanges of rows by name ("dispatch", "cached dispatch", "combine"; the second hop
            of a relayed one has ", inside the node" behind).
        rows_sent, rows_received: rows to and from each rank, this one included; a relayed row
            counts on each hop.
        bytes_sent, bytes_received: bytes that crossed a wire, so 0 for this rank.
        last_wait: seconds from the start of the last exchange until each rank's rows had come (nan
            if the backend hides it).
        waits: seconds that each rank held this one up, by what was waited for. Engine collective
            over gloo: "dispatch, counts", "combine, rows", ..., from when that of the rank before
            it had come; over NCCL nothing. Engines on kernels: "counts" and "call" (it comes late),
            "rows", "room" (it does not take rows; "plan": this rank's own programs), each from when
            this rank began to wait; of rows and room the mean of all programs or channels.
            Forwarders and reducers of engines with rings note nothing. `tokenyard doctor --waits`
            says more.
        in_heap, through_rings: large fresh exact ``FLAT`` dispatches of engine nvlink whose rows
            peers wrote where the result is, in the heap; and those that went through rings: some
            rank had no room there (for good, once ``record_stream`` has kept a dead result from
            it), or could not tell how many rows would come.
    """

    rank: int
    nodes: list[int]
    calls: dict[str, int] = field(default_factory=dict[str, int])
    rows_sent: list[int]
    rows_received: list[int]
    bytes_sent: list[int]
    bytes_received: list[int]
    last_wait: list[float]
    waits: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    in_heap: int = 0
    through_rings: int = 0

    @classmethod
    def zeros(cls, rank: int, world_size: int, nodes: list[int] | None = None) -> Stats:
        """Nothing counted yet. ``nodes [R]``: one node by default."""
        none = [0] * world_size
        return cls(
            rank=rank,
            nodes=nodes or none[:],
            rows_sent=none[:],
            rows_received=none[:],
            bytes_sent=none[:],
            bytes_received=none[:],
            last_wait=[0.0] * world_size,
        )

    @property
    def across(self) -> Traffic:
        """What crossed the network: to and from ranks of other nodes."""
        mine = self.nodes[self.rank]
        return self._with([peer for peer, node in enumerate(self.nodes) if node != mine])

    @property
    def inside(self) -> Traffic:
        """What stayed inside the node: to and from its other ranks."""
        mine = self.nodes[self.rank]
        peers = [peer for peer, node in enumerate(self.nodes) if node == mine and peer != self.rank]
        return self._with(peers)

    def _with(self, peers: list[int]) -> Traffic:
        counted = (self.rows_sent, self.rows_received, self.bytes_sent, self.bytes_received)
        return Traffic(*(sum(each[peer] for peer in peers) for each in counted))

    def copy(self) -> Stats:
        """The counters as they are now, though calls may go on on other threads."""
        now = deepcopy(replace(self, calls={}, waits={}))
        now.calls = dict(self.calls)
        now.waits = {what: seconds[:] for what, seconds in list(self.waits.items())}
        return now

    def prometheus(self, **labels: object) -> str:
        """The totals in Prometheus' text format: a page of its own (a ``*.prom`` file, say) for
        each object. ``labels`` are added to each: ``layer="3"``, say, where there are several.

        Raises:
            ValueError: a label cannot be called that.
        """
        for name in labels:
            known = name in _LABELS or name.startswith("__")  # these are Prometheus' own
            if known or not (name.isascii() and name.isidentifier()):
                raise ValueError(
                    f"label {name!r} must be a word without __ before it, and none of "
                    f"{', '.join(_LABELS)}"
                )
        lines: list[str] = []
        for metric, own, value in self._totals():
            if not any(line.startswith(f"{metric}{{") for line in lines[-1:]):
                lines.append(f"# TYPE {metric} counter")
            lines.append(f"{metric}{_shown({'rank': str(self.rank), **labels, **own})} {value}")
        return "\n".join([*lines, ""])

    def _totals(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Each with its name and labels."""
        for op, number in self.calls.items():
            yield "tokenyard_calls_total", {"op": op}, number
        for place, number in (("heap", self.in_heap), ("rings", self.through_rings)):
            if self.in_heap or self.through_rings:
                yield "tokenyard_results_total", {"for": place}, number
        for unit in ("rows", "bytes"):
            for direction in ("sent", "received"):
                counted: list[int] = getattr(self, f"{unit}_{direction}")
                for peer, number in enumerate(counted):
                    here = {"direction": direction, "peer": str(peer)}
                    yield f"tokenyard_{unit}_total", here, number
        for what, waited in self.waits.items():
            for source, seconds in enumerate(waited):
                here = {"for": what, "source": str(source)}
                yield "tokenyard_wait_seconds_total", here, seconds

    def record(
        self, op: str, sent: list[int], received: list[int], row_bytes: int, last_wait: list[float]
    ) -> None:
        """Count one exchange of rows of ``row_bytes`` bytes."""
        self.add(op, 1, sent, received, row_bytes)
        self.last_wait = list(last_wait)

    def add(
        self, op: str, calls: int, sent: list[int], received: list[int], row_bytes: int
    ) -> None:
        """Count exchanges of rows of ``row_bytes`` bytes, rows of all of them together."""
        if not calls:
            return
        self.record_unknown(op, calls)
        for peer, (out, into) in enumerate(zip(sent, received, strict=True)):
            self.rows_sent[peer] += out
            self.rows_received[peer] += into
            if peer != self.rank:
                self.bytes_sent[peer] += out * row_bytes
                self.bytes_received[peer] += into * row_bytes

    def count_result(self, in_heap: bool) -> None:
        """Count a result that could have been in the heap, and was or was not."""
        self.in_heap += in_heap
        self.through_rings += not in_heap

    def record_unknown(self, op: str, calls: int = 1) -> None:
        """Count exchanges of which the host does not learn the rows, nor how long it waited."""
        self.calls[op] = self.calls.get(op, 0) + calls
        self.last_wait = [nan] * len(self.last_wait)
