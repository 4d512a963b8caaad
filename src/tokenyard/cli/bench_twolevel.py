"""``tokenyard bench --suite twolevel``: what engine ``twolevel`` sends over the network, how fast,
through how little memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import tokenyard as ty
from tokenyard import launch
from tokenyard.cli.bench_batches import Batch, Truth, make_batches
from tokenyard.cli.bench_inputs import Job
from tokenyard.cli.bench_nvlink_cases import (
    BACK,
    BACK_IN_PLACE,
    IN_PLACE,
    PLAIN,
    VIEW,
    Library,
    Probe,
    collectives,
)
from tokenyard.cli.bench_run import failure, on_ranks
from tokenyard.cli.bench_twolevel_cases import NVSHMEM, Counted, GridTruth, rows_across
from tokenyard.cli.progress import Counter, advance, progress
from tokenyard.cli.timing import Series, Stats, peak_extra_bytes, summarise, time_interleaved
from tokenyard.topology import Topology

BAR_GBS, BAR_SMS, BAR_GRID = 100.0, 24, "2x2"
"""Bytes of rows that every rank should put to other nodes, 1e9 a second, with so many
multiprocessors on such a grid.
"""

ALL_KINDS = (PLAIN, "fp8", "fused", BACK, VIEW, BACK_IN_PLACE)
BOTH_WAYS = (PLAIN, BACK)
NCCL, FIRST, FIRST_IN_PLACE, REST = (
    "NCCL",
    "first calls",
    "first calls in place",
    "what was still to come",
)
HEAD_START_US = 2000.0
"""Longer than the host takes to launch the calls of a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevel:
    """What to measure. Defaults are the sizes of the record.

    Attributes: topology: nodes, ranks per node. engine: what is judged; reference: what is measured
        beside it, in processes of its own, as torch takes symmetric memory from one library only.
        tokens: per rank, over all of ``sms``; curve: tokens per rank with :data:`BAR_SMS`. sms:
        multiprocessors, None for all; each takes half a minute of compiling with NVSHMEM's library.
        overfull: how many times more bytes a rank puts to other nodes than all its rings hold, in
        the test of bounded memory. calls: behind each other in a timed round, whose time is divided
        by them.
    """

    topology: tuple[int, int] = (2, 2)
    engine: str = "twolevel"
    reference: str = "nvlink"
    tokens: int = 4096
    curve: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    sms: tuple[int | None, ...] = (BAR_SMS, None)
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    overfull: int = 32
    calls: int = 4
    iterations: int = 20
    warmup: int = 3
    seed: int = 0

    @property
    def grid(self) -> Topology:
        return Topology(*self.topology)

    def sizes(self, sms: int | None) -> tuple[int, ...]:
        """Tokens per rank that are measured with so many multiprocessors."""
        return self.curve if sms == BAR_SMS else (self.tokens,)

    def stages(self, engine: str) -> list[str]:
        """What a rank that measures ``engine`` does, one after the other, in words."""
        if engine == self.reference:
            return [f"{engine}, {self.tokens} tokens"]
        points = [(sms, tokens) for sms in self.sms for tokens in self.sizes(sms)]
        return [
            *(f"{engine}, {sms or 'all'} SMs, {tokens} tokens" for sms, tokens in points),
            f"{engine}, small rings",
        ]

    def job(self, tokens: int) -> Job:
        return Job(tokens, self.hidden, self.topk, self.experts, "uniform", "bf16", "flat", "none")


