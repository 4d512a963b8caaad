"""Pools of worker processes that run test bodies, kept from test to test."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait

import torch

from tokenyard.launch import local_store
from tokenyard.testing.job import Ending, Job, Outcome, is_fine, judge
from tokenyard.testing.member import Member
from tokenyard.testing.worker import CAN_REST

START_TIMEOUT = 1200.0
"""Seconds for a worker to start and to join its group."""

GRACE = 3.0
"""Seconds that the other ranks get to end, or to fail too, after one has failed."""

MOST_LEFT = 30
"""Threads that bodies may leave in a worker. Those of gloo groups that nobody destroys poll 100
times a second: with hundreds of them tests take a quarter longer."""


class Pool:
    """``world_size`` workers in one process group."""

    def __init__(self, world_size: int, device: str, port: int, name: str) -> None:
        self.members = [Member(rank, world_size, device, port, name) for rank in range(world_size)]
        self._usual = 0
        # NCCL's watchdogs would take a long rest for a hang
        self._can_rest = CAN_REST and device == "cpu"
        try:
            self._join()
        except BaseException:
            self.kill()
            raise

    def _join(self) -> None:
        joining = list(self.members)
        while joining:
            ready = wait([member.pipe for member in joining], START_TIMEOUT)
            for member in [member for member in joining if member.pipe in ready] or joining[:1]:
                joining.remove(member)
                member.check_joined()

    @property
    def crowded(self) -> bool:
        """Whether bodies have left many threads, beside those behind the first of them."""
        most = max(member.num_threads for member in self.members)
        self._usual = self._usual or most
        return most > self._usual + MOST_LEFT

    def run(self, job: Job, timeout: float, may_die: tuple[int, ...]) -> dict[int, Outcome]:
        """How a body ended, by rank, after ``timeout`` seconds at most. Prints what ranks print."""
        for member in self.members:
            member.send(job)
        outcomes: dict[int, Outcome] = {}
        waiting = list(self.members)
        deadline, overdue = time.monotonic() + timeout, f"still running after {timeout} s"
        while waiting:
            ready = wait([member.pipe for member in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for member in [member for member in waiting if member.pipe in ready]:
                waiting.remove(member)
                outcome = outcomes[member.rank] = member.outcome()
                fine = is_fine(outcome, member.rank in may_die) or outcome.ending is Ending.SKIPPED
                if not fine and time.monotonic() + GRACE < deadline:
                    deadline = time.monotonic() + GRACE
                    overdue = f"still running {GRACE} s after rank {member.rank} failed"
        for member in self.members:
            for line in member.new_output().splitlines():
                print(f"[rank {member.rank}] {line}")
        for member in waiting:
            member.process.terminate()
        return outcomes | {member.rank: member.stuck(overdue) for member in waiting}

    def rest(self) -> None:
        """Until :meth:`wake` workers cost nothing: gloo's threads poll 100 times a second."""
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for member in self.members if self._can_rest else ():
            with suppress(ProcessLookupError):  # it has gone
                os.kill(member.process.pid or 0, number)

    def kill(self) -> None:
        for member in self.members:
            member.kill()


class Pools:
    """The pools of this process, one for each name and number of ranks, started when needed."""

    def __init__(self) -> None:
        self._store = local_store()
        self._pools: dict[tuple[str, str, int], Pool] = {}
        self._started = 0

    def run(
        self,
        job: Job,
        world_size: int,
        device: str,
        timeout: float,
        may_die: tuple[int, ...],
        name: str = "",
    ) -> None:
        """Run a body in the pool ``name``; raises as :func:`judge` does. Ends a pool that may be
        out of step."""
        __tracebackhide__ = True
        pool = self._take(name, world_size, device)
        endings: set[Ending] = set()
        try:
            outcomes = pool.run(job, timeout, may_die)
            endings = {outcome.ending for outcome in outcomes.values()}
        finally:
            if endings in ({Ending.PASSED}, {Ending.SKIPPED}) and not pool.crowded:
                self._pools[name, device, world_size] = pool
                pool.rest()
            else:
                pool.kill()
        judge(outcomes, may_die)

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].kill()

    def _take(self, name: str, world_size: int, device: str) -> Pool:
        pool = self._pools.pop((name, device, world_size), None)
        if pool is not None and all(member.process.is_alive() for member in pool.members):
            pool.wake()
            return pool
        if pool is not None:
            print("a worker died between two tests; its pool starts anew", file=sys.stderr)
            pool.kill()
        if device == "cuda" and torch.cuda.device_count() == 0:
            raise RuntimeError("TOKENYARD_TEST_DEVICE=cuda, but torch sees no GPU here; use cpu")
        self._started += 1
        return Pool(world_size, device, self._store.port, f"pool{self._started}")


@functools.cache
def pools() -> Pools:
    """The pools of this process; they end with it."""
    made = Pools()
    atexit.register(made.close)
    return made
