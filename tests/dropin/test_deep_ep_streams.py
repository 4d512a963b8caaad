"""Asynchronous calls on GPUs: which stream waits for what, told by stand-ins for CUDA's streams and
events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deep_ep_cost
from tokenyard import deep_ep
from tokenyard.deep_ep import streams
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import LowLatencyHandle, NormalHandle
from tokenyard.testing import Ranks, distributed_test

GPU = torch.device("cuda", 0)


class Machine:
    """Streams that are names; ``log`` has what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        machine = self

        class Event:
            of: Any = None

            def wait(self, stream: Any = None) -> None:
                machine.log.append(f"{stream or machine.now} waits for {self.of}")

        class Stream:
            def __init__(self, name: str = "comm") -> None:
                self.name = name

            def __repr__(self) -> str:
                return self.name

            def record_event(self, event: Event | None = None) -> Event:
                machine.log.append(f"record {self}")
                event = event or Event()
                event.of = self
                return event

            def wait_event(self, event: Event) -> None:
                event.wait(self)

        self.make, self.now, self.index = Stream, Stream("compute"), GPU.index
        self.cuda = {
            "Event": Event,
            "Stream": Stream,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_stream": lambda device=None: self.now,
            "device": self.on,
            "set_stream": self.go,
        }

    def go(self, stream: Any) -> None:
        self.now = stream

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self.index = self.index, index
        yield
        self.index = before


class Memory(torch.Tensor):
    """A tensor that says which streams keep it."""

    is_cuda, device = True, GPU

    def get_device(self) -> int:
        return GPU.index

    def record_stream(self, stream: Any) -> None:
        self.keepers = [*getattr(self, "keepers", []), repr(stream)]


def memory() -> Memory:
    return torch.zeros(1, dtype=torch.int64).as_subclass(Memory)


def keepers(*tensors: Any) -> list[list[str]]:
    return [getattr(each, "keepers", []) for each in tensors]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for name, stand_in in made.cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: made.index, raising=False)
    return made


def run(
    machine: Machine, made: streams.Streams, **options: Any
) -> tuple[Any, EventOverlap, list[Memory]]:
    reads, results = [memory(), memory()], (memory(), (memory(), None), [1, 2])

    def call(*_: Any) -> Any:
        machine.log.append(f"call on {machine.now}")
        return results

    got, event = made.run(
        call, (reads[0], (reads[1], None), 2), memory(), options["after"], options["later"]
    )
    assert got is results
    return results, event, reads


