"""Order of asynchronous calls: on streams (stand-ins, ``cuda_streams.py``), on the object's own
thread, and what they keep alive.

On streams every case runs twice: the main stream goes on as far as it can before the others do, and
the other way round. What must come behind something else does so both times only if a stream waits
for it.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import tokenyard as ty
from cuda_streams import Event, Machine, Stream
from tokenyard.call_queue import MAX_OUTSTANDING, CallQueue, Work
from tokenyard.engines.gloo_transport import GlooTransport

GPU = torch.device("cuda", 0)
AT_ONCE: Any = None, lambda _: None
"""No ``after``, and nobody to be told."""
SIZES = {"num_experts": 4, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 8, "device": "cpu"}
X, IDX = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


class Scene:
    """One lane, main stream and another one of the user's; made anew for each schedule."""

    def __init__(self, machine: Machine, threaded: bool = False) -> None:
        self.machine, self.queue = machine, CallQueue(threaded=threaded, device=GPU)
        self.other = Stream(machine, "other")

    def call(self, what: str) -> Callable[[], str]:
        def made() -> str:
            self.machine.launch(what)
            return what

        return made

    def begin(self, what: str, after: Any = None) -> int:
        return self.queue.begin(self.call(what), GPU, after, self.tell)

    def tell(self, error: Exception) -> None:
        self.machine.launch(f"tell: {error}")

    def wait(self, call: Callable[[], Any]) -> Any:
        return call()

    def work_of(self, ticket: int) -> Work | None:
        return self.queue.work_of(ticket, self.wait)


def both(
    machine: Machine, play: Callable[[Scene], Any], *, threaded: bool = False
) -> list[list[str]]:
    """What ran in which order, if the main stream is the first to go on, and if it is the last."""
    logs: list[list[str]] = []
    for last in (False, True):
        del machine.streams[1:], machine.log[:]
        play(Scene(machine, threaded))
        machine.run(sorted(machine.streams, key=lambda stream: (stream is machine.main) == last))
        logs.append([line.split(" on ")[0] for line in machine.log])
    return logs


def check_order(logs: list[list[str]], *names: str) -> None:
    for log in logs:
        assert [log.index(name) for name in names] == sorted(log.index(name) for name in names), log


def test_a_call_comes_behind_its_stream_and_before_who_took_it(machine: Machine) -> None:
    def play(scene: Scene) -> None:
        machine.launch("input")
        ticket = scene.begin("call")
        machine.launch("beside")
        assert scene.queue.take(ticket) == "call"
        machine.launch("use")

    logs = both(machine, play)
    check_order(logs, "input", "call", "use")
    assert [log.index("beside") < log.index("call") for log in logs] == [
        True,
        False,
    ]  # neither waits for the other


def test_after_takes_the_place_of_the_current_stream(machine: Machine) -> None:
    def play(scene: Scene) -> None:
        with machine.on(scene.other):
            machine.launch("awaited")
            event = scene.other.record_event()
        machine.launch("not awaited")
        scene.queue.take(scene.begin("call", after=event))

    logs = both(machine, play)
    check_order(logs, "awaited", "call")
    assert logs[1].index("call") < logs[1].index("not awaited")


def test_an_after_that_raises_is_told_in_place_of_the_call(machine: Machine) -> None:
    class Lost:
        def wait(self) -> None:
            raise ValueError("lost")

    def play(scene: Scene) -> None:
        scene.begin("one")
        ticket = scene.begin("two", after=Lost())
        with machine.on(scene.other):
            scene.begin("three")
        with pytest.raises(ValueError, match="lost"):
            scene.queue.take(ticket)

    logs = both(machine, play)
    check_order(logs, "one", "tell: lost", "three")
    assert not any("two" in log for log in logs)


def test_who_takes_on_another_stream(machine: Machine) -> None:
    """It waits, and so does the stream whose memory the call reads."""

    def play(scene: Scene) -> None:
        ticket = scene.begin("call")
        with machine.on(scene.other):
            scene.queue.take(ticket)
            machine.launch("use")
        machine.launch("free")

    logs = both(machine, play)
    check_order(logs, "call", "use")
    check_order(logs, "call", "free")


@pytest.mark.parametrize("first", ["main", "other", "later"])
@pytest.mark.parametrize("second", ["main", "other", "later"])
def test_calls_come_one_behind_the_other(machine: Machine, first: str, second: str) -> None:
    """Wherever they run: they share memory."""

    def play(scene: Scene) -> None:
        for name, where in (("one", first), ("two", second), ("three", first)):
            if where == "later":
                scene.begin(name, after=Event(machine))  # which is over: nothing else orders it
            else:
                with machine.on(machine.main if where == "main" else scene.other):
                    assert scene.queue.run(scene.call(name)) == name

    check_order(both(machine, play), "one", "two", "three")


