"""Ranks on up to four GPUs, as threads of one process: times of the GPU engines, and of changes of
their kernels. For developers; no test runs it.

``python tests/run.py four_on_two --engine twolevel,nvlink --map A,B --sms 24,all``
(all combinations; ``--help`` has the rest)

Ranks are threads of one process (*virtual ranks*), a stream each; those of different GPUs reach
each other over NVLink by peer pointers, for node headers and announcements too (no NVSHMEM). Maps
of a 2x2 grid:

- **A**: ranks of a node share a GPU, so what a node sends to another crosses NVLink;
- **B**: ranks of a node are on different GPUs, so what goes on inside of a node crosses NVLink.

Where there are as many GPUs as ranks, each rank has one, whatever the map. With one GPU all ranks
share it, and nothing crosses NVLink. Where two GPUs stand for four, changes of a kernel can be
compared, but **these are not figures of four GPUs**. Two ranks share a GPU's
multiprocessors (``all`` is a share of them), memory, L2 and NVLink. ``tokenyard bench`` makes
those, with a GPU per rank.

Each kind of call has an object of its own; what its cached calls return is compared with the truth,
bit for bit, first. Kind ``cast`` is a dispatch of BF16 that is cast to FP8 on the way, ``fp8`` of
rows that were cast before. A round is 4 calls behind each other between CUDA events; GPUs sleep
until the host has launched all of it, then streams wait for each other. Printed are median and
least over rounds of the slowest rank's time divided by 4 (us), and ``net``: bytes of rows that the
rank with fewest sends to other nodes, over the median. HOST LATE: in so many rounds a GPU woke up
too early. A kind that fails is reported, and the next one goes on. Exit status: 0 if everything ran
and was right.

``--tuning "base push.chunk=8 pushers=32,gatherers=32"`` times each of these changes of the engine's
own numbers in turn (fields of ``engines/tuning.py``; ``base``: none). ``--rings``: rows go through
rings, there and back, however many they are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from threading import Lock
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import tokenyard as ty
from benchmarks.batches import DeviceTruth
from benchmarks.twolevel_calls import rows_across
from one_gpu import VirtualGroup, VirtualMemory, VirtualWorld, virtual_environment
from rank_threads import run_threads
from tokenyard.engines import ring_engine
from tokenyard.engines.tuning import Tuning, peer_tuning
from tokenyard.errors import PeerError, PeerLost, PeerTimeout
from tokenyard.formats import quantize
from tokenyard.memory.kernel_launch import Kernels, kernels_of, multiprocessors
from tokenyard.testing.checked_calls import Batch, share
from tokenyard.testing.compare import assert_same_bits
from tokenyard.testing.routings import routing
from tokenyard.topology import Topology

GPUS = min(4, max(1, torch.cuda.device_count()))
EXPERTS, TOPK, HIDDEN = 256, 8, 7168
ENGINES, MAPS = ("twolevel", "nvlink"), ("A", "B")
IN_PLACE = " in place"
PLAIN_KINDS = ("bf16", "combine", "bf16" + IN_PLACE, "combine" + IN_PLACE)
MAJOR, WEIGHTED = " by expert", " weighted"
KINDS = (*PLAIN_KINDS, "cast", "cast" + IN_PLACE, "bf16" + MAJOR, "fp8", "fp8" + MAJOR,
         "combine" + MAJOR, "combine" + MAJOR + WEIGHTED)  # fmt: skip
WARMUPS, CALLS = 2, 4
SLEEP = 20_000_000  # cycles, about 10 ms: longer than the host takes to launch a round
TIMEOUT, LIMIT = 40.0, 280.0  # seconds: of kernels and gates; of one combination
OBJECTS_PER_CASE = 1000
BASE = "base"


class Setting(NamedTuple):
    """One combination. ``sms``: multiprocessors of a rank, None: its whole share."""

    grid: Topology
    engine: str
    map: str
    sms: int | None
    tokens: int
    kinds: tuple[str, ...]
    rounds: int
    change: str = BASE
    rings: bool = False

    def __str__(self) -> str:
        more = " rings" * self.rings + f" {self.change}" * (self.change != BASE)
        return f"{self.engine} {self.grid} map {self.map} SMs {self.sms or 'all'}{more}"

    @property
    def devices(self) -> list[torch.device]:
        """The GPU of each rank."""
        ranks = range(self.grid.world_size)
        number = self.grid.node_of if self.map == "A" else self.grid.local_of
        each = ranks if len(ranks) <= GPUS else map(number, ranks)
        return [torch.device("cuda", gpu % GPUS) for gpu in each]


class SplitWorld(VirtualWorld):
    """A :class:`VirtualWorld` on several GPUs: ``devices`` by rank."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__(len(devices), devices[0])
        self.devices = devices
        most = max(devices.count(device) for device in devices)
        self.num_sms = max(1, min(multiprocessors(device) for device in devices) // most)
        # as processes have them, with clusters, where ranks share no GPU
        self.loaded = {
            each: kernels_of(each.index, self.num_sms) if most == 1 else Kernels(each, self.num_sms)
            for each in set(devices)
        }
        # One compiles at a time: ranks of the other GPU then find machine code on disk.
        compiling = Lock()
        for each in self.loaded.values():
            each._lock = compiling  # pyright: ignore[reportPrivateUsage]

    def leave(self, number: int, rank: int, why: str) -> None:
        """Nobody waits for ``rank`` in case ``number`` any more; in other cases it goes on."""
        with self._lock:
            gates = list(self._gates.items())
        for name, gate in gates:
            what, _, at = name.partition("/")
            if (what == "case" and int(at) == number) or (
                what == "object" and int(at) // OBJECTS_PER_CASE == number
            ):
                gate.lose(rank, why)


class SplitGroup(VirtualGroup):
    """A rank's group in a :class:`SplitWorld`."""

    def __init__(self, world: SplitWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.split = world

    @property
    def device(self) -> torch.device:
        return self.split.devices[self.rank()]

    def open_memory(self, timeout: float, members: Sequence[int] | None = None) -> VirtualMemory:
        memory = VirtualMemory(self, timeout, members)
        memory._kernels = self.split.loaded[self.device]  # pyright: ignore[reportPrivateUsage]
        return memory


def enable_peers() -> None:
    """GPUs map each other's memory: torch sees to it at a first copy. RuntimeError if they
    cannot.
    """
    for here, there in permutations(range(GPUS), 2):
        if not torch.cuda.can_device_access_peer(here, there):
            raise RuntimeError(f"GPU {here} cannot reach the memory of GPU {there}")
        sent = torch.arange(1024, device=f"cuda:{here}")
        if not torch.equal(sent.to(f"cuda:{there}").cpu(), sent.cpu()):
            raise RuntimeError(f"a copy from GPU {here} to GPU {there} came wrong")


def draw_picks(ranks: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Of all ranks, on the CPU: int64 and float32 ``[R, T, K]``."""
    each = [routing("uniform", rank, ranks, tokens, TOPK, EXPERTS, 0) for rank in range(ranks)]
    return torch.stack([idx for idx, _ in each]), torch.stack([weights for _, weights in each])


def expert_share(expert: Tensor) -> Tensor:
    """What rows of ``expert`` are multiplied with before they are summed, so that sums differ if
    one takes another pick's row.
    """
    return 2.0 ** -(expert % 4)


def check_sums(truth: DeviceTruth, y: Tensor, *, weighted: bool) -> None:
    """The sums of result rows by expert: of each rank's in the order of picks, then of ranks and
    nodes; rounded each time.
    """
    batch, mine = truth.batch, truth.batch.rank
    total = torch.zeros(batch.x.shape, dtype=torch.float32, device=batch.x.device)
    idx, weights = batch.picks
    for first in range(0, len(batch.topk_idx), truth.per_node):
        node = torch.zeros_like(total)
        for rank in range(first, first + truth.per_node):
            part, here = torch.zeros_like(total), batch.picks_of(rank)[mine]
            for pick in range(TOPK):
                scale = share(rank) * expert_share(idx[:, pick : pick + 1])
                row = (batch.x * scale.to(batch.x.dtype)).float()
                row = row * weights[:, pick : pick + 1] if weighted else row
                part += torch.where(here[:, pick : pick + 1], row, 0.0)
            node += part.to(batch.x.dtype).float()
        total += node.to(batch.x.dtype).float()
    assert_same_bits(y, total.to(y.dtype), what="combined")


class Case:
    """Calls of one kind of one object. Making one is collective, as are run and check."""

    def __init__(self, ep: ty.ExpertParallel, kind: str, truth: DeviceTruth) -> None:
        self.ep, self.truth, batch = ep, truth, truth.batch
        self.back, self.in_place = kind.startswith("combine"), kind.endswith(IN_PLACE)
        self.mode = ty.Quantize.FP8 if kind.startswith("cast") else None
        self.x: Any = quantize(batch.x, ty.Quantize.FP8) if kind.startswith("fp8") else batch.x
        self.weighted, self.major = kind.endswith(WEIGHTED), MAJOR in kind
        layout = ty.Layout.EXPERT_MAJOR if self.major else ty.Layout.FLAT
        mine = batch.topk_idx[ep.rank], batch.topk_weights[ep.rank]
        received = ep.dispatch(batch.x, *mine, layout=layout)
        truth.check_rows(received)
        self.handle = received.handle
        self.rows = self.given = received.x.mul_(share(ep.rank))
        if self.back and self.major:
            expert = batch.topk_idx.flatten()[batch.picks_of(ep.rank).flatten()].sort().values
            self.rows.mul_(expert_share(expert).to(self.rows.dtype)[:, None])
        if self.back and self.in_place:
            self.given = ep.empty_for_combine(self.handle, in_place=True)
            self.given.copy_(self.rows)

    def run(self) -> Any:
        if self.back:
            return self.ep.combine(
                self.given, self.handle, in_place=self.in_place, weighted=self.weighted
            )
        return self.ep.dispatch(
            self.x, handle=self.handle, quantize=self.mode, in_place=self.in_place
        )

    def check(self) -> str:
        """What is wrong, or "ok"."""
        plain = self.ep.combine(self.rows, self.handle) if self.back and self.in_place else None
        result = self.run()
        torch.cuda.current_stream(
            self.truth.x.device
        ).synchronize()  # allocating must not wait for peers yet to launch
        try:
            if plain is not None:
                same = torch.equal(result.view(torch.int16), plain.view(torch.int16))
                assert same, "other bits than combine not in place"
            if self.back and self.major:
                check_sums(self.truth, result, weighted=self.weighted)
            else:
                (self.truth.check_combined if self.back else self.truth.check_rows)(result)
            self.ep.check()
        except AssertionError as error:
            return "WRONG " + " ".join(str(error).split())[:160]
        return "ok"


@dataclass
class Found:
    """What a rank has seen in one case. ``times``: us of a call, per round; ``late``: rounds in
    which the host was too late.
    """

    check: str = "not made"
    times: list[float] = field(default_factory=list[float])
    late: int = 0
    error: str = ""
    secondhand: bool = True  # the error only says that another rank failed, or came at the end
    fatal: bool = False


class Rank:
    """What a thread does."""

    def __init__(self, group: SplitGroup, setting: Setting, picks: tuple[Tensor, Tensor]) -> None:
        self.group, self.world, self.setting, self.picks = group, group.split, setting, picks
        self.rank, self.device, self.two_levels = (
            group.rank(),
            group.device,
            setting.engine == "twolevel",
        )
        self.main = self.gate = self.world.gate("main")
        self.truth = self.prepare()

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"{self.setting}: {text}", flush=True)

    def prepare(self) -> DeviceTruth:
        """Inputs, and the truth of them on this GPU."""
        setting = self.setting
        random = torch.Generator(self.device).manual_seed(self.rank)
        x = torch.randn(
            setting.tokens, HIDDEN, dtype=torch.bfloat16, device=self.device, generator=random
        )
        idx, weights = (each.to(self.device) for each in self.picks)
        torch.cuda.synchronize(self.device)
        xs: list[Tensor] = self.main.meet(self.rank, "the inputs", LIMIT, x)
        rows = torch.cat([each.to(self.device) for each in xs])
        torch.cuda.synchronize(self.device)
        self.main.meet(self.rank, "the truth", LIMIT)
        tree = setting.grid.ranks_per_node if self.two_levels else setting.grid.world_size
        return DeviceTruth(Batch(x, idx, weights, self.rank, EXPERTS), rows, tree)

    def go(self) -> int:
        """How many kinds failed or were wrong."""
        bad = 0
        for number, kind in enumerate(self.setting.kinds, 1):
            mine = self.attempt(number, kind)
            found: list[Found] = self.main.meet(self.rank, kind, LIMIT, mine)
            self.say(f"{kind} {self.report(kind, found)}")
            bad += any(each.error or each.check != "ok" for each in found)
            if any(each.fatal for each in found):
                raise RuntimeError("CUDA is of no more use in this process")
        return bad

    def attempt(self, number: int, kind: str) -> Found:
        """One case with an object of its own: an unsupported call makes an object useless."""
        self.group.opened = OBJECTS_PER_CASE * number
        self.gate, found, ep = self.world.gate(f"case/{number}"), Found(), None
        try:
            ep = self.make()
            if number == 1:
                self.say(f"{ep.why}; {self.world.num_sms} SMs each at most")
            case = Case(ep, kind, self.truth)
            self.meet("made")
            found.check = case.check()
            self.meet("checked")
            self.time(case, found)
            self.meet("timed")
            ep.check()
        except Exception as error:
            self.world.leave(number, self.rank, f"failed: {error!r}")
            found.error = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            found.secondhand = isinstance(error, (PeerLost, PeerTimeout, PeerError))
        self.end(ep, found)
        return found

    def make(self) -> ty.ExpertParallel:
        setting, group = self.setting, self.group
        grid = (setting.grid.num_nodes, setting.grid.ranks_per_node) if self.two_levels else None
        return ty.ExpertParallel(
            group,
            num_experts=EXPERTS,
            hidden=HIDDEN,
            num_topk=TOPK,
            max_tokens_per_rank=setting.tokens,
            engine=setting.engine,
            num_sms=setting.sms,
            timeout=TIMEOUT,
            topology=grid,
        )

    def end(self, ep: ty.ExpertParallel | None, found: Found) -> None:
        try:
            torch.cuda.synchronize(self.device)
            if ep is not None:
                ep.close()
        except Exception as error:
            found.fatal = True
            found.error = found.error or f"at the end: {type(error).__name__}: {str(error)[:300]}"

    def meet(self, what: str, value: Any = None) -> list[Any]:
        return self.gate.meet(self.rank, what, TIMEOUT + 20, value)

    def time(self, case: Case, found: Found) -> None:
        start, end, mark = (
            torch.cuda.Event(enable_timing=timing) for timing in (True, True, False)
        )
        for event in (start, end, mark):
            event.record()
        marks = self.meet("marks", mark)
        self.warm(case)
        for turn in range(WARMUPS + self.setting.rounds):
            late = self.round(case, start, end, mark, marks)
            if turn >= WARMUPS:
                found.times.append(start.elapsed_time(end) * 1e3 / CALLS)
                found.late += late

    def warm(self, case: Case) -> None:
        """Two results at once, one call after the other: later rounds find memory in the allocator,
        and kernels loaded.
        """
        held: list[Any] = []
        for _ in range(2):
            held.append(case.run())
            torch.cuda.current_stream(self.device).synchronize()
            self.meet("warm")

    def round(self, case: Case, start: Any, end: Any, mark: Any, marks: list[Any]) -> bool:
        """GPUs sleep until the host has launched all; then streams meet, and what follows is timed.
        True: the host was late.
        """
        stream = torch.cuda.current_stream(self.device)
        stream.synchronize()
        self.meet("round")
        torch.cuda._sleep(SLEEP)  # pyright: ignore
        mark.record()
        self.meet("sleeping")
        for each in marks:
            stream.wait_event(each)
        start.record()
        for _ in range(CALLS):
            _result = case.run()
        end.record()
        late = start.query()
        stream.synchronize()
        return late

    def report(self, kind: str, found: list[Found]) -> str:
        errors = [
            (each.secondhand, rank, each.error) for rank, each in enumerate(found) if each.error
        ]
        if errors:
            _, rank, text = min(errors)
            return f"FAILED ({len(errors)} ranks) rank {rank}: {text}"
        times = [max(each) for each in zip(*(each.times for each in found), strict=True)]
        median, late = statistics.median(times), max(each.late for each in found)
        plan = rows_across(self.picks[0], EXPERTS, self.setting.grid, per_node=self.two_levels)
        row_bytes = HIDDEN + HIDDEN // 32 if kind.startswith(("cast", "fp8")) else 2 * HIDDEN
        moved = min(plan.received if kind.startswith("combine") else plan.sent) * row_bytes
        wrong = sorted({each.check for each in found} - {"ok"})
        return (
            f"{median:.1f} us min {min(times):.1f} net {moved / median / 1e3:.1f} GB/s "
            f"({moved / 1e6:.1f} MB) "
            f"rows {wrong[0] if wrong else 'ok'}"
            + (f" HOST LATE in {late}/{len(times)}" if late else "")
        )


def changed(tuning: Tuning, change: str) -> Tuning:
    """``tuning`` with what ``change`` says, as ``push.chunk=8,pushers=32``."""
    for part in [] if change == BASE else change.split(","):
        name, _, value = part.partition("=")
        role, _, inner = name.rpartition(".")
        new: Any = float(value) if "." in value else int(value)
        if role:
            name, new = role, replace(getattr(tuning, role), **{inner: new})
        tuning = replace(tuning, **{name: new})
    return tuning


def run_changed(setting: Setting) -> int:
    """:func:`run`, with the engine's numbers changed."""

    def tuned(*given: Any, **options: Any) -> Tuning:
        return changed(peer_tuning(*given, **options), setting.change)

    def no_memory(*_: Any, **__: Any) -> int:
        return 0

    kept = ("receive_bytes", "heap_bytes") if setting.rings else ()
    changes = {"peer_tuning": tuned} | dict.fromkeys(kept, no_memory)
    with mock.patch.multiple(ring_engine, **changes):
        return run(setting)


def run(setting: Setting) -> int:
    """How many kinds failed or were wrong. Like ``run_virtual_ranks``, on two GPUs; raises
    ThreadsFailed.
    """
    world, picks = SplitWorld(setting.devices), draw_picks(setting.grid.world_size, setting.tokens)
    streams = [torch.cuda.Stream(device) for device in world.devices]

    def run_rank(rank: int) -> int:
        torch.cuda.set_device(world.devices[rank])
        with torch.cuda.stream(streams[rank]), torch.no_grad():
            bad = Rank(SplitGroup(world, rank), setting, picks).go()
            streams[rank].synchronize()
        return bad

    return run_threads(len(streams), run_rank, world.lose, LIMIT)[0]


def parse_settings(arguments: Sequence[str]) -> list[Setting]:
    """Combinations that the command line asks for; lists are separated by commas."""
    parser = argparse.ArgumentParser(
        description="Times of four ranks on two GPUs. --engine, --map, --sms: lists too."
    )
    parser.add_argument("--engine", default="twolevel", help="of twolevel,nvlink (twolevel)")
    parser.add_argument(
        "--grid",
        default="2x2",
        help="nodes x ranks of a node (2x2); 1x2 and 2x1 are a GPU per rank",
    )
    parser.add_argument(
        "--map", default="A", help="of A,B: ranks of a node on one GPU, or on both (A)"
    )
    parser.add_argument(
        "--sms", default="24", help="multiprocessors of a rank (24), or all: its whole share"
    )
    parser.add_argument("--tokens", default=4096, type=int, help="of a rank (4096)")
    parser.add_argument(
        "--kinds", default=",".join(PLAIN_KINDS), help=f"of {','.join(KINDS)} (the first four)"
    )
    parser.add_argument(
        "--rounds", default=5, type=int, help=f"that are timed, {CALLS} calls each (5)"
    )
    parser.add_argument("--tuning", default=BASE, help="changes, separated by spaces (base: none)")
    parser.add_argument("--rings", action="store_true", help="no memory for calls without rings")
    given = parser.parse_args(arguments)
    try:
        grid = Topology(*map(int, given.grid.split("x")))
        sms = [None if each == "all" else int(each) for each in given.sms.split(",")]
    except (TypeError, ValueError) as error:
        parser.error(
            f"--grid ({given.grid}) must be like 2x2, --sms ({given.sms}) like 24 or all: {error}"
        )
    lists = {name: getattr(given, name).split(",") for name in ("engine", "map", "kinds")}
    for (name, each), known in zip(lists.items(), (ENGINES, MAPS, KINDS), strict=True):
        if not set(each) <= set(known):
            parser.error(f"--{name} ({','.join(each)}) must be of {','.join(known)}")
    if min(given.tokens, given.rounds) < 1:
        parser.error(f"--tokens ({given.tokens}) and --rounds ({given.rounds}) must be at least 1")
    settings = [
        Setting(
            grid, engine, where, count, given.tokens, tuple(lists["kinds"]), given.rounds,
            change, given.rings,
        )
        for engine, where, count, change in product(
            lists["engine"], lists["map"], sms, given.tuning.split()
        )
    ]  # fmt: skip
    if any(len(set(setting.devices)) < min(2, GPUS) for setting in settings):
        parser.error(
            f"--map ({given.map}) puts all ranks of grid {grid} on one GPU: take the other map"
        )
    return settings


def main(settings: list[Setting]) -> int:
    """Exit status."""
    if "expandable" in os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", ""
    ):
        raise RuntimeError(
            "peers do not see expandable_segments: unset PYTORCH_ALLOC_CONF, "
            "PYTORCH_CUDA_ALLOC_CONF"
        )
    virtual_environment()
    if torch.cuda.device_count() < GPUS:
        raise RuntimeError(
            f"{torch.cuda.device_count()} GPU(s) seen: it takes {GPUS} that reach each other"
        )
    sys.setswitchinterval(1e-4)
    enable_peers()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}", flush=True)
    bad = 0
    for setting in settings:
        begin = time.monotonic()
        bad += run_changed(setting)
        print(f"{setting}: took {time.monotonic() - begin:.1f} s", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    asked, code = parse_settings(sys.argv[1:]), 1
    try:
        code = main(asked)
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # threads that are stuck would keep the process
