"""The suite ``twolevel``: what that engine sends over the network, how fast, through how little
memory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from benchmarks.batches import DeviceTruth, make_batches
from benchmarks.calls import IN_PLACE, SuiteCall, collectives, library_calls
from benchmarks.clock import QueuedClock
from benchmarks.record import Line, Network, network_gbs
from benchmarks.twolevel_calls import (
    ALL_KINDS,
    BAR_SMS,
    BOTH_WAYS,
    NCCL,
    NVSHMEM,
    Counted,
    TwoLevel,
    rows_across,
)
from tokenyard import launch
from tokenyard.cli.consoles import say
from tokenyard.testing.baselines import gathered
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import Batch, check, failure
from tokenyard.testing.timing import Series, on_ranks, peak_extra_bytes, time_interleaved
from tokenyard.topology import Topology

FIRST, FIRST_IN_PLACE, REST = "first calls", "first calls in place", "what was still to come"
MAKING = "making an object"
HEAD_START_US = 2000.0
"""Longer than the host takes to launch the calls of a round."""


@dataclass(slots=True, kw_only=True)
class _Run:
    """One rank of the suite. ``kept``: where rank 0 writes lines as they come, should it not live
    to return them.
    """

    suite: TwoLevel
    engine: str
    device: torch.device
    kept: Path | None
    lines: list[Line] = field(default_factory=list[Line])
    batches: dict[int, list[Batch]] = field(default_factory=dict[int, list[Batch]])
    held: dict[ty.ExpertParallel, int] = field(default_factory=dict[ty.ExpertParallel, int])
    """Symmetric memory of objects when they were made."""

    def inputs(self, tokens: int) -> list[Batch]:
        """Collective, the first time."""
        if tokens not in self.batches:
            case = self.suite.case(tokens)
            self.batches[tokens] = make_batches(case, self.device, self.suite.seed)
        return self.batches[tokens]

    def case(self, tokens: int, sms: int | None, rings: int | None = None) -> Case:
        return self.suite.case(tokens, engine=self.engine, sms=sms, rings=rings)

    @contextmanager
    def made(self, case: Case) -> Generator[ty.ExpertParallel | None, None, None]:
        """An object; None, and a line that says why, if it cannot be made on every rank.
        Collective.
        """
        found = list[ty.ExpertParallel]()

        def make() -> None:
            ep = ty.ExpertParallel(**case.arguments, engine=case.engine, device=self.device)
            found.append(ep)
            self.held[ep] = ep.buffer_bytes

        error = failure(make, MAKING, 0, self.device)
        if error:
            self._say(failed(case, MAKING, error))
        try:
            yield None if error else found[0]
        finally:
            for ep in found:
                ep.close()
                self.held.pop(ep, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def measure(
        self, ep: ty.ExpertParallel, kinds: Sequence[str], case: Case, *, nccl: bool = False
    ) -> None:
        """Check everything, time what was right, interleaved, and check it again. Collective."""
        say(f"{case.engine}, {case.sms or 'all'} SMs, {case.tokens} tokens: checking")
        batches = self.inputs(case.tokens)
        fresh = [kind for kind in kinds if kind not in IN_PLACE]
        in_place = [kind for kind in kinds if kind in IN_PLACE]
        with ExitStack() as stack:
            calls = self._first(case, FIRST, ep, fresh)
            if in_place:  # of objects of their own for so many tokens: a view is for the most
                there = stack.enter_context(self.made(case))
                back = stack.enter_context(self.made(case)) if there is not None else None
                if there is not None and back is not None:
                    calls += self._first(case, FIRST_IN_PLACE, there, in_place, back)
            if nccl:
                calls += collectives(case, batches, gathers=False)
            if calls:
                self._check_and_time(calls, batches, case)

    def _first(
        self,
        case: Case,
        what: str,
        ep: ty.ExpertParallel,
        kinds: Sequence[str],
        other: ty.ExpertParallel | None = None,
    ) -> list[SuiteCall]:
        """Calls of ``kinds``; none, and the line that says why, if making them, which makes first
        calls, fails. ``other`` is the object of combines in place. Collective.
        """
        calls, batches = list[SuiteCall](), self.inputs(case.tokens)

        def make() -> None:
            calls.extend(library_calls(ep, case, batches, kinds, lambda: other or ep))

        error = failure(make, what, 0, self.device)
        if not error:
            return calls
        self._say(failed(case, what, error))
        return []

    def _check_and_time(
        self, calls: Sequence[SuiteCall], batches: Sequence[Batch], case: Case
    ) -> None:
        """Collective."""
        counted = [Counted(call, batches, self.suite.grid) for call in calls]
        errors = self._check(counted, batches, [""] * len(counted))
        right = [None if error else each for each, error in zip(counted, errors, strict=True)]
        others = [self._other_bytes(each) if each and case.rings else None for each in right]
        times = self._time(right, len(batches))
        errors = self._check(counted, batches, errors)
        for each, error, series, other in zip(counted, errors, times, others, strict=True):
            line = self._line(each, error)
            if series is not None and not line.error:
                assert line.network is not None
                line = replace(
                    line,
                    wall_us=self._per_call(series.wall),
                    device_us=series.device and self._per_call(series.device),
                    network=replace(line.network, other_bytes=other),
                )
            self._say(line)

    def _line(self, counted: Counted, error: str) -> Line:
        """What is known without times. Collective."""
        call, ep = counted.call, counted.call.ep
        network = Network(planned=counted.planned, row_bytes=counted.row_bytes)
        known: dict[str, Any] = {"name": call.name, "phase": call.phase, "kind": call.kind}
        if ep is None:
            return Line(case=call.case, error=error, network=network, **known)
        totals = [
            on_ranks(sum(counts), self.device) for counts in (counted.rows, counted.put_bytes)
        ]
        rows, put = ([total / counted.num_inputs for total in each] for each in totals)
        before, after = (
            max(on_ranks(size, self.device)) for size in (self.held[ep], ep.buffer_bytes)
        )
        network = replace(
            network, rows=rows, put_bytes=put, nvshmem=NVSHMEM in ep.why, held_bytes=before
        )
        if call.case.rings and before != after and not error:
            error = f"memory grew from {before} to {after} bytes"
        known |= {"ours": True, "symmetric_bytes": after, "network": network}
        return Line(case=call.case, error=error, **known)

    def _per_call(self, times: list[float]) -> list[float]:
        return [each / self.suite.calls for each in times]

    def _time(self, right: Sequence[Counted | None], inputs: int) -> list[Series | None]:
        return time_interleaved(
            [each and partial(_several, each.call, self.suite.calls, inputs) for each in right],
            iterations=self.suite.iterations,
            warmup=self.suite.warmup,
            num_inputs=inputs,
            device=self.device,
            seed=self.suite.seed,
            clock=QueuedClock(self.device, HEAD_START_US),
        )

    def _check(
        self, counted: Sequence[Counted], batches: Sequence[Batch], errors: Sequence[str]
    ) -> list[str]:
        """What is wrong with each on any input, "" if nothing; those with an error already are left
        out. Collective.
        """

        def truths(number: int) -> dict[int, DeviceTruth]:
            batch = batches[number]
            x = gathered(batch.x)
            return {tree: DeviceTruth(batch, x, tree) for tree in {each.tree for each in counted}}

        return check(counted, truths, len(batches), self.device, errors)

    def _other_bytes(self, counted: Counted) -> int:
        """Collective."""
        sizes: list[int] = []

        def call(number: int) -> Any:
            result = counted.call.run(number)
            rows = result.x if isinstance(result, ty.Received) else result
            sizes.append(rows.nbytes)
            return result

        peak = peak_extra_bytes(call, 0, self.device)
        return max(on_ranks(peak - sizes[0], self.device))

    def _say(self, line: Line) -> None:
        """Keep a line, and show it at once: nothing is lost if a later one ends the run."""
        self.lines.append(line)
        say(in_short(line))
        if dist.get_rank() == 0 and self.kept is not None:
            with self.kept.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")


def failed(case: Case, what: str, error: str) -> Line:
    """A line about first calls, or their object, that fail."""
    return Line(case=case, name=what, phase=what, error=error, ours=True)


def on_both_engines(suite: TwoLevel, device: str) -> list[Line]:
    """Run on the ranks of the launcher if there is one, else on processes of our own: others for
    each engine.
    """
    engines = (suite.engine, suite.reference)
    if not launch.under_torchrun():
        return [line for engine in engines for line in _in_processes(suite, engine, device)]
    with launch.joined_by_launcher(device) as here:
        return [line for engine in engines for line in run_twolevel(here, suite, engine)]


def _in_processes(suite: TwoLevel, engine: str, device: str) -> list[Line]:
    """Should they die, the lines that they came to, and one that says why there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "lines"
        say(f"starting {suite.grid.world_size} ranks")
        try:
            return launch.spawn(
                run_twolevel, suite.grid.world_size, suite, engine, kept, device=device
            )[0]
        except RuntimeError as error:
            texts = kept.read_text().splitlines() if kept.exists() else []
            print(error, file=sys.stderr, flush=True)
            why = str(error).strip().splitlines()[-1]
            lost = failed(suite.case(suite.tokens, engine=engine), REST, why)
            return [*(_read(text) for text in texts), lost]


