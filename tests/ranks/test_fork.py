"""A forked child of a process that has objects: using one raises at once, letting go of one does
nothing; the parent goes on.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import tokenyard as ty
from bad_input import SIZES, Inputs, assert_works, error_of, make, meet
from deep_ep_calls import fresh
from deep_ep_world import World
from tokenyard import deep_ep
from tokenyard.testing import Ranks, distributed_test


def in_child(deed: Callable[[], object]) -> str:
    """What ``deed()`` returns in a forked child, as text; how the child ended, if that is not in
    order.
    """
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, str(deed()).encode())
            os._exit(0)
        except BaseException as error:
            os.write(into, f"failed: {error!r}".encode())
            os._exit(1)
    os.close(into)
    text = b""
    while True:
        ready = select.select([out], [], [], 60.0)[0]
        part = os.read(out, 4096) if ready else b""
        if not part:
            break
        text += part
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.close(out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text.decode() if code == 0 else f"exit code {code} after {text.decode()!r}"


def refusals(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Which calls did not raise the right error."""
    errors = {name: error_of(call) for name, call in calls.items()}
    words = (f"process {os.getppid()}", "is a fork")
    return [
        f"{name}: {error!r}"
        for name, error in errors.items()
        if type(error) is not RuntimeError or not all(word in str(error) for word in words)
    ]


@distributed_test(world_size=(1, 2))
def test_every_use_raises_at_once(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    x, idx, weights = inputs.x.float().requires_grad_(), inputs.topk_idx, inputs.topk_weights
    with make(ranks) as ep:
        plain, recv = ep.dispatch(inputs.x, idx), ep.dispatch(x, idx, weights)
        y = ep.combine(recv.x, recv.handle)
        pending = ep.dispatch(inputs.x, idx, async_op=True)
        tracked = ep.dispatch(x, idx, async_op=True)
        behind = ep.combine(plain.x, plain.handle, async_op=True)

        def enter() -> None:
            with ep:
                pass

        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: ep.dispatch(inputs.x, idx),
            "cached": lambda: ep.dispatch(inputs.x, handle=plain.handle),
            "asynchronous": lambda: ep.dispatch(inputs.x, idx, async_op=True),
            "bad arguments": lambda: ep.dispatch(None),
            "differentiable": lambda: ep.dispatch(x, idx),
            "combine": lambda: ep.combine(plain.x, plain.handle),
            "weights at the owner": lambda: ep.combine(
                plain.x, plain.handle, weighted=True, topk_weights=weights
            ),
            "warmup": ep.warmup,
            "check": ep.check,
            "with": enter,
            "pending": lambda: pending.x,
            "pending, differentiable": tracked.wait,
            "pending combine": behind.wait,
            "work": lambda: pending.work().wait(),
            "construction": lambda: make(ranks),
        }

        def use() -> object:
            backward = error_of(lambda: y.sum().backward())
            assert isinstance(backward, RuntimeError), backward
            assert ep.stats().rank == ranks.rank and ep.buffer_bytes == 0
            ep.close()
            return refusals(calls)

        assert in_child(use) == "[]"
        for result in (pending, tracked, behind):
            result.wait()
        y.sum().backward()
        assert x.grad is not None
        assert_works(ranks, ep)
    meet(ranks)


def test_a_child_of_a_child() -> None:
    """It has neither what its parent made nor what that one had from its own."""
    x, idx = torch.randn(3, SIZES["hidden"]), torch.zeros(3, SIZES["num_topk"], dtype=torch.int64)

    def objects() -> list[ty.ExpertParallel]:
        return [ty.ExpertParallel(**SIZES) for _ in range(8)]

    first = objects()

    def in_turn() -> object:
        second = objects()
        calls = {f"{at}": partial(ep.dispatch, x, idx) for at, ep in enumerate(second)}
        text = in_child(lambda: refusals(calls))
        assert text == "[]" and not any(error_of(call) for call in calls.values()), text
        return in_child(lambda: [type(error_of(partial(ep.dispatch, x, idx))) for ep in first])

    assert in_child(in_turn) == str([RuntimeError] * len(first))
    for ep in first:
        ep.dispatch(x, idx)
        ep.close()


