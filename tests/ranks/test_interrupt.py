"""Ctrl-C while a call waits: it ends at once, the other ranks learn who has left and where, the
object says what has become of it.

The objects here wait for a minute, and the tests for less: nothing in them ends by a timeout of an
object.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tokenyard as ty
from bad_input import CASE, Inputs, assert_works, check, error_of, make, meet
from nvlink_pool import SOAK
from tokenyard.engines.gloo_transport import _gist
from tokenyard.launch import local_store
from tokenyard.testing import Ranks, distributed_test

PATIENT = 1e6
"""An object's timeout: what ends only by it never ends."""


def waits(ident: int | None) -> bool:
    """Whether a thread waits in one of our calls, as its stack tells. A thread that ran on while
    its stack is read would leave frames that are none: no switch to it, and else another look.
    """
    names, interval = [""], sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        frame = sys._current_frames().get(ident or -1)
        while frame is not None:
            names.append(frame.f_code.co_filename)
            frame = frame.f_back
    except AttributeError:
        return False
    finally:
        sys.setswitchinterval(interval)
    names = names[1:] or names
    ours = any(
        name.endswith(("tokenyard/calls.py", "tokenyard/guard.py", "engines/gloo_transport.py"))
        for name in names
    )
    return ours and names[0].endswith(("aside.py", "threading.py", "call_queue.py"))


def ctrl_c(times: int = 1, ident: int | None = None) -> threading.Thread:
    """SIGINT for this process as soon as this thread (or ``ident``) waits in a call."""
    ident = ident or threading.get_ident()

    def send() -> None:
        while not waits(ident):
            time.sleep(0.05)
        for _ in range(times):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def interrupted(call: Callable[[], Any]) -> None:
    """``call`` waits, and Ctrl-C ends it."""
    strikes: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def handler(signum: int, _: Any) -> None:
        strikes.append(signum)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handler)
    try:
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert strikes == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def check_over(ep: ty.ExpertParallel, where: str) -> None:
    """Whatever is asked of it afterwards, it says so at once; it closes."""
    inputs = torch.zeros(1, ep.config.hidden), torch.zeros(1, CASE.num_topk, dtype=torch.int64)
    calls = (
        lambda: ep.dispatch(*inputs),
        lambda: ep.dispatch(*inputs, async_op=True),
        lambda: ep.dispatch(None),
        lambda: ep.combine(inputs[0], None),
        ep.check,
        ep.warmup,
    )
    for call in calls:
        check(
            error_of(call),
            RuntimeError,
            f"was interrupted in {where} (KeyboardInterrupt)",
            "make a new one",
        )
    assert ep.stats().rank == ep.rank
    ep.close()
    ep.close()


def check_told(error: Exception | None, *words: str, rank: int = 0) -> None:
    """Another rank raises by name of who was interrupted."""
    assert isinstance(error, ty.PeerTimeout), repr(error)
    assert error.rank == rank, str(error)
    for word in (f"rank {rank} was interrupted in", *words):
        assert word in str(error), str(error)


CALLS: dict[str, tuple[str, Callable[[ty.ExpertParallel, Inputs], Any]]] = {
    "dispatch": ("dispatch #2", lambda ep, i: ep.dispatch(i.x, i.topk_idx)),
    "static": ("dispatch #2", lambda ep, i: ep.dispatch(i.x, i.topk_idx, exact=False)),
    "tracked": ("dispatch #2", lambda ep, i: ep.dispatch(i.x.float().requires_grad_(), i.topk_idx)),
    "async": ("dispatch #2", lambda ep, i: ep.dispatch(i.x, i.topk_idx, async_op=True).wait()),
    "hook": ("dispatch #2", lambda ep, i: ep.dispatch(i.x, i.topk_idx, return_hook=True).hook()),
    "read": ("dispatch #2", lambda ep, i: ep.dispatch(i.x, i.topk_idx, async_op=True).x),
    "work": (
        "dispatch #2",
        lambda ep, i: ep.dispatch(i.x, i.topk_idx, async_op=True).work().wait(),
    ),
    "after": (
        "dispatch #2",
        lambda ep, i: ep.dispatch(
            i.x, i.topk_idx, after=ep.dispatch(i.x, i.topk_idx, async_op=True)
        ),
    ),
    "behind": (
        "dispatch #2",
        lambda ep, i: (ep.dispatch(i.x, i.topk_idx, async_op=True), ep.dispatch(i.x, i.topk_idx)),
    ),
    "check": (
        "dispatch #2",
        lambda ep, i: (ep.dispatch(i.x, i.topk_idx, async_op=True), ep.check()),
    ),
    "refuse": ("dispatch, which it refused, #2", lambda ep, i: ep.dispatch(None)),
    "warmup": ("dispatch #2", lambda ep, i: ep.warmup()),
}