def _read(text: str) -> Line:
    """A line that was kept."""
    told: dict[str, Any] = json.loads(text)
    for name, kind in (("case", Case), ("network", Network)):
        told[name] = told[name] and kind(**told[name])
    case: Case = told["case"]
    grid = None if case.topology is None else Topology(*case.topology)
    told["case"] = replace(case, topology=grid and (grid.num_nodes, grid.ranks_per_node))
    return Line(**told)


def run_twolevel(
    device: torch.device, suite: TwoLevel, engine: str, kept: Path | None = None
) -> list[Line]:
    """Be one rank: measure ``engine``, one of the two of ``suite``. Collective; the lines are the
    same on every rank.
    """
    run = _Run(suite=suite, engine=engine, device=device, kept=kept)
    if engine == suite.reference:
        case = run.case(suite.tokens, BAR_SMS)
        with run.made(case) as ep:
            if ep is not None:
                run.measure(ep, ALL_KINDS, case)
        return run.lines
    most = max(suite.curve)
    for sms in suite.sms:
        with run.made(run.case(most, sms)) as ep:
            for tokens in suite.sizes(sms):
                if ep is not None:
                    kinds = ALL_KINDS if sms in (BAR_SMS, None) else BOTH_WAYS
                    nccl = (sms, tokens) == (BAR_SMS, suite.tokens)
                    run.measure(ep, kinds, run.case(tokens, sms), nccl=nccl)
    small = run.case(most, BAR_SMS, small_rings(suite, run.inputs(most)))
    with run.made(small) as ep:
        if ep is not None:
            run.measure(ep, BOTH_WAYS, small)
    return run.lines