@pytest.mark.parametrize("way", ["closes", "collects"])
@distributed_test(world_size=(1, 2))
def test_a_child_that_lets_go(ranks: Ranks, way: str) -> None:
    """Nothing happens to the parent's connections, not in the middle of a call either, and the
    child does not hang.
    """
    inputs = Inputs.of(ranks)
    held: list[Any] = [make(ranks)]
    ep = held[0]
    recv = ep.dispatch(inputs.x.float().requires_grad_(), inputs.topk_idx)
    # Rank 1 comes later.
    pending = None if ranks.rank else ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
    held += [recv, pending]

    def let_go() -> object:
        nonlocal ep, recv, pending
        if way == "closes":
            ep.close()
            ep.close()
        else:
            held.clear()
            del ep, recv, pending
            gc.collect()
        return "gone"

    assert in_child(let_go) == "gone"
    if pending is None:
        pending = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
    assert torch.equal(pending.source, recv.source)
    assert_works(ranks, ep)
    meet(ranks)
    ep.close()
    with make(ranks) as new:
        assert_works(ranks, new)


@distributed_test(world_size=2)
def test_garbage_of_the_parent(ranks: Ranks) -> None:
    """Connections that were closed in order, but that the parent has not collected yet."""
    gc.disable()
    try:
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
        garbage: list[Any] = [group]
        garbage.append(garbage)
        del group, garbage
        with make(ranks) as ep:
            assert in_child(lambda: gc.collect() >= 0) == "True"
            assert_works(ranks, ep)
    finally:
        gc.enable()


@distributed_test(world_size=2)
def test_a_result_that_a_thread_of_the_parent_finishes(ranks: Ranks) -> None:
    """A child that reads it raises; the thread is not there to let go of it."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep, ThreadPoolExecutor(1) as pool:
        if ranks.rank:
            time.sleep(0.5)  # rank 0 forks while its thread waits
        recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=True)
        read = pool.submit(lambda: recv.x)
        if not ranks.rank:
            time.sleep(0.2)
            said = in_child(lambda: type(error_of(lambda: recv.x)).__name__)
            assert said in ("AttributeError", "RuntimeError")
        assert read.result() is recv.x
        assert_works(ranks, ep)


def test_a_child_that_comes_to_its_end(tmp_path: Path) -> None:
    """Its interpreter lets go of everything that the parent had, as that of any program does."""
    program = [
        sys.executable,
        str(Path(__file__).with_name("fork_program.py")),
        str(tmp_path / "store"),
    ]
    ranks = [
        subprocess.Popen([*program, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["the child's exit code: 7\nalive\n", "alive\n"]


@distributed_test(world_size=2)
def test_the_drop_in(ranks: Ranks) -> None:
    buffer, world = deep_ep.Buffer(ranks.group), World.of(ranks)
    other = World.of(ranks, hidden=256)
    recv_x, _, _, _, handle, _ = fresh(buffer, world)

    def use() -> object:
        calls: dict[str, Callable[[], Any]] = {
            "dispatch": lambda: fresh(buffer, world),
            "of other sizes": lambda: fresh(buffer, other),
            "combine": lambda: buffer.combine(recv_x, handle),
        }
        wrong = refusals(calls)
        buffer.destroy()
        return wrong

    assert in_child(use) == "[]"
    assert torch.equal(fresh(buffer, world)[0], recv_x)
    buffer.combine(recv_x, handle)
    meet(ranks)


class Numbers(Dataset[torch.Tensor]):
    """Rows of the sizes of bad input; made by workers that hold the parent's object too."""

    def __init__(self, ep: ty.ExpertParallel) -> None:
        self.ep = ep

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> torch.Tensor:
        error = error_of(lambda: self.ep.check())
        assert isinstance(error, RuntimeError) and "is a fork" in str(error)
        gc.collect()
        return torch.full((SIZES["hidden"],), float(at))


@distributed_test(world_size=2)
def test_training_beside_a_loader_that_forks(ranks: Ranks) -> None:
    """Workers come and go in two epochs, while calls and backwards are made."""
    inputs = Inputs.of(ranks, 2)
    with make(ranks, timeout=100.0) as ep:
        scale = torch.ones((), requires_grad=True)
        for _ in range(2):
            loader = DataLoader(
                Numbers(ep), batch_size=2, num_workers=2, multiprocessing_context="fork"
            )
            for rows in loader:
                recv = ep.dispatch(rows * scale, inputs.topk_idx)
                ep.combine(recv.x, recv.handle).sum().backward()
        assert scale.grad is not None and float(scale.grad) > 0
        assert_works(ranks, ep)