@dataclass(slots=True, kw_only=True)
class Crossing:
    """One line: microseconds of one call of the slowest rank, per round; or why there are none.

    Attributes: engine, what: who does what; num_sms: multiprocessors, None for all; rings: bytes
        for rings, None for the default. times: on the GPU (without one: as ``wall``); wall: the
        Python calls until their results are complete. rows, put_bytes: per rank, rows and all bytes
        put to other nodes by one call, mean over the inputs, as the engine counted. planned: rows
        of which the picks say so; row_bytes: payload and scales of one. nvshmem: whether it lies
        between nodes. symmetric_bytes: of the object when it was made, and after these calls (with
        its view, if they are in place); of the rank with most. other_bytes: most bytes of tensors
        during a call besides its result and those before it, of the worst rank.
    """

    engine: str
    what: str
    tokens: int
    num_sms: int | None
    rings: int | None = None
    times: list[float] = field(default_factory=list[float])
    wall: list[float] = field(default_factory=list[float])
    error: str = ""
    rows: list[float] = field(default_factory=list[float])
    put_bytes: list[float] = field(default_factory=list[float])
    planned: list[float] = field(default_factory=list[float])
    row_bytes: int = 0
    nvshmem: bool | None = None
    symmetric_bytes: list[int] = field(default_factory=list[int])
    other_bytes: int | None = None

    @property
    def stats(self) -> Stats | None:
        return summarise(self.times) if self.times else None

    @property
    def payload_bytes(self) -> float:
        """Bytes of rows that every rank puts to other nodes in one call: those of the rank with
        fewest.
        """
        return min(self.rows or self.planned, default=0) * self.row_bytes

    @property
    def network_gbs(self) -> float | None:
        """The rate of these bytes, in 1e9 a second; as many come in meanwhile."""
        return None if self.stats is None else self.payload_bytes / self.stats.median / 1e3