def test_a_call_that_fails_is_a_call_too(machine: Machine) -> None:
    def play(scene: Scene) -> None:
        def fails() -> None:
            machine.launch("half")
            raise ValueError("mine")

        ticket = scene.queue.begin(fails, GPU, *AT_ONCE)
        assert scene.work_of(ticket) is None
        with pytest.raises(ValueError, match="mine"):
            scene.queue.take(ticket)
        with machine.on(scene.other):
            scene.queue.run(scene.call("next"))

    check_order(both(machine, play), "half", "next")


def test_a_dropped_call_keeps_its_inputs(machine: Machine) -> None:
    def play(scene: Scene) -> None:
        ticket = scene.begin("call")
        with machine.on(scene.other):
            scene.queue.drop(ticket)
        machine.launch("memory is used again")

    check_order(both(machine, play), "call", "memory is used again")


def test_a_call_dropped_in_a_capture_spoils_nothing(machine: Machine) -> None:
    scene = Scene(machine)
    ticket = scene.begin("call")
    queued = len(machine.main.queue)
    machine.capturing = True
    scene.queue.drop(ticket)
    assert len(machine.main.queue) == queued
    assert len(scene.queue._dropped) == 1  # kept, as nobody has waited for it


def test_a_captured_call_orders_nothing(machine: Machine) -> None:
    scene = Scene(machine)
    scene.queue.run(scene.call("before"))
    machine.capturing = True
    with machine.on(scene.other):
        scene.queue.run(scene.call("captured"))
    assert len(scene.other.queue) == 1
    assert scene.queue._turn._where == (0, 0)


def test_work_is_waited_for_on_the_current_stream(machine: Machine) -> None:
    def play(scene: Scene) -> None:
        ticket = scene.begin("call")
        work = scene.work_of(ticket)
        assert work is not None and work.can_be_waited_for()
        with machine.on(scene.other):
            work.wait()
            machine.launch("behind")
        scene.queue.take(ticket)

    check_order(both(machine, play), "call", "behind")


def test_events_of_a_capture_are_for_it_alone(machine: Machine) -> None:
    scene = Scene(machine)
    work = scene.work_of(scene.begin("call"))
    assert work is not None
    machine.capturing = True
    assert not work.can_be_waited_for()
    inside = Work(None, cast("Any", Event(machine)), scene.wait)
    assert inside.can_be_waited_for()
    machine.capturing = False
    assert not inside.can_be_waited_for()


class Memory(torch.Tensor):
    """A tensor that says which streams keep it."""

    is_cuda = True

    def record_stream(self, stream: Any) -> None:
        self.keepers = [*getattr(self, "keepers", []), stream]


def test_results_are_kept_for_who_took_them(machine: Machine) -> None:
    scene = Scene(machine)
    result = torch.zeros(1).as_subclass(Memory)
    ticket = scene.queue.begin(lambda: (1, [result], None), GPU, *AT_ONCE)
    with machine.on(scene.other):
        scene.queue.take(ticket)
    assert result.keepers == [scene.other]


def test_inputs_live_until_the_call_is_taken(machine: Machine) -> None:
    scene = Scene(machine)

    class Input:
        pass

    def begin() -> tuple[int, weakref.ref[Any]]:
        held = Input()
        return scene.queue.begin(lambda: bool(held) and None, GPU, *AT_ONCE), weakref.ref(held)

    ticket, alive = begin()
    gc.collect()
    assert alive() is not None
    scene.queue.take(ticket)
    gc.collect()
    assert alive() is None


def test_a_waiting_call_behind_one_on_the_thread_runs_on_its_own_stream(machine: Machine) -> None:
    scene, gate = Scene(machine, threaded=True), threading.Event()
    first = scene.begin("first", cast("Any", gate))
    threading.Timer(0.2, gate.set).start()
    with machine.on(scene.other):
        scene.queue.run(scene.call("second"))
    scene.queue.take(first)
    log = machine.run(machine.streams)
    assert log[0].startswith("first on comm") and log[1] == "second on other"
    scene.queue.close()


def test_a_call_interrupted_in_its_launches_leaves_no_ticket(machine: Machine) -> None:
    scene = Scene(machine)

    def struck() -> None:
        machine.launch("half")
        raise KeyboardInterrupt

    for _ in range(MAX_OUTSTANDING + 1):
        with pytest.raises(KeyboardInterrupt):
            scene.queue.begin(struck, GPU, *AT_ONCE)
    assert not scene.queue._issued and not scene.queue._started