def small_rings(suite: TwoLevel, batches: Sequence[Batch]) -> int:
    """Bytes for rings of which every rank puts ``suite.overfull`` times as many to other nodes,
    there and back.
    """
    plans = [
        rows_across(batch.topk_idx, suite.experts, suite.grid, per_node=True) for batch in batches
    ]
    least = min(min(*plan.sent, *plan.received) for plan in plans)
    return max(1, least * suite.case(1).row_bytes // suite.overfull)


def _several(call: SuiteCall, calls: int, inputs: int, number: int) -> Any:
    """Calls behind each other, on one input after the other; the last result."""
    result: Any = None
    for turn in range(calls):
        result = call.run((number + turn) % inputs)
    return result


def in_short(line: Line) -> str:
    """A line in words."""
    case = line.case
    rings = "" if case.rings is None else f", rings {case.rings / 1e6:.1f} MB"
    sms = f", {case.sms or 'all'} SMs" if case.engine else ""
    what = f"{case.engine or NCCL}{sms}, {case.tokens} tokens{rings}: {line.name}"
    rate = network_gbs(line)
    if line.best is None or rate is None:
        return f"{what}: NO TIME: {line.error}"
    return f"{what}: {line.best.median:.1f} us, {rate:.1f} GB/s between nodes"
