"""Kills ranks under load, many times: ``python tests/run.py kill_many --engine nvlink --times 50``.
For developers; ``test_kill_many.py`` runs it on CPU ranks.

Every round has two fresh processes, a GPU each: the first two that are visible, so jobs on other
pairs run beside (``CUDA_VISIBLE_DEVICES=2,3``). They dispatch and combine without a pause, batches
of all layouts and routings, and compare every call, bit for bit, with the first one, which the
oracle has checked. At a random moment one of them is killed (SIGKILL). The other one gets
``PeerTimeout``, calls ``recover()``, and makes calls alone, which the oracle checks. Engine
low_latency raises nothing and needs no ``recover()``: its call ends without the rank; rows may be
gone, and none may be wrong. Engine collective runs over gloo.

Printed are for each round the seconds from the kill to the exception (low_latency: to the end of
the call) and from there to the end of the first good call. A rank that takes longer than
``--limit`` for both hangs: its stacks are printed, and the next round begins. Round 0 is a
rehearsal, which fills Triton's cache; its times do not count. Exit status: 0 if nothing hung, no
row was wrong and nothing else was raised, however long it took. The last line is JSON.

While a round is under way, processes of the next ones start, join their groups, make their CUDA
contexts and batches with what the oracle says of them, and wait at a gate. Objects, calls, checks,
kills and times come behind it, of one round at a time. What others do meanwhile can only add to
times.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from cases import check_combined, check_received
from recovering import Left
from tokenyard.engines.known import COLLECTIVE, ENGINES, LOW_LATENCY, TWOLEVEL
from tokenyard.launch import forks, joined, local_store, preload
from tokenyard.rendezvous import group_store
from tokenyard.testing import ROUTINGS

RANKS, BATCHES, TOKENS, TOPK, EXPERTS = 2, 6, 64, 4, 16
FLAT, MAJOR, PADDED = ty.Layout
PATIENCE = 300.0
"""Seconds that ranks wait for each other before anybody is killed: kernels are compiled."""
LONGEST_LOAD = 0.5
"""Most seconds under load."""
AHEAD = 3
"""Rounds whose processes wait at the gate, or are on the way there, while another is under way."""
GO, LOADED = "the gate is open", "under load"
PRELOADED = (
    "tokenyard.engines.low_latency",
    "tokenyard.engines.ring_engine",
    "tokenyard.memory.cuda",
    "torch.distributed._symmetric_memory",
    "triton.compiler",
)
"""What objects import when they need it."""
STACKS = 1
"""Exit code of a process that ``faulthandler`` ends."""


class Options(NamedTuple):
    """Of all rounds."""

    engine: str
    device: str
    timeout: float
    limit: float
    seed: int


class Started(NamedTuple):
    """Processes of a round. ``random`` says who is killed, and when."""

    number: int
    options: Options
    random: Random
    victim: int
    store: dist.Store
    pipes: list[Connection]
    processes: list[BaseProcess]


class Seen(NamedTuple):
    """What the survivor says. Times are of the clock that all processes share."""

    told: float = 0.0
    good: float = 0.0
    calls: int = 0
    wrong: str = ""
    error: str = ""


class Round(NamedTuple):
    """How one ended. ``hang``: while what was waited for; empty if it did not. ``seconds``: from
    the gate to the end of its processes.
    """

    number: int
    victim: int
    seen: Seen = Seen()
    killed: float = 0.0
    hang: str = ""
    seconds: float = 0.0

    @property
    def ending(self) -> str:
        """In a word."""
        if self.hang:
            return "hang"
        return "wrong" if self.seen.wrong else "error" if self.seen.error else "good"

    def __str__(self) -> str:
        told, good = self.seen.told - self.killed, self.seen.good - self.seen.told
        text = f"{self.number:5} {self.victim:6} {self.seen.calls:6}"
        if self.ending == "good":
            return f"{text} {told:12.3f} {good:12.3f}  good"
        return f"{text}  {self.ending}: {self.hang or self.seen.wrong or self.seen.error}"


# One rank


class Batch:
    """One dispatch, whose rows come back as they are, of all ranks or of those not ``gone``."""

    def __init__(
        self, low: bool, me: int, here: torch.device, seed: int, gone: tuple[int, ...] = ()
    ) -> None:
        self.low, self.me = low, me
        self.case = Left(
            RANKS, seed=seed, gone=gone, layout=(PADDED, MAJOR, FLAT)[seed % (2 if low else 3)],
            exact=not low and seed % 2 == 0, routing=tuple(ROUTINGS)[seed % len(ROUTINGS)],
            num_tokens=TOKENS, num_topk=TOPK, num_experts=EXPERTS, hidden=hidden_on(here),
        )  # fmt: skip
        self.x = self.case.x[me].to(here)
        self.idx, self.weights = (each.to(here) for each in self.case.asked[me])
        self.expected = self.case.expected  # made ahead: it takes time

    def call(self, ep: ty.ExpertParallel) -> tuple[ty.Received, Tensor]:
        """What comes, and sums, once the device has them."""
        recv = ep.dispatch(self.x, self.idx, self.weights, **self.case.options)
        y = ep.combine(recv.x, recv.handle, weighted=self.low)
        ep.check()
        return recv, y

    def sums(self, absent: tuple[int, ...] = ()) -> Tensor:
        """What the oracle says, maybe without some ranks."""
        rows, lacking = [each.x for each in self.expected], [absent] * RANKS
        return self.case.combined(self.me, rows, weighted=self.low, absent=lacking).x

    def check(self, recv: ty.Received, y: Tensor) -> None:
        """Against the oracle."""
        check_received(recv, self.case, self.me)
        check_combined(y, self.case, self.me, self.sums())

    def compare(self, recv: ty.Received, y: Tensor, first: tuple[ty.Received, Tensor]) -> None:
        """With the first results, on the device."""
        there = first[0].source >= 0
        assert torch.equal(there, recv.source >= 0), "other rows are there"
        assert torch.equal(first[0].source[there], recv.source[there]), "source differs"
        rows = there.view(recv.x.shape[:-1])
        assert torch.equal(_bits(first[0].x[rows]), _bits(recv.x[rows])), "x differs"
        assert torch.equal(_bits(first[1]), _bits(y)), "y differs"

    def check_without(self, recv: ty.Received, y: Tensor, victim: int, alone: bool) -> None:
        """Of engine low_latency: rows are what they say, this rank's own are all there, sums have
        the part of ``victim`` whole or not at all. ``alone``: not at all, and none of its rows.
        """
        source = recv.source.flatten()
        places = (source >= 0).nonzero().flatten()
        found, right = source[places].cpu(), self.expected[self.me].source.flatten()
        own = found[found >> 32 == self.me]
        assert torch.equal(own, right[(right >= 0) & (right >> 32 == self.me)]), "own rows are gone"
        assert not alone or len(own) == len(found), "rows of the dead rank"
        table: list[Any] = [self.case.x[int(each) >> 32][int(each) & 0xFFFFFFFF] for each in found]
        rows = recv.x.flatten(0, -2)[places].cpu()
        assert not table or torch.equal(_bits(torch.stack(table)), _bits(rows)), "x differs"
        got = _bits(y.cpu())
        good = (got == _bits(self.sums((victim,)))).all(1)
        if not alone:
            good |= (got == _bits(self.sums())).all(1)
        assert good.all(), "a sum has a part of the dead rank's part"


def hidden_on(device: torch.device) -> int:
    return 1024 if device.type == "cuda" else 64


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def play(me: int, victim: int, options: Options, port: int, pipe: Connection) -> None:
    """The process of a rank."""
    status, seen = 2, Seen()
    try:
        with joined(me, RANKS, options.device, port=port, name="kill", timeout=PATIENCE) as here:
            torch.set_num_threads(1)
            seen = live(me, victim, options, here, pipe)
            status = 0
            raise SystemExit  # no farewell, in which the dead rank would be waited for
    except AssertionError:
        seen = Seen(wrong=traceback.format_exc())
    except Exception:
        seen = Seen(error=traceback.format_exc())
    finally:
        with suppress(OSError):
            pipe.send(seen)
        os._exit(status)


def live(me: int, victim: int, options: Options, here: torch.device, pipe: Connection) -> Seen:
    """Load until the other one is dead, then calls alone."""
    low = options.engine == LOW_LATENCY
    seeds = range(options.seed * BATCHES, (options.seed + 1) * BATCHES)
    load = [Batch(low, me, here, seed) for seed in seeds]
    alone = load if low else [Batch(low, me, here, seed, (victim,)) for seed in seeds]
    if here.type == "cuda":
        triton: Any = importlib.import_module("triton.runtime.cache")
        triton.triton_key()  # else the first kernel waits for it: a hash of the whole compiler
    assert pipe.recv() == GO
    with object_of(options, here, PATIENCE) as first:
        results = [batch.call(first) for batch in load]
        for batch, result in zip(load, results, strict=True):
            batch.check(*result)
    meet(me)
    ep, calls, told = object_of(options, here, options.timeout), 0, 0.0
    last: Callable[[], None] | None = None
    pipe.send(LOADED)
    faulthandler.dump_traceback_later(LONGEST_LOAD + options.limit, exit=True)
    while not told:
        batch, result = load[calls % BATCHES], results[calls % BATCHES]
        try:
            recv, y = batch.call(ep)
        except ty.PeerTimeout as error:
            told = time.monotonic()
            if error.rank not in (victim, -1):
                raise
            continue
        if low and not all(ep.active_ranks):
            told, last = time.monotonic(), partial(batch.check_without, recv, y, victim, False)
            continue
        batch.compare(recv, y, result)
        calls += 1
    if not low:
        assert ep.recover() == [me]
    results = [alone[0].call(ep)]
    good = time.monotonic()
    results += [batch.call(ep) for batch in alone[1:]]
    if last is not None:
        last()
    for batch, result in zip(alone, results, strict=True):
        if low:
            batch.check_without(*result, victim, True)
        else:
            batch.check(*result)
    ep.close()
    return Seen(told, good, calls)


def object_of(options: Options, here: torch.device, timeout: float) -> ty.ExpertParallel:
    group = dist.new_group(backend="gloo") if options.engine == COLLECTIVE else None
    return ty.ExpertParallel(
        group, engine=options.engine, num_experts=EXPERTS, num_topk=TOPK, hidden=hidden_on(here),
        max_tokens_per_rank=TOKENS, timeout=timeout, device=here,
        topology=(1, RANKS) if options.engine == TWOLEVEL else None,
    )  # fmt: skip


def meet(me: int) -> None:
    """Both ranks, without a collective."""
    store: Any = group_store(dist.group.WORLD)
    store.set(f"ready/{me}", "")
    store.wait([f"ready/{rank}" for rank in range(RANKS)], timedelta(seconds=PATIENCE))


# All rounds


def hear(pipe: Connection, process: BaseProcess, seconds: float) -> Any:
    """What a rank says; None if it says nothing in time, as one that prints its stacks does."""
    with suppress(EOFError, OSError):
        return pipe.recv() if pipe.poll(seconds) else None
    process.join(10)
    died = process.exitcode not in (None, STACKS)
    return Seen(error=f"ended with exit code {process.exitcode}") if died else None


def ended(number: int, victim: int, said: Seen | None, killed: float, where: str) -> Round:
    """A round of which the last word is ``said``; None: it hung."""
    return Round(number, victim, said or Seen(), killed, "" if said else where)


def start_round(number: int, options: Options, target: Callable[..., None] = play) -> Started:
    """Two processes that come to the gate."""
    random, store = Random(f"{options.seed}/{number}"), local_store()
    started = Started(number, options, random, random.randrange(RANKS), store, [], [])
    mine = options._replace(seed=options.seed + number)
    for me in range(RANKS):
        ours, theirs = Pipe()
        given = me, started.victim, mine, store.port, theirs
        process = forks().Process(target=target, args=given, daemon=True)
        process.start()
        theirs.close()
        started.pipes.append(ours)
        started.processes.append(process)
    return started


def run_round(started: Started) -> Round:
    """Opens the gate, kills one process, and ends both."""
    begin = time.monotonic()
    try:
        found = play_round(started)
    finally:
        for process in started.processes:
            process.kill()
            process.join(10)
    return found._replace(seconds=time.monotonic() - begin)


def play_round(started: Started) -> Round:
    number, options, random, victim, _, pipes, processes = started
    for pipe in pipes:
        with suppress(OSError):  # it has ended, and said why
            pipe.send(GO)
    for me, pipe in enumerate(pipes):
        said = hear(pipe, processes[me], 2 * PATIENCE)
        if said != LOADED:
            return ended(number, victim, said, 0.0, f"rank {me} starts")
    time.sleep(random.uniform(0.0, LONGEST_LOAD))
    killed, survivor = time.monotonic(), 1 - victim
    processes[victim].kill()
    processes[victim].join(10)
    if processes[victim].exitcode != -signal.SIGKILL:  # it had ended, and may have said why
        said = hear(pipes[victim], processes[victim], 0.0)
        return ended(number, victim, said, 0.0, f"while rank {victim} is under load")
    said = hear(pipes[survivor], processes[survivor], 2 * (LONGEST_LOAD + options.limit))
    return ended(number, victim, said, killed, f"after {options.limit} s")


def summary(options: Options, rounds: Sequence[Round]) -> dict[str, Any]:
    """``rounds``: with the rehearsal."""
    endings = [each.ending for each in rounds]
    good = [each for each in rounds[1:] if each.ending == "good"]
    found = [each.seen.told - each.killed for each in good]
    first = [each.seen.good - each.seen.told for each in good]
    whole = [each.seconds for each in rounds[1:]]
    times = {"found": found, "first_good_call": first, "round": whole}
    return {
        "engine": options.engine,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "timeout": options.timeout,
        "rounds": len(rounds) - 1,
        **{f"{name}s": endings.count(name) for name in ("good", "hang", "wrong", "error")},
        "calls_compared": sum(each.seen.calls for each in rounds),
        **{f"{name}_median": statistics.median(each or [-1.0]) for name, each in times.items()},
        **{f"{name}_max": max(each, default=-1.0) for name, each in times.items()},
        "over_1_s": sum(each > 1.0 for each in first),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", required=True, choices=ENGINES[1:])
    parser.add_argument("--times", type=int, default=50, help="rounds besides the rehearsal")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="")
    parser.add_argument("--timeout", type=float, default=1.0, help="of the object, in seconds")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds behind a kill")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    device = given.device or ("cuda" if torch.cuda.device_count() >= RANKS else "cpu")
    if device == "cuda" and torch.cuda.device_count() < RANKS:
        sys.exit(f"needs {RANKS} GPUs, and sees {torch.cuda.device_count()}")
    if device == "cpu" and given.engine != COLLECTIVE:
        sys.exit(f"engine {given.engine} needs {RANKS} GPUs; engine collective runs on CPUs too")
    options = Options(given.engine, device, given.timeout, given.limit, given.seed)
    print(f"{given.engine} on {device}, timeout {given.timeout} s\nround victim  calls", end="")
    print("  kill to told  to good call", flush=True)
    preload(*PRELOADED)
    total = given.times + 1
    waiting = deque(start_round(number, options) for number in range(min(AHEAD, total)))
    rounds = list[Round]()
    for number in range(total):
        if number + AHEAD < total:
            waiting.append(start_round(number + AHEAD, options))
        rounds.append(run_round(waiting.popleft()))
        print(f"{rounds[-1]}{'' if number else ' (rehearsal)'}", flush=True)
    found = summary(options, rounds)
    print(json.dumps(found))
    sys.exit(found["goods"] != len(rounds))


if __name__ == "__main__":
    main()
