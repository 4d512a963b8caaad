"""Handles made again from their items, as autograd keeps them: XTuner saves ``*handle`` and passes
``ctx.saved_tensors`` back.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tokenyard as ty
from bad_input import check, error_of
from deep_ep_calls import fresh
from deep_ep_world import World
from nvlink_pool import without_devices
from tokenyard import deep_ep
from tokenyard.deep_ep.handles import InternodeHandle
from tokenyard.testing import Ranks, distributed_test

pytestmark = without_devices


class Dispatch(torch.autograd.Function):
    """Keeps nothing of the handle but its items."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, buffer: Any, world: World) -> Any:
        later = deep_ep.Buffer.capture()
        options = {"async_finish": True, "allocate_on_comm_stream": True, "previous_event": later}
        rows, _, recv_weights, _, handle, event = fresh(
            buffer, world, x=x, topk_weights=weights, **options
        )
        event.current_stream_wait()
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return rows, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_weights: Tensor, _handle: Any) -> Any:
        given = ctx.saved_tensors
        assert type(given) is tuple
        x, weights, _ = ctx.buffer.combine(grad.contiguous(), given, topk_weights=grad_weights)
        return x, weights, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Any, buffer: Any) -> Tensor:
        ctx.save_for_backward(*handle)
        ctx.buffer = buffer
        return buffer.combine(rows, handle)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.saved_tensors)
        return rows, None, None


class Aliases(saved_tensors_hooks):
    """Autograd gets other tensors of the same memory back."""

    def __init__(self) -> None:
        super().__init__(lambda t: t.detach(), lambda t: t.view_as(t))


def layer(x: Tensor, weights: Tensor, buffer: Any, world: World) -> Tensor:
    rows, recv_weights, handle = Dispatch.apply(x, weights, buffer, world)  # type: ignore[misc]
    return Combine.apply(rows * recv_weights.sum(1, keepdim=True), handle, buffer)  # type: ignore


def gradients(
    buffer: Any, world: World, call: Callable[..., Tensor], repeats: int
) -> tuple[Tensor, ...]:
    """Of rows and weights; all forwards come before the first backward."""
    rank = buffer.rank
    leaves = world.x[rank].float().requires_grad_(), world.weights[rank].clone().requires_grad_()
    outputs = [call(*leaves, buffer, world) for _ in range(repeats)]
    gc.collect()
    for output in outputs:
        output.backward(torch.ones_like(output))
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


@distributed_test(world_size=(1, 3))
def test_saved_for_backward(ranks: Ranks) -> None:
    """As a dense layer's gradients, and as with checkpoints and hooks that give other tensors."""
    buffer, rank = deep_ep.Buffer(ranks.group), ranks.rank
    for tokens in ("uneven", "empty first"):
        world = World.of(ranks, tokens)
        again = [
            gradients(buffer, world, layer, 2),
            gradients(
                buffer, world, lambda *given: checkpoint(layer, *given, use_reentrant=False), 2
            ),
        ]
        with Aliases():
            again.append(gradients(buffer, world, layer, 2))
        visits = world.in_ranks(rank).sum(1, keepdim=True)  # each brings every entry back
        x, weights = world.x[rank].float(), world.weights[rank]
        want_x = 2 * (weights * (world.idx[rank] >= 0)).sum(1, keepdim=True).expand_as(x)
        want_weights = (2 * visits * x.sum(1, keepdim=True)).expand_as(weights)
        for got_x, got_weights in again:
            assert torch.equal(got_x, want_x) and torch.equal(got_weights, want_weights)
    with saved_tensors_hooks(torch.clone, torch.clone):  # no memory of the items
        world = World.of(ranks)
        error = error_of(lambda: gradients(buffer, world, layer, 1))
    check(error, ValueError, "handle must be the tuple", "memory")