@pytest.mark.parametrize("how", CALLS)
@distributed_test(world_size=3)
def test_a_call_that_waits(ranks: Ranks, how: str) -> None:
    """Rank 1 stays away; rank 2 waits for it too, not for rank 0. A new object of all
    ranks works.
    """
    inputs = Inputs.of(ranks)
    ep = make(ranks, timeout=PATIENT)
    recv = ep.dispatch(inputs.x, inputs.topk_idx)
    ep.combine(recv.x, recv.handle)
    where, call = CALLS[how]
    if ranks.rank == 0:
        interrupted(lambda: call(ep, inputs))
        check_over(ep, where)
    elif ranks.rank == 2:
        check_told(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), where)
    meet(ranks)
    if ranks.rank == 1:  # comes too late, and hears the same
        check_told(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), where)
        ep.close()
    with make(ranks, timeout=PATIENT) as new:
        assert_works(ranks, new)
    meet(ranks)


@distributed_test(world_size=2)
def test_a_backward(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    x = inputs.x.float().requires_grad_()
    ep = make(ranks, timeout=PATIENT)
    loss = ep.dispatch(x, inputs.topk_idx).x.sum()
    if ranks.rank == 0:
        interrupted(loss.backward)
        check_over(ep, "combine #1")
    meet(ranks)
    if ranks.rank == 1:
        check_told(error_of(loss.backward), "combine #1")
        ep.close()


@distributed_test(world_size=2)
def test_closing(ranks: Ranks) -> None:
    """``close`` waits for calls under way: it ends, the call ends with it, and says why."""
    inputs = Inputs.of(ranks)
    ep = make(ranks, timeout=PATIENT)
    if ranks.rank == 0:
        recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
        interrupted(ep.close)
        for _ in range(2):
            check(
                error_of(recv.wait),
                RuntimeError,
                "was interrupted in dispatch #0",
                "make a new one",
            )
        check_over(ep, "dispatch #0")
    meet(ranks)
    if ranks.rank == 1:
        check_told(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), "dispatch #0")
        ep.close()


@distributed_test(world_size=2)
def test_results_of_calls_under_way(ranks: Ranks) -> None:
    """Those that are there can be read; the one that was waited for, and those behind it, say what
    has become of them.
    """
    inputs = Inputs.of(ranks)
    ep = make(ranks, timeout=PATIENT)
    first = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
    work = first.work()
    if ranks.rank == 0:
        work.wait()
        later = [ep.dispatch(inputs.x, inputs.topk_idx, async_op=True) for _ in range(3)]
        interrupted(later[1].wait)
        assert first.x.shape[1] == CASE.hidden
        for recv in (later[1], *later, *later):
            check(
                error_of(recv.wait),
                RuntimeError,
                "was interrupted in dispatch #1",
                "make a new one",
            )
        check_over(ep, "dispatch #1")
    else:
        first.wait()
    meet(ranks)
    ep.close()


@distributed_test(world_size=3)
def test_making_an_object(ranks: Ranks) -> None:
    """Rank 1 has come to the construction, but not to the connections; rank 2 waits there too."""
    if ranks.rank == 1:
        honest = ty.api.choose
        ty.api.choose = lambda *arguments: (meet(ranks), honest(*arguments))[1]
    if ranks.rank == 0:
        interrupted(lambda: make(ranks, timeout=PATIENT))
    elif ranks.rank == 2:
        check_told(error_of(lambda: make(ranks, timeout=PATIENT)), "ExpertParallel(...)")
    if ranks.rank != 1:
        meet(ranks)
    else:
        check_told(error_of(lambda: make(ranks, timeout=PATIENT)), "ExpertParallel(...)")
        ty.api.choose = honest
    meet(ranks)
    with make(ranks, timeout=PATIENT) as new:
        assert_works(ranks, new)
    meet(ranks)