# Of objects


class Filled:
    """``after=`` of a call: its argument is there only when this has been waited for."""

    def __init__(self, blank: torch.Tensor, values: torch.Tensor) -> None:
        self.blank, self.values = blank, values

    def wait(self) -> None:
        self.blank.copy_(self.values)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("reduces", [False, True], ids=["sums", "weights too"])
def test_after_of_every_call_is_waited_for(later: bool, reduces: bool) -> None:
    with ty.ExpertParallel(**SIZES) as ep:
        blank = torch.zeros_like(X)
        recv = ep.dispatch(blank, IDX, torch.ones(3, 2), after=Filled(blank, X), async_op=later)
        want = ep.dispatch(X, IDX, torch.ones(3, 2))
        assert torch.equal(recv.x, want.x)
        blank = torch.zeros_like(X)
        again = ep.dispatch(blank, handle=want.handle, after=Filled(blank, X), async_op=later)
        assert torch.equal(again.x, want.x)
        rows, bias = torch.zeros_like(want.x), torch.zeros_like(X)
        weights = {"reduce_weights": want.topk_weights} if reduces else {}
        sums = ep.combine(want.x, want.handle, bias=X, **weights)
        for blank, values in ((rows, want.x), (bias, X)):
            rows.copy_(want.x), bias.copy_(X), blank.zero_()
            got = ep.combine(
                rows, want.handle, bias=bias, after=Filled(blank, values), async_op=later, **weights
            )
            x = got if isinstance(got, torch.Tensor) else got.x
            assert torch.equal(x, sums if isinstance(sums, torch.Tensor) else sums.x)


@pytest.mark.parametrize("kind", ["dispatch", "cached", "combine"])
def test_calls_that_nobody_wants_free_their_tickets(kind: str) -> None:
    with ty.ExpertParallel(**SIZES) as ep:
        recv = ep.dispatch(X, IDX)
        for _ in range(3 * MAX_OUTSTANDING):
            if kind == "dispatch":
                ep.dispatch(X, IDX, async_op=True)
            elif kind == "cached":
                ep.dispatch(X, handle=recv.handle, async_op=True)
            else:
                ep.combine(recv.x, recv.handle, async_op=True)
            gc.collect()
        assert not ep._calls.queue._started


class Losing:
    """Stands in for an engine: it loses a peer in its first call, while others are queued
    behind.
    """

    name, waits_on_host = "losing", True
    counts_by_most, calls_begun = False, None

    def __init__(self) -> None:
        self.calls, self.gate = 0, threading.Event()

    def dispatch(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        self.gate.wait()
        raise ty.PeerTimeout(f"rank 1 is silent in call {self.calls}", 1)

    combine = redispatch = dispatch

    def close(self, why: str) -> None: ...


def test_calls_queued_behind_a_lost_peer_are_not_made() -> None:
    """Each would wait for it as long again."""
    ep = ty.ExpertParallel(**SIZES)
    ep._calls.engine = engine = cast("Any", Losing())
    queued = [ep.dispatch(X, IDX, async_op=True) for _ in range(4)]
    engine.gate.set()
    for recv in queued:
        with pytest.raises(ty.PeerTimeout, match="silent in call 1") as lost:
            recv.wait()
        assert lost.value.rank == 1
    with pytest.raises(RuntimeError, match="lost a peer"):
        ep.dispatch(X, IDX)
    assert engine.calls == 1
    ep.close()


def test_work_keeps_no_result() -> None:
    with ty.ExpertParallel(**SIZES) as ep:
        recv = ep.dispatch(X, IDX, async_op=True)
        work = cast("Any", recv.work())
        rows = weakref.ref(recv.x)
        work.wait()
        assert rows() is not None
        del recv
        gc.collect()
        assert rows() is None
        work.wait()


class Message:
    """A message that takes a while; ``given``: the time that each was given."""

    def __init__(self, given: list[float], seconds: float) -> None:
        self.given, self.seconds = given, seconds

    def wait(self, timeout: Any) -> None:
        self.given.append(timeout.total_seconds())
        time.sleep(self.seconds)


def test_messages_share_the_timeout() -> None:
    """Those of one move, also for sends behind receives: not as much for each."""
    wire, given = GlooTransport(None, 0, 4, timeout=100.0, members=[0]), list[float]()
    coming = [(peer, Message(given, 0.2)) for peer in (1, 2)]
    wire._await(coming, [(3, Message(given, 0.0))], time.monotonic() - 60.0, "dispatch #0, rows")
    assert given[0] <= 40.0 and given[1] <= 39.8 and 0 < given[2] <= 39.6
    assert wire.last_wait[2] >= 60.4