@distributed_test(world_size=2)
def test_every_kind_of_handle(ranks: Ranks) -> None:
    """Items of 6, 10 and 5; a list, other tensors of the memory; after the handle is gone."""
    buffer, world, rank = deep_ep.Buffer(ranks.group), World.of(ranks), ranks.rank
    rows, _, _, _, handle, _ = fresh(buffer, world)
    wide = InternodeHandle.around(
        handle.ep, handle.native, in_ranks=world.in_ranks(rank), num_sms=8
    )
    want = buffer.combine(rows, handle)[0]
    for known in (handle, wide):
        aliases = [each if each is None else each.detach() for each in known]
        for given in (tuple(known), list(known), tuple(aliases)):
            assert torch.equal(buffer.combine(rows, given)[0], want)
            assert torch.equal(buffer.dispatch(world.x[rank], handle=given)[0], rows)
    blocks, _, low, _, _ = buffer.low_latency_dispatch(
        world.x[rank], world.idx[rank], 28, 12, use_fp8=False
    )
    picks = world.idx[rank], world.weights[rank]
    want = buffer.low_latency_combine(blocks, *picks, low)[0]
    kept, (most, hidden, experts) = [each.detach() for each in low[:2]], low[2:]
    buffer.get_next_low_latency_combine_buffer(low).copy_(blocks)
    del low
    again = (*kept, most, hidden, experts)
    assert torch.equal(buffer.low_latency_combine(blocks, *picks, again)[0], want)
    assert torch.equal(buffer.low_latency_combine(blocks, *picks, again, zero_copy=True)[0], want)
    wrong = (*kept, most + 1, hidden, experts)
    call = lambda: buffer.low_latency_combine(blocks, *picks, wrong)  # noqa: E731
    check(error_of(call), ValueError, "handle[2] is not what the dispatch returned there")


@distributed_test(world_size=2)
def test_nothing_stays(ranks: Ranks) -> None:
    """Items keep what calls need, whichever of them is left; without them it is gone."""
    buffer, world = deep_ep.Buffer(ranks.group), World.of(ranks)
    for place in (0, 3, 5):
        handle = fresh(buffer, world)[4]
        plan = weakref.ref(handle.native.plan.returns)
        items = tuple(handle)
        one = items[place].detach()
        del handle, items
        gc.collect()
        assert plan() is not None
        del one
        gc.collect()
        assert plan() is None
    handle = fresh(buffer, world)[4]
    lent = handle[4]
    plan = weakref.ref(handle.native.plan.returns)
    del handle
    gc.collect()
    assert plan() is None and torch.equal(lent, world.in_ranks(ranks.rank))


@distributed_test(world_size=2)
def test_tuples_that_are_refused(ranks: Ranks) -> None:
    """By name, on the rank that gave them, before anything moves; the other rank learns why."""
    buffer, world, rank = deep_ep.Buffer(ranks.group), World.of(ranks), ranks.rank
    rows, _, _, _, handle, _ = fresh(buffer, world)
    items, other = tuple(handle), tuple(fresh(buffer, world)[4])
    place = "is not what the dispatch returned there"
    cases: list[tuple[Any, tuple[str, ...]]] = [
        (tuple(each.clone() for each in items), ("handle must be the tuple", "memory")),
        (items[:-1], ("handle has 5 items", "6")),
        ((*items, None), ("handle has 7 items", "6")),
        ((*items[:3], other[3], *items[4:]), (f"handle[3] {place}",)),
        ((items[0], items[2], items[1], *items[3:]), (f"handle[1] {place}",)),
        ((*items[:4], items[4].clone(), items[5]), (f"handle[4] {place}",)),
        ((*items[:5], None), (f"handle[5] {place}",)),
        ((*items[:3], items[3][1:], *items[4:]), (f"handle[3] {place}",)),
        ((items[0].to_sparse(), *items[1:]), (f"handle[0] {place}",)),
    ]
    for number, (given, words) in enumerate(cases):
        here = number % 2 == rank
        for call in (
            lambda known: buffer.combine(rows, known),
            lambda known: buffer.dispatch(world.x[rank], handle=known),
        ):
            error = error_of(lambda call=call, known=given if here else handle: call(known))
            check(error, ValueError if here else ty.PeerError, *words)
    assert torch.equal(buffer.dispatch(world.x[rank], handle=items)[0], rows)
    buffer.destroy()
    with pytest.raises(RuntimeError, match="was destroyed"):
        deep_ep.Buffer(ranks.group).combine(rows, items)
