"""Stand-ins for torch.cuda's streams and events on the CPU: each stream is a list of operations,
and a schedule runs them later.

What a stream is given runs in its order; streams go on independently of each other and of the host,
except where one waits for an event. :meth:`Machine.run` runs everything, always the stream that
``order`` names first among those that can go on: so an operation that nothing orders behind another
runs before it under one order or the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Event:
    """The last record of it counts; a wait for one never recorded waits for nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._records, self._done = machine, 0, 0

    def record(self, stream: Any = None) -> None:
        self._records += 1
        number = self._records
        (stream or self._machine.now).add(lambda: self._finish(number))

    def _finish(self, number: int) -> None:
        self._done = number

    def wait(self, stream: Any = None) -> None:
        number = self._records
        (stream or self._machine.now).add(None, lambda: self._done >= number)

    def query(self) -> bool:
        return self._done >= self._records


class Stream:
    """Operations in order, each with what it needs first."""

    def __init__(self, machine: Machine, name: str, index: int = 0) -> None:
        self._machine, self.name, self.device_index = machine, name, index
        self.device = torch.device("cuda", index)
        self.queue: list[tuple[Callable[[], Any] | None, Callable[[], bool]]] = []
        machine.streams.append(self)

    def add(
        self, operation: Callable[[], Any] | None, ready: Callable[[], bool] = lambda: True
    ) -> None:
        self.queue.append((operation, ready))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)


class Machine:
    """One GPU. ``log``: what ran, in the order in which it did."""

    def __init__(self, monkeypatch: Any) -> None:
        self.streams: list[Stream] = []
        self.log: list[str] = []
        self.capturing = False
        self._here = threading.local()
        self.main = Stream(self, "main")
        stands = {
            "Event": lambda *_, **__: Event(self),
            "Stream": lambda *_, **__: Stream(self, f"comm{len(self.streams)}"),
            "current_stream": lambda *_: self.now,
            "current_device": lambda: 0,
            "is_initialized": lambda: True,
            "is_current_stream_capturing": lambda: self.capturing,
            "stream": self.on,
        }
        for name, stand_in in stands.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda _: self.streams.index(self.now),
            raising=False,
        )

    @property
    def now(self) -> Stream:
        """The current stream, of each thread its own."""
        return getattr(self._here, "stream", self.main)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self._here.stream = self.now, stream or self.now
        try:
            yield
        finally:
            self._here.stream = before

    def launch(self, what: str) -> None:
        """An operation on the current stream."""
        here = self.now
        here.add(lambda: self.log.append(f"{what} on {here.name}"))

    def run(self, order: list[Stream]) -> list[str]:
        """Run all that is queued."""
        while True:
            able = [stream for stream in order if stream.queue and stream.queue[0][1]()]
            if not able:
                assert not any(stream.queue for stream in self.streams), (
                    "streams wait for each other"
                )
                return self.log
            operation, _ = able[0].queue.pop(0)
            if operation is not None:
                operation()