@distributed_test(world_size=2)
def test_a_second_ctrl_c_while_the_others_are_told(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    ep = make(ranks, timeout=PATIENT)
    if ranks.rank == 0:
        wire = ep._calls.engine._transport
        tell, asked = wire._failures.report, []

        def impatient(*said: Any) -> None:
            asked.append(said)
            signal.raise_signal(signal.SIGINT)
            tell(*said)

        wire._failures.report = impatient
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            ep.dispatch(inputs.x, inputs.topk_idx)
        assert len(asked) == 1
        check_over(ep, "dispatch #0")
    else:
        # not why, but that it is lost
        error = error_of(lambda: meet(ranks) or ep.dispatch(inputs.x, inputs.topk_idx))
        assert isinstance(error, ty.PeerLost) and error.rank == 0, repr(error)
        ep.close()
    if ranks.rank == 0:
        meet(ranks)


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@distributed_test(world_size=2)
def test_a_handler_that_does_not_raise(ranks: Ranks, later: bool) -> None:
    """It runs while the call waits, and the call goes on."""
    inputs, handled = Inputs.of(ranks), []
    with make(ranks, timeout=PATIENT) as ep:
        if ranks.rank == 0:
            before = signal.signal(
                signal.SIGINT, lambda *_: handled.append(waits(threading.get_ident()))
            )
            sender = ctrl_c(times=2)
            recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=later)
            recv.wait()
            sender.join()
            signal.signal(signal.SIGINT, before)
            assert len(handled) == 2
        else:
            time.sleep(2.0)
            ep.dispatch(inputs.x, inputs.topk_idx)
        assert_works(ranks, ep)
        meet(ranks)


class Enough(Exception):
    """What a handler of the user raises; an error as any other."""


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
@distributed_test(world_size=2)
def test_a_handler_that_raises_an_error(ranks: Ranks, later: bool) -> None:
    """As ``signal.alarm`` is used: the same as Ctrl-C, also if the error is one of Python's usual
    ones.
    """
    inputs = Inputs.of(ranks)
    ep = make(ranks, timeout=PATIENT)
    if ranks.rank == 0:

        def handler(*_: Any) -> None:
            raise Enough

        before = signal.signal(signal.SIGINT, handler)
        ctrl_c()
        with pytest.raises(Enough):
            ep.dispatch(inputs.x, inputs.topk_idx, async_op=later).wait()
        signal.signal(signal.SIGINT, before)
        check(
            error_of(ep.warmup),
            RuntimeError,
            "was interrupted in dispatch #0 (Enough)",
            "make a new one",
        )
    meet(ranks)
    if ranks.rank == 1:
        check_told(error_of(ep.warmup), "dispatch #0 (Enough)")
    ep.close()


@distributed_test(world_size=2)
def test_just_before_and_just_behind_a_wait(ranks: Ranks) -> None:
    """Wherever in a call it comes: an object that has left a call says so, and the others hear of
    it.
    """
    inputs = Inputs.of(ranks)
    for where in ("_move", "_post", "_until"):
        ep = make(ranks, timeout=PATIENT)
        if ranks.rank == 0:
            wire = ep._calls.engine._transport
            honest = getattr(wire, where)

            def struck(*arguments: Any, honest: Any = honest) -> Any:
                result = honest(*arguments)
                signal.raise_signal(signal.SIGINT)
                return result

            setattr(wire, where, struck)
            with pytest.raises(KeyboardInterrupt):
                ep.dispatch(inputs.x, inputs.topk_idx)
            check_over(ep, "dispatch #0")
        else:
            check_told(
                error_of(lambda ep=ep: ep.dispatch(inputs.x, inputs.topk_idx)), "dispatch #0"
            )
            ep.close()
        meet(ranks)


