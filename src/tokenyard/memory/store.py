"""A store of one process for ranks that take turns, as coroutines do."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

gone: weakref.WeakSet[Any] = weakref.WeakSet()
"""Stores whose process is known to be gone: torch prints a page for every question to one."""


class CooperativeStore(dist.Store):
    """A dictionary with the interface of ``torch.distributed.Store``; also a base for
    ``PrefixStore``. ``changes`` counts how often a value was set. ``yield_``: called over and over
    while a rank waits; lets others run. ``clock``: seconds, for timeouts."""

    timeout: timedelta  # torch's own, of waits without one

    def __init__(
        self,
        yield_: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self._yield, self._clock = yield_, clock
        self.set_timeout(timedelta(seconds=timeout))
        self._values: dict[str, bytes] = {}
        self.changes = 0

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _as_bytes(value)
        self.changes += 1

    def get(self, key: str) -> bytes:
        """Wait for a value. DistStoreError: it did not come."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a number, which is 0 at first. The sum."""
        total = int(self._values.get(key, b"0")) + value
        self.set(key, str(total))
        return total

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a value if it is ``expected_value`` now ("" is none too). The value afterwards."""
        expected = _as_bytes(expected_value)
        if self._values.get(key, b"") == expected:
            self.set(key, desired_value)
        return self._values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        """Whether all have values."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Forget a value. Whether there was one."""
        self.changes += 1
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many have values."""
        return len(self._values)

    # What a PrefixStore calls, from C++
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all have values. DistStoreError: they did not come."""
        limit = self.timeout if timeout is None else timeout
        missing = [key for key in keys if key not in self._values]
        if missing:
            deadline = self._clock() + limit.total_seconds()
            self._wait_for(lambda: self.check(keys), f"for {missing[0]!r}", deadline)
        if missing := [key for key in keys if key not in self._values]:
            raise dist.DistStoreError(
                f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(missing)}"
            )

    def now(self) -> float:
        """Seconds on the clock of timeouts."""
        return self._clock()

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        self._wait_for(lambda: False, "to look again", self._clock() + seconds)

    def _wait_for(self, ready: Callable[[], bool], what: str, deadline: float) -> None:
        """Let others run until ``ready()`` or the deadline. ``what``: is waited for."""
        while not ready() and self._clock() < deadline:
            self._yield()


def base_of(store: Any) -> Any:
    """What a store of prefixes stands on."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def leave(part: Any, num_ranks: int) -> None:
    """Delete a ``part`` of a store once all its ranks have come here: none reads it any more. A
    torch whose stores cannot say what they hold deletes nothing."""
    if base_of(part) in gone:
        return
    if part.add("left", 1) == num_ranks and hasattr(part, "list_keys"):
        for key in part.list_keys():
            part.delete_key(key)


def clock_of(store: dist.Store) -> tuple[Callable[[], float], Callable[[float], None], bool]:
    """Now, sleep for so many seconds, and whether ranks that meet in ``store`` take turns."""
    base = base_of(store)
    if isinstance(base, CooperativeStore):
        return base.now, base.sleep, True
    return time.monotonic, time.sleep, False


def _as_bytes(value: str | bytes) -> bytes:
    # A PrefixStore hands on bytes.
    return value.encode() if isinstance(value, str) else bytes(value)
