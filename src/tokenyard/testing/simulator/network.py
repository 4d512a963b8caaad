# pyright: basic
# (Triton's interpreter has no types)
"""The network between nodes as NVSHMEM's device calls use it: puts take their time, and arrive in
any order.

What kernels call (``kernels/two_net.py``) is replaced while a simulation runs. A put with a signal
is a message: its bytes are read from the source, and reach the destination, part by part at any
later time; when all are there the signal is added. Messages overtake each other, unless a fence
stood between them: it orders what its program, and kernels of its rank that are over, have sent to
a rank before what the program sends there afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenyard.testing.simulator.pages import ByteMap, raw, spans
from tokenyard.testing.simulator.simulation_errors import AddressError
from tokenyard.testing.simulator.weak import Pending

if TYPE_CHECKING:
    from tokenyard.testing.simulator.program import Program
    from tokenyard.testing.simulator.scheduler import Simulator

_ADD = 10
_UNIT = 8


@dataclass(eq=False)
class Message:
    """A put on its way. ``parts``: bytes (begin, end) that have not arrived; ``behind``: what must
    be there before.
    """

    sender: Program
    to: int
    source: int
    target: int
    signal: int
    value: int
    parts: list[tuple[int, int]]
    behind: list[Message]
    over: bool = False


@dataclass
class Fence:
    """What a program has fenced: the messages that were on their way then."""

    before: list[Message] = field(default_factory=list)


class Network:
    """All messages of a simulation. How slow it is comes from the seed."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._rng = Random(sim.seed + 1_000_003)
        self._pace = self._rng.choice((0.02, 0.1, 0.5))
        self._regions: list[tuple[list[int], int]] = []
        self._fences: dict[int, Fence] = {}
        self._on_way: list[Message] = []

    def add_region(self, addresses: list[int], num_bytes: int) -> None:
        """A symmetric region: where each rank's part begins."""
        self._regions.append((addresses, num_bytes))

    @property
    def pending(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._on_way)

    def pass_time(self) -> None:
        """Something may arrive."""
        if self._on_way and self._rng.random() < self._pace:
            self.deliver_one()

    def deliver_one(self) -> None:
        """A part of some message arrives, or its signal."""
        free = [message for message in self._on_way if all(other.over for other in message.behind)]
        message = self._rng.choice(free)
        if message.parts:
            self._deliver_part(message)
        if not message.parts and self._rng.random() < 0.5:
            self._signal(message)

    # What programs call

    def put_signal(
        self,
        target: int,
        source: int,
        num_bytes: int,
        signal: int,
        value: int,
        operation: int,
        to: int,
    ) -> None:
        """``nvshmemx_putmem_signal_block``: addresses of the caller's own region."""
        p = self._sim.operations.network_step()
        assert operation == _ADD
        assert num_bytes > 0
        where = self._translate(p, target, num_bytes, to)
        self._translate(p, source, num_bytes, to)
        fenced = self._fences.get(p.serial)
        behind = (
            []
            if fenced is None
            else [other for other in fenced.before if other.to == to and not other.over]
        )
        message = Message(
            p, to, source, where, self._translate(p, signal, 8, to), value, [(0, num_bytes)], behind
        )
        self._on_way.append(message)

    def fence(self) -> None:
        """``nvshmem_fence``."""
        p = self._sim.operations.network_step()
        running = self._sim.streams[p.rank].queue[0]
        mine = [message for message in self._on_way if message.sender.rank == p.rank]
        before = [
            message
            for message in mine
            if message.sender is p or message.sender.launch is not running
        ]
        self._fences[p.serial] = Fence(before)

    # Inside

    def _translate(self, p: Program, address: int, num_bytes: int, to: int) -> int:
        """Where the bytes at an address of the caller's own region are at rank ``to``."""
        for lows, size in self._regions:
            at = address - lows[p.rank]
            if 0 <= at < size:
                if at + num_bytes > size:
                    break
                return lows[to] + at
        raise AddressError(
            f"{p.name} puts {num_bytes} bytes at {address:#x}, not inside a symmetric region of "
            f"its rank"
        )

    def _deliver_part(self, message: Message) -> None:
        at = self._rng.randrange(len(message.parts))
        low, high = message.parts.pop(at)
        middle = low + self._rng.randrange(0, high - low + 1, _UNIT)
        cut = middle if low < middle < high and self._rng.random() < 0.3 else high
        if cut < high:
            message.parts.append((cut, high))
        data = raw(message.source + low, cut - low).copy().view(np.uint64)
        addresses = np.arange(message.target + low, message.target + cut, _UNIT, dtype=np.uint64)
        memory = self._sim.memory
        stores = ByteMap()
        stores.put(spans(addresses, _UNIT), data)
        memory.deliver(Pending(message.sender.rank, memory.now), stores)

    def _signal(self, message: Message) -> None:
        cell = raw(message.signal, 8).view(np.int64)
        before = cell.copy().view(np.uint64)
        cell += message.value
        where = np.array([message.signal], np.uint64)
        self._sim.memory.after_atomic(
            Pending(message.sender.rank, self._sim.memory.now), spans(where, 8), before
        )
        self._sim.alarms.ring_at(where)
        self._sim.happened()
        message.over = True
        message.behind = []
        self._on_way.remove(message)


@contextmanager
def installed(network: Network) -> Iterator[None]:
    """Inside, NVSHMEM's calls of kernels are messages of ``network``."""

    def numbers(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: call(*(int(_plain(arg)) for arg in args))

    exchanged = {"nvshmem_put_signal": numbers(network.put_signal), "nvshmem_fence": network.fence}
    modules = [module for name, module in sys.modules.items() if name.endswith(".two_net")]
    before = [(module, name, getattr(module, name)) for module in modules for name in exchanged]
    for module, name, _ in before:
        setattr(module, name, exchanged[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _plain(value: Any) -> Any:
    """A number that the interpreter wraps."""
    handle = getattr(value, "handle", None)
    return getattr(value, "value", value) if handle is None else handle.data.reshape(-1)[0]
