"""Ranks as threads: a gate that they pass together, and a way to run them that ends."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tokenyard.errors import PeerLost, PeerTimeout

_T = TypeVar("_T")


class Gate:
    """All ranks' threads pass together, and may hand each other a value each. ``members``: of
    ``world_size`` ranks, those there are (default: all).
    """

    def __init__(self, world_size: int, members: Sequence[int] | None = None) -> None:
        self._members = range(world_size) if members is None else members
        self._arrived = [0] * world_size
        # by parity of the passage: nobody enters n + 2 before all have left n
        self._values: list[list[Any]] = [[None] * world_size, [None] * world_size]
        self._changed = threading.Condition()
        self._lost: dict[int, str] = {}
        # passage, and the rank that gave up there first
        self._given_up: tuple[int, int] | None = None

    def lose(self, rank: int, why: str) -> None:
        """From now on nobody waits for ``rank``."""
        with self._changed:
            self._lost[rank] = why
            self._changed.notify_all()

    def meet(self, rank: int, what: str, timeout: float, value: Any = None) -> list[Any]:
        """Everybody's value by rank, once all have come. If one rank gives up, all do. PeerTimeout:
        a rank did not come within ``timeout`` seconds, or gave up here; PeerLost: a rank has ended.
        """
        with self._changed:
            self._arrived[rank] += 1
            number = self._arrived[rank]
            self._values[number % 2][rank] = value
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._over(number) or not self._late(number) or self._gone(number), timeout
            )
            if self._over(number) or self._late(number):
                self._raise(rank, number, what, timeout)
            return list(self._values[number % 2])

    def _over(self, number: int) -> bool:
        return self._given_up is not None and self._given_up[0] <= number

    def _late(self, number: int) -> list[int]:
        return [peer for peer in self._members if self._arrived[peer] < number]

    def _gone(self, number: int) -> list[int]:
        return [peer for peer in self._late(number) if peer in self._lost]

    def _raise(self, rank: int, number: int, what: str, timeout: float) -> None:
        first = self._given_up
        if first is None:
            self._given_up = (number, rank)
            self._changed.notify_all()
        late, gone = self._late(number), self._gone(number)
        if gone:
            raise PeerLost(
                f"rank {rank} waits at {what}, but rank {gone[0]} {self._lost[gone[0]]}", gone[0]
            )
        if first is not None and first[1] != rank:
            raise PeerTimeout(
                f"rank {rank} came to {what}, but rank {first[1]} has given up waiting there",
                first[1],
            )
        names = ", ".join(map(str, late))
        raise PeerTimeout(
            f"rank {rank} waited {timeout} s at {what} for rank(s) {names}", late[0] if late else -1
        )


class ThreadsFailed(RuntimeError):
    """Some ranks raised, or did not end in time. ``errors``: by rank, the first first."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def run_threads(
    world_size: int, run: Callable[[int], _T], lose: Callable[[int, str], None], timeout: float
) -> list[_T]:
    """``run(rank)`` on a thread for each rank; results by rank. ``lose(rank, why)`` is called when
    one has ended. ThreadsFailed: ranks raised, or did not end within ``timeout`` seconds; a stuck
    thread is left behind.
    """
    results: dict[int, _T] = {}
    errors: dict[int, BaseException] = {}

    def guarded(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:
            errors[rank] = error
            lose(rank, f"failed: {error!r}")
        else:
            lose(rank, "has finished")

    threads = [
        threading.Thread(target=guarded, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    _join(threads, timeout)
    stuck = {rank: _stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    if errors or stuck:
        raise ThreadsFailed(_describe(errors, stuck, timeout), errors)
    return [results[rank] for rank in range(world_size)]


def _join(threads: list[threading.Thread], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)  # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _describe(errors: dict[int, BaseException], stuck: dict[int, str], timeout: float) -> str:
    parts = [
        f"rank {rank}:\n{''.join(traceback.format_exception(error))}"
        for rank, error in errors.items()
    ]
    parts += [
        f"rank {rank} still runs after {timeout} s:\n{stack}" for rank, stack in stuck.items()
    ]
    return "\n".join([f"{len(errors) + len(stuck)} rank(s) failed", *parts])
