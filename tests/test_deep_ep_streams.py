"""Asynchronous calls on GPUs: which stream waits for what, told by stand-ins for CUDA's streams and events."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenyard.deep_ep import events, streams
from tokenyard.deep_ep.events import EventHandle, EventOverlap

GPU = torch.device("cuda", 0)


class Machine:
    """Streams that are names; ``log`` has what happened, in order."""

    def __init__(self) -> None:
        self.now, self.log = "compute", []
        machine = self

        class Event:
            def record(self) -> None:
                self.of = machine.now
                machine.log.append(f"record {machine.now}")

            def wait(self) -> None:
                machine.log.append(f"{machine.now} waits for {self.of}")

        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda device: "comm",
            is_available=lambda: True,
            is_initialized=lambda: True,
            current_stream=lambda device: self.now,
            current_device=lambda: GPU.index,
            stream=self.on,
        )

    @contextmanager
    def on(self, stream: str) -> Generator[None, None, None]:
        before, self.now = self.now, stream
        yield
        self.now = before


class Memory(torch.Tensor):
    """A tensor that says which streams keep it."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        self.keepers = [*getattr(self, "keepers", []), stream]


def memory() -> Memory:
    return torch.zeros(1).as_subclass(Memory)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for module in (events, streams):
        stand_in = SimpleNamespace(**{name: getattr(torch, name) for name in ("is_grad_enabled", "no_grad", "device")})
        stand_in.cuda = made.cuda
        monkeypatch.setattr(module, "torch", stand_in)
    return made


def run(machine: Machine, **options: Any) -> tuple[Any, EventOverlap, list[Memory]]:
    reads, results = [memory(), memory()], (memory(), (memory(), None))

    def call() -> Any:
        machine.log.append(f"call on {machine.now}")
        return results

    got, event = streams.Streams().run(call, GPU, options["after"], options["later"], reads[0], (reads[1], None))
    assert got is results
    return results, event, reads


def test_at_once(machine: Machine) -> None:
    """The current stream waits for the event before, if there is one, and makes the call itself."""
    after = EventOverlap(EventHandle())
    machine.log.clear()
    for before, expected in ((None, []), (EventOverlap(), []), (after, ["compute waits for compute"])):
        results, event, reads = run(machine, after=before, later=False)
        assert machine.log == [*expected, "call on compute"] and event.event is None
        assert not any(hasattr(each, "keepers") for each in (*reads, results[0]))
        machine.log.clear()


def test_later(machine: Machine) -> None:
    """The communication stream waits for the event (or for all that the current stream has), and the caller for it."""
    results, event, reads = run(machine, after=None, later=True)
    assert machine.log == ["record compute", "comm waits for compute", "call on comm", "record comm"]
    assert [each.keepers for each in reads] == [["comm"], ["comm"]]
    assert results[0].keepers == results[1][0].keepers == ["compute"]
    machine.log.clear()
    event.current_stream_wait()
    with event:
        pass
    assert machine.log == ["compute waits for comm"] * 2
    with machine.on("side"):
        after = EventOverlap(EventHandle())
    machine.log.clear()
    run(machine, after=after, later=True)
    assert machine.log == ["comm waits for side", "call on comm", "record comm"]


@pytest.mark.parametrize("made_on_comm", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_handle_from_the_other_stream(machine: Machine, made_on_comm: bool, later: bool) -> None:
    """Its plan is kept for the stream that reads it, unless that stream made it."""
    plan = memory()
    handle = SimpleNamespace(on_comm=made_on_comm, native=SimpleNamespace(plan=(plan, None)))
    known: Any = handle
    streams.Streams().run(lambda: None, GPU, None, later, handle=known)
    keeper = {False: "compute", True: "comm"}[later]
    assert getattr(plan, "keepers", []) == ([keeper] if later or made_on_comm else [])
