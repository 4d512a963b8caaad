"""The network between nodes as NVSHMEM's device calls use it, which it replaces (``two_net.py``).

A put with a signal is a message: its bytes are read from the source and reach the destination part
by part at any later time; when all are there the signal is added. Messages overtake each other,
unless a fence stood between them: it orders what its program, and kernels of its rank that are
over, have sent to a rank before what the program sends there afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.pages import ByteMap, raw, spans
from tokenyard.testing.simulator.program import Program
from tokenyard.testing.simulator.simulation_errors import AddressError
from tokenyard.testing.simulator.weak import Pending

_SET, _ADD = 9, 10
_UNIT = 8


@dataclass(eq=False)
class Message:
    """A put. ``parts``: bytes (begin, end) on their way; ``behind``: what must be there before."""

    sender: Program
    to: int
    source: int
    target: int
    signal: int
    value: int
    operation: int
    parts: list[tuple[int, int]]
    behind: list[Message]
    over: bool = False


class Network:
    """All messages of a simulation. How slow it is comes from the seed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._rng = Random(machine.seed + 1_000_003)
        self._pace = self._rng.choice((0.02, 0.1, 0.5))
        self._fences: dict[int, list[Message]] = {}  # by program: what was on its way then
        self.regions: list[tuple[list[int], int]] = []  # where each rank's part begins, bytes
        self.on_way: list[Message] = []

    def pass_time(self) -> None:
        """Something may arrive."""
        if self.on_way and self._rng.random() < self._pace:
            self.deliver_one()

    def deliver_one(self) -> None:
        """A part of some message arrives, or its signal."""
        free = [message for message in self.on_way if all(other.over for other in message.behind)]
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
        p = self._machine.network_call()
        assert operation in (_SET, _ADD)
        assert num_bytes > 0
        where = self._translate(p, target, num_bytes, to)
        self._translate(p, source, num_bytes, to)
        flag = self._translate(p, signal, 8, to)
        fenced = self._fences.get(p.serial, ())
        behind = [each for each in fenced if each.to == to and not each.over]
        parts = [(0, num_bytes)]
        self.on_way.append(Message(p, to, source, where, flag, value, operation, parts, behind))

    def fence(self) -> None:
        p = self._machine.network_call()
        running = self._machine.streams[p.rank][0]
        self._fences[p.serial] = [
            message
            for message in self.on_way
            if message.sender is p
            or (message.sender.rank == p.rank and message.sender.launch is not running)
        ]

    # Inside

    def _translate(self, p: Program, address: int, num_bytes: int, to: int) -> int:
        """Where the bytes at an address of the caller's own region are at rank ``to``."""
        for lows, size in self.regions:
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
        data = raw(message.source + low, (cut - low) // _UNIT, np.uint64).copy()
        addresses = np.arange(message.target + low, message.target + cut, _UNIT, dtype=np.uint64)
        memory = self._machine.memory
        stores = ByteMap()
        stores.put(spans(addresses, _UNIT), data)
        memory.write(stores, Pending(message.sender.rank, memory.now))

    def _signal(self, message: Message) -> None:
        memory, before = self._machine.memory, raw(message.signal, 1, np.uint64).copy()
        signal = raw(message.signal, 1, np.int64)
        signal[0] = message.value + (signal[0] if message.operation == _ADD else 0)
        where = spans(np.array([message.signal], np.uint64), 8)
        memory.after_atomic(Pending(message.sender.rank, memory.now), where, before)
        self._machine.happened()
        message.over = True
        message.behind = []
        self.on_way.remove(message)