class Group:
    """Two ranks of which this is the first."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def open_store(self) -> Any:
        raise AssertionError

    def open_memory(self, timeout: float, members: Any = None) -> Any:
        raise AssertionError


def handle_of(plan: tuple[Any, ...] = (), *arrived: Any) -> Any:
    names = dict(zip(("source", "source_ranges"), arrived, strict=False))
    native: Any = SimpleNamespace(plan=plan, arrived=SimpleNamespace(**names))
    ep: Any = None
    return NormalHandle.around(ep, native, num_sms=20)


def test_at_once(machine: Machine) -> None:
    """The current stream waits for the event before, if there is one, and makes the call itself."""
    made, after = streams.Streams(), EventOverlap(EventHandle())
    machine.log.clear()
    for before, expected in (
        (None, []),
        (EventOverlap(), []),
        (after, ["compute waits for compute"]),
    ):
        results, event, reads = run(machine, made, after=before, later=False)
        assert machine.log == [*expected, "call on compute"] and event.event is None
        assert keepers(*reads, results[0], results[1][0]) == [[]] * 4
        machine.log.clear()


def test_later(machine: Machine) -> None:
    """The communication stream waits for the event (or for all that the current stream has), and
    the caller for it.
    """
    made = streams.Streams()
    for _ in range(2):  # the event before the call is used again, that behind it is the caller's
        results, event, reads = run(machine, made, after=None, later=True)
        assert machine.log == [
            "record compute",
            "comm waits for compute",
            "call on comm",
            "record comm",
        ]
        assert (
            keepers(*reads) == [["comm"]] * 2
            and keepers(results[0], results[1][0]) == [["compute"]] * 2
        )
        machine.log.clear()
        event.current_stream_wait()
        with event:
            pass
        assert machine.log == ["compute waits for comm"] * 2
        machine.log.clear()
    machine.go(machine.make("side"))
    after = EventOverlap(EventHandle())
    machine.go(machine.make("compute"))
    machine.log.clear()
    run(machine, made, after=after, later=True)
    assert (
        machine.log == ["comm waits for side", "call on comm", "record comm"]
        and machine.now.name == "compute"
    )


def test_on_another_device_than_the_current_one(machine: Machine) -> None:
    """The device of the tensors is the current one during the call, and only then; streams are its
    own.
    """
    made, seen = streams.Streams(), []
    for later in (False, True):
        machine.index = 1
        made.run(lambda: seen.append((machine.index, machine.now.name)), (), memory(), None, later)
        assert machine.index == 1
    assert seen == [(0, "compute"), (0, "comm")]


def test_a_call_that_raises(machine: Machine) -> None:
    """Stream and autograd are as before."""

    def call() -> Any:
        assert machine.now.name == "comm" and not torch.is_grad_enabled()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        streams.Streams().run(call, (), memory(), None, True)
    assert machine.now.name == "compute" and torch.is_grad_enabled()


def test_plans_are_kept_for_the_streams_that_read_them(machine: Machine) -> None:
    """Once for each stream, and not for the one that made them; what the caller's stream made is
    the caller's affair there.
    """
    made, other = streams.Streams(), streams.Streams()
    mine, early = memory(), memory()
    handle, before = handle_of((mine, None)), handle_of((early,))
    made.run(lambda: (memory(), handle), (), memory(), None, True)
    assert handle.made_on is made.comm() and before.made_on is None
    for later in (True, False, True, False):
        for each in (handle, before):
            made.run(lambda _: None, (each,), memory(), None, later, each)
    assert keepers(mine, early) == [["compute"], ["comm"]]
    other.run(lambda _: None, (handle,), memory(), None, True, handle)
    assert keepers(mine) == [["compute", "comm"]]


def test_items_of_a_handle_are_read_on_the_streams_of_their_readers(machine: Machine) -> None:
    """What they are worked out from may not be given away before: a handle dies as soon as its
    caller lets it go.
    """
    source, ranges = memory(), memory()
    handle, before = handle_of((), source, ranges), handle_of((), memory(), memory())
    streams.Streams().run(lambda: (handle,), (), memory(), None, True)
    assert keepers(source) == [[]]
    assert handle[3].tolist() == before[3].tolist() == [0]
    assert handle[3] is handle[3] and keepers(source, ranges) == [["compute"]] * 2
    assert keepers(before.native.arrived.source) == [[]]


class Asked(Exception):
    """Instead of a call: its arguments, its handle, the event before it, and whether it is
    asynchronous.
    """


def test_what_calls_read() -> None:
    """Every tensor that a call reads on the device is among its arguments, so it is kept for its
    stream, and so is its handle.
    """

    def ask(
        call: Any, arguments: Any, like: Any, after: Any, later: bool, handle: Any = None
    ) -> Any:
        raise Asked(arguments, handle, after, later)

    buffer: Any = deep_ep.Buffer(Group())
    buffer._streams.run = ask
    x, out, weights, term = (torch.zeros(2, 2) for _ in range(4))
    data, scales, idx = (
        x.to(torch.float8_e4m3fn),
        torch.zeros(2, 1),
        torch.zeros(2, 2, dtype=torch.int64),
    )
    mask, counts = torch.zeros(2, 2, dtype=torch.bool), torch.zeros(4, dtype=torch.int32)
    stats, waits, blocks = counts[:2], torch.zeros(2, dtype=torch.int64), torch.zeros(2, 8, 2)
    handle, low = handle_of(), LowLatencyHandle.around(None, None)  # type: ignore[arg-type]
    config = SimpleNamespace(hidden=2, num_topk=2, num_local_experts=2, padded_rows=8)
    plan = SimpleNamespace(returns=x)
    ep = SimpleNamespace(
        config=config,
        group=buffer.group,
        rank=0,
        world_size=2,
        _calls=SimpleNamespace(closed=False, inherited=False),
    )
    native = SimpleNamespace(
        num_tokens=2, num_rows=2, plan=plan, arrived=SimpleNamespace(tokens_per_expert=counts)
    )
    for each in (handle, low):
        each.ep, each.native = ep, native
    low.next_buffer = blocks
    known = {
        "topk_idx": idx,
        "topk_weights": weights,
        "num_tokens_per_expert": counts,
        "is_token_in_rank": mask,
    }
    bare = {"num_tokens_per_expert": counts, "is_token_in_rank": mask}
    calls: list[tuple[Any, list[Any], Any]] = [
        (lambda: buffer.get_dispatch_layout(idx, 4), [idx], None),
        (lambda: buffer.dispatch(x, **known), [x, idx, weights, mask], None),
        (
            lambda: buffer.dispatch([data, scales], **known),
            [data, scales, idx, weights, mask],
            None,
        ),
        (lambda: buffer.dispatch((data, scales), **bare), [data, scales, mask, counts], None),
        (lambda: buffer.dispatch(x, handle), [x], handle),
        (lambda: buffer.combine(x, handle, weights, (term, out)), [x, weights, term, out], handle),
        (
            lambda: buffer.low_latency_dispatch(x, idx, 4, 4, stats, waits),
            [x, idx, stats, waits],
            None,
        ),
        (
            lambda: buffer.low_latency_combine(blocks, idx, weights, low, out=out),
            [blocks, weights, out],
            low,
        ),
        (
            lambda: buffer.low_latency_combine(x, idx, weights, low, zero_copy=True),
            [weights, blocks],
            low,
        ),
    ]
    for call, expected, used in calls:
        with pytest.raises(Asked) as asked:
            call()
        arguments, uses, after, later = asked.value.args
        assert after is None and later is False
        parts = [part for each in arguments for part in (each if type(each) is tuple else (each,))]
        assert {id(part) for part in parts if isinstance(part, torch.Tensor)} == set(
            map(id, expected)
        )
        assert uses is used and (used is None or any(part is used for part in parts))

    event = EventOverlap()
    waiting: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (buffer.get_dispatch_layout, (idx, 4), {}),
        (buffer.dispatch, (x,), known),
        (buffer.dispatch, (x,), bare),
        (buffer.dispatch, (x, handle), {}),
        (buffer.combine, (x, handle), {}),
    ]
    for call, given, named in waiting:
        for asynchronous in (True, False):
            with pytest.raises(Asked) as asked:
                call(*given, **named, previous_event=event, async_finish=asynchronous)
            assert asked.value.args[2:] == (event, asynchronous)
    lows: list[tuple[Any, tuple[Any, ...]]] = [
        (buffer.low_latency_dispatch, (x, idx, 4, 4)),
        (buffer.low_latency_combine, (blocks, idx, weights, low)),
    ]
    for call, given in lows:
        for options in ({}, {"async_finish": True}, {"return_recv_hook": True}):
            with pytest.raises(Asked) as asked:
                call(*given, **options)
            assert asked.value.args[3] is ("async_finish" in options)
            assert asked.value.args[0][-1] is ("return_recv_hook" in options)


@distributed_test(world_size=1)
def test_the_cost_program(ranks: Ranks) -> None:
    """It still finds its way into buffers and native objects, and each call has a native one beside
    it, but for the layout.
    """
    bench = deep_ep_cost.Bench(ranks.group, ranks.device)
    costs = deep_ep_cost.measure(bench.calls(), 1, 1)
    bench.close()
    assert len(costs) == 15 and [name for name, cost in costs.items() if cost.native is None] == [
        "get_dispatch_layout"
    ]
    assert len(deep_ep_cost.report(costs).splitlines()) == 15