@distributed_test(world_size=2)
def test_calls_of_another_thread(ranks: Ranks) -> None:
    """No signals there: the call goes on. Ctrl-C of the main thread, which waits for something
    else, is none of its business.
    """
    inputs, results, over = Inputs.of(ranks), [], threading.Event()
    with make(ranks, timeout=PATIENT) as ep:

        def run() -> None:
            results.append(error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)))
            over.set()

        thread = threading.Thread(target=run)
        if ranks.rank == 0:
            thread.start()
            ctrl_c(ident=thread.ident)
            with pytest.raises(KeyboardInterrupt):
                over.wait()
            meet(ranks)
        else:
            meet(ranks)
            thread.start()
        assert over.wait(PATIENT)
        assert results == [None]
        assert_works(ranks, ep)
        meet(ranks)


PROGRAM = """
import sys, time, torch, torch.distributed as dist, tokenyard as ty
port, rank, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ep = ty.ExpertParallel(num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, timeout=600.0)
x, idx = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])
def step():
    return ep.dispatch(x, idx, async_op=how == "later").x
step()
if rank == 1:
    print("ready", flush=True)
    sys.stdin.readline()
    step()
else:
    print("waits", flush=True)
    if how == "with":
        with ep:
            step()
    step()
"""


@pytest.mark.parametrize("how", ["with", "now", "later"] if SOAK > 1 else ["with"])
def test_a_program_that_catches_nothing_ends(how: str) -> None:
    """By itself, soon, with Python's usual traceback; the other rank's program names it. The
    objects wait for ten minutes.
    """
    store = local_store()
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(store.port), str(rank), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for program, said in zip(programs, ("waits", "ready"), strict=True):
            assert program.stdout is not None and program.stdout.readline().strip() == said
        time.sleep(1.0)
        programs[0].send_signal(signal.SIGINT)
        _, complaint = programs[0].communicate()
        assert programs[0].returncode == -signal.SIGINT and "KeyboardInterrupt" in complaint
        _, complaint = programs[1].communicate("go on\n")
        assert programs[1].returncode == 1
        assert (
            "PeerLost" in complaint
            and "rank 0 was interrupted in dispatch #1 (KeyboardInterrupt)" in complaint
        )
    finally:
        for program in programs:
            program.kill()


@pytest.mark.parametrize("goes_on", [False, True])
@distributed_test(world_size=2)
def test_objects_in_different_order(ranks: Ranks, goes_on: bool) -> None:
    """Each rank waits in the object that the other uses later: who gives up says so, also when the
    other was first and has failed in the second object since (``goes_on``).
    """
    inputs = Inputs.of(ranks)
    objects = [make(ranks, timeout=2.5) for _ in range(2)]
    if ranks.rank:
        objects.reverse()
    meet(ranks)
    time.sleep(0.3 * ranks.rank)
    error = error_of(lambda: objects[0].dispatch(inputs.x, inputs.topk_idx))
    if goes_on:
        again = error_of(lambda: objects[1].dispatch(inputs.x, inputs.topk_idx))
        assert isinstance(again, ty.PeerLost), again
    meet(ranks)
    check(
        error,
        ty.PeerTimeout,
        "it waits in dispatch #0, counts, of another ExpertParallel",
        "same order",
        "timeout=",
    )
    for each in objects:
        each.close()


@pytest.mark.parametrize(
    ("said", "gist"),
    [
        (
            "[/a/pair.cc:553] Connection closed by peer [127.0.0.1]:17. This is",
            "Connection closed by peer [127.0.0.1]:17",
        ),
        ("wait timeout", "wait timeout"),
        ("[x.cc:1] " + "words " * 40, " ".join(["words"] * 19) + " ..."),
    ],
)
def test_what_gloo_says_is_cut_between_words(said: str, gist: str) -> None:
    assert _gist(RuntimeError(said)) == gist


def test_a_rank_alone_goes_on() -> None:
    """It has left nobody."""
    with ty.ExpertParallel(
        num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, device="cpu"
    ) as ep:
        x, idx = torch.randn(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]])

        class Struck:
            def wait(self) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ep.dispatch(x, idx, after=Struck())
        assert ep.dispatch(x, idx).x.shape == (3, 8)