@dataclass(slots=True, kw_only=True)
class _Run:
    """One rank of the suite. ``kept``: where rank 0 writes lines as they come, should it not live
    to return them.
    """

    suite: TwoLevel
    engine: str
    device: torch.device
    kept: Path | None
    lines: list[Crossing] = field(default_factory=list[Crossing])
    start: float = field(default_factory=time.monotonic)
    batches: dict[int, list[Batch]] = field(default_factory=dict[int, list[Batch]])
    held: dict[ty.ExpertParallel, int] = field(default_factory=dict[ty.ExpertParallel, int])
    """Symmetric memory of objects when they were made."""

    def inputs(self, tokens: int) -> list[Batch]:
        """Collective, the first time."""
        if tokens not in self.batches:
            self.batches[tokens] = make_batches(
                self.suite.job(tokens), self.device, self.suite.seed
            )
        return self.batches[tokens]

    @contextmanager
    def made(
        self, sms: int | None, tokens: int, rings: int | None = None
    ) -> Generator[ty.ExpertParallel | None, None, None]:
        """An object; None, and a line that says why, if it cannot be made on every rank.
        Collective.
        """
        suite, found = self.suite, list[ty.ExpertParallel]()

        def make() -> None:
            ep = ty.ExpertParallel(
                num_experts=suite.experts,
                hidden=suite.hidden,
                num_topk=suite.topk,
                max_tokens_per_rank=tokens,
                engine=self.engine,
                num_sms=sms,
                buffer_bytes=rings,
                device=self.device,
                topology=suite.topology,
            )
            found.append(ep)
            self.held[ep] = ep.buffer_bytes

        line = Crossing(
            engine=self.engine, what="making an object", tokens=tokens, num_sms=sms, rings=rings
        )
        line.error = failure(make, line.what, 0, self.device)
        if line.error:
            self._say(line)
        try:
            yield None if line.error else found[0]
        finally:
            for ep in found:
                ep.close()
                self.held.pop(ep, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def measure(
        self,
        ep: ty.ExpertParallel,
        kinds: Sequence[str],
        tokens: int,
        sms: int | None,
        *,
        rings: int | None = None,
        nccl: bool = False,
    ) -> None:
        """Check everything, time what was right, interleaved, and check it again. Collective."""
        job, batches = self.suite.job(tokens), self.inputs(tokens)
        fresh, in_place = (
            [kind for kind in kinds if (kind in IN_PLACE) == asked] for asked in (False, True)
        )
        line = partial(Crossing, engine=self.engine, tokens=tokens, num_sms=sms, rings=rings)
        with ExitStack() as stack:
            probes = self._first(line(what=FIRST), lambda: Library(ep, job, batches).probes(fresh))
            if in_place:
                probes += self._first_in_place(stack, line(what=FIRST_IN_PLACE), in_place)
            if nccl:
                probes += collectives(job, batches, gathers=False)
            if probes:
                self._check_and_time(probes, batches, line)

    def _first(self, line: Crossing, make: Callable[[], list[Probe]]) -> list[Probe]:
        """What ``make`` returns, which makes first calls; nothing, and the line that says why, if
        they fail. Collective.
        """
        probes = list[Probe]()
        line.error = failure(lambda: probes.extend(make()), line.what, 0, self.device)
        if not line.error:
            return probes
        self._say(line)
        return []

    def _first_in_place(
        self, stack: ExitStack, line: Crossing, kinds: Sequence[str]
    ) -> list[Probe]:
        """Of objects of their own for so many tokens, as a view is for the most: one for dispatch,
        one for combine. Collective.
        """
        there = stack.enter_context(self.made(line.num_sms, line.tokens))
        back = None if there is None else stack.enter_context(self.made(line.num_sms, line.tokens))
        if there is None or back is None:
            return []
        job, batches = self.suite.job(line.tokens), self.inputs(line.tokens)
        return self._first(
            line, lambda: Library(there, job, batches, again=lambda: back).probes(kinds)
        )

    def _check_and_time(
        self, probes: Sequence[Probe], batches: Sequence[Batch], line: partial[Crossing]
    ) -> None:
        """``line`` makes that of a call. Collective."""
        counted = [Counted(probe, batches, self.suite.grid) for probe in probes]
        errors = self._check(counted, batches, [""] * len(counted))
        right = [each for each, error in zip(counted, errors, strict=True) if not error]
        others = [self._other_bytes(each) if line.keywords["rings"] else None for each in right]
        measured = iter(zip(self._time(right), others, strict=True))
        found = [None if error else next(measured) for error in errors]
        errors = self._check(counted, batches, errors)
        for each, error, known in zip(counted, errors, found, strict=True):
            new = line(
                what=each.probe.name, error=error, planned=each.planned, row_bytes=each.row_bytes
            )
            if each.probe.ep is None:
                new.engine, new.num_sms = NCCL, None
            else:
                self._fill(new, each, each.probe.ep)
            if known is not None and not new.error:
                series, new.other_bytes = known
                new.times, new.wall = (
                    self._per_call(series.device or series.wall),
                    self._per_call(series.wall),
                )
            self._say(new)

    def _fill(self, line: Crossing, counted: Counted, ep: ty.ExpertParallel) -> None:
        """What is known of calls of the library only. Collective."""
        totals = [
            on_ranks(sum(counts), self.device) for counts in (counted.rows, counted.put_bytes)
        ]
        line.rows, line.put_bytes = (
            [total / counted.num_inputs for total in each] for each in totals
        )
        before, after = (
            max(on_ranks(size, self.device)) for size in (self.held[ep], ep.buffer_bytes)
        )
        line.nvshmem, line.symmetric_bytes = NVSHMEM in ep.why, [before, after]
        if line.rings and before != after and not line.error:
            line.error = f"memory grew from {before} to {after} bytes"

    def _per_call(self, times: list[float]) -> list[float]:
        return [each / self.suite.calls for each in times]

    def _time(self, right: Sequence[Counted]) -> list[Series]:
        inputs = right[0].num_inputs if right else 1
        return time_interleaved(
            [partial(_several, each.probe, self.suite.calls, inputs) for each in right],
            iterations=self.suite.iterations,
            warmup=self.suite.warmup,
            num_inputs=inputs,
            device=self.device,
            seed=self.suite.seed,
            head_start_us=HEAD_START_US,
        )

    def _check(
        self, counted: Sequence[Counted], batches: Sequence[Batch], errors: Sequence[str]
    ) -> list[str]:
        """What is wrong with each on any input, "" if nothing; those with an error already are left
        out. Collective.
        """
        now = list(errors)
        for number, batch in enumerate(batches):
            x = Truth.of(batch).x
            truths = {tree: GridTruth(batch, x, tree) for tree in {each.tree for each in counted}}
            on_ranks(0, self.device)
            for at, each in enumerate(counted):
                if not now[at]:
                    attempt = partial(each.attempt, number, truths[each.tree])
                    now[at] = failure(attempt, each.probe.name, number, self.device)
        return now

    def _other_bytes(self, counted: Counted) -> int:
        """Collective."""
        sizes: list[int] = []

        def call(number: int) -> Any:
            result = counted.probe.run(number)
            rows = result.x if isinstance(result, ty.Received) else result
            sizes.append(rows.nbytes)
            return result

        peak = peak_extra_bytes(call, 0, self.device)
        return max(on_ranks(peak - sizes[0], self.device))

    def _say(self, line: Crossing) -> None:
        """Keep a line, and show it at once: nothing is lost if a later one ends the run."""
        self.lines.append(line)
        if dist.get_rank() == 0:
            print(
                f"{time.monotonic() - self.start:6.1f} s  {in_short(line)}",
                file=sys.stderr,
                flush=True,
            )
            if self.kept is not None:
                with self.kept.open("a") as file:
                    file.write(json.dumps(asdict(line)) + "\n")


def on_all_ranks(suite: TwoLevel, device: str, console: Console) -> list[Crossing]:
    """Run on the ranks of the launcher if there is one, else on processes of our own: others for
    each engine.
    """

    def measure(engine: str, here: torch.device | None) -> list[Crossing]:
        with progress(suite.stages(engine), console, bar=False) as counter:
            if here is None:
                return _in_processes(suite, engine, device, counter)
            return run_twolevel(here, suite, engine, counter=counter)

    engines = (suite.engine, suite.reference)
    if not launch.under_torchrun():
        return [line for engine in engines for line in measure(engine, None)]
    with launch.joined_by_launcher(device) as here:
        return [line for engine in engines for line in measure(engine, here)]


def _in_processes(suite: TwoLevel, engine: str, device: str, counter: Counter) -> list[Crossing]:
    """Should they die, the lines that they came to, and one that says why there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "lines"
        try:
            return launch.spawn(
                run_twolevel, suite.grid.world_size, suite, engine, kept, counter, device=device
            )[0]
        except RuntimeError as error:
            texts = kept.read_text().splitlines() if kept.exists() else []
            print(error, file=sys.stderr, flush=True)
            why = str(error).strip().splitlines()[-1]
            lost = Crossing(engine=engine, what=REST, tokens=suite.tokens, num_sms=None, error=why)
            return [*(Crossing(**json.loads(text)) for text in texts), lost]


def run_twolevel(
    device: torch.device,
    suite: TwoLevel,
    engine: str,
    kept: Path | None = None,
    counter: Counter | None = None,
) -> list[Crossing]:
    """Be one rank: measure ``engine``, one of the two of ``suite``. Collective; the lines are the
    same on every rank.

    ``counter``: of its stages.
    """
    run = _Run(suite=suite, engine=engine, device=device, kept=kept)
    if engine == suite.reference:
        with run.made(BAR_SMS, suite.tokens) as ep:
            if ep is not None:
                run.measure(ep, ALL_KINDS, suite.tokens, BAR_SMS)
        advance(counter)
        return run.lines
    most = max(suite.curve)
    for sms in suite.sms:
        with run.made(sms, most) as ep:
            for tokens in suite.sizes(sms):
                if ep is not None:
                    kinds = ALL_KINDS if sms in (BAR_SMS, None) else BOTH_WAYS
                    run.measure(
                        ep, kinds, tokens, sms, nccl=(sms, tokens) == (BAR_SMS, suite.tokens)
                    )
                advance(counter)
    rings = small_rings(suite, run.inputs(most))
    with run.made(BAR_SMS, most, rings) as ep:
        if ep is not None:
            run.measure(ep, BOTH_WAYS, most, BAR_SMS, rings=rings)
    advance(counter)
    return run.lines


def small_rings(suite: TwoLevel, batches: Sequence[Batch]) -> int:
    """Bytes for rings of which every rank puts ``suite.overfull`` times as many to other nodes,
    there and back.
    """
    plans = [
        rows_across(batch.topk_idx, suite.experts, suite.grid, per_node=True) for batch in batches
    ]
    least = min(min(*plan.sent, *plan.received) for plan in plans)
    return max(1, least * suite.job(1).row_bytes // suite.overfull)


def _several(probe: Probe, calls: int, inputs: int, number: int) -> Any:
    """Calls behind each other, on one input after the other; the last result."""
    result: Any = None
    for turn in range(calls):
        result = probe.run((number + turn) % inputs)
    return result


def in_short(line: Crossing) -> str:
    """A line in words."""
    rings = "" if line.rings is None else f", rings {line.rings / 1e6:.1f} MB"
    sms = "" if line.engine == NCCL else f", {line.num_sms or 'all'} SMs"
    what = f"{line.engine}{sms}, {line.tokens} tokens{rings}: {line.what}"
    if line.stats is None or line.network_gbs is None:
        return f"{what}: NO TIME: {line.error}"
    return f"{what}: {line.stats.median:.1f} us, {line.network_gbs:.1f} GB/s between nodes"
