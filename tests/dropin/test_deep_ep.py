"""``tokenyard.deep_ep`` in normal mode: what DeepEP documents, at any number of ranks, against
plain loops.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tokenyard as ty
from deep_ep_calls import fresh
from deep_ep_world import TOKENS, World, calc_diff, from_fp8, to_fp8
from nvlink_pool import SOAK, without_devices
from operations import counted
from tokenyard import deep_ep
from tokenyard.deep_ep import token_layout
from tokenyard.deep_ep.handles import InternodeHandle, NormalHandle, kind_for
from tokenyard.deep_ep.runtime import Runtime
from tokenyard.deep_ep.streams import Streams
from tokenyard.testing import Ranks, distributed_test


@pytest.mark.portable
@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_round_trip(ranks: Ranks) -> None:
    """Fresh dispatch, cached dispatch, combine; uneven and empty ranks; experts that do not divide
    by ranks; one buffer.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group, int(1e9))
    for tokens in TOKENS:
        for num_experts in (12, 13):
            world = World.of(ranks, tokens, num_experts)
            recv_x, idx, weights, counts, handle, event = fresh(buffer, world)
            assert event.event is None
            assert torch.equal(recv_x, world.take(rank, world.x))
            assert idx.dtype == torch.int64 and torch.equal(idx, world.local_idx(rank))
            assert weights.dtype == torch.float32 and torch.equal(
                weights, world.local_weights(rank)
            )
            assert counts == world.counts(rank)
            again = buffer.dispatch(world.x[rank], handle)
            assert (
                torch.equal(again[0], recv_x)
                and again[1:5] == (None,) * 4
                and again[5].event is None
            )
            out, out_weights, event = buffer.combine(
                world.work(rank, recv_x), handle, topk_weights=weights
            )
            assert torch.equal(out.float(), world.combined(rank)) and out.dtype == torch.bfloat16
            assert torch.equal(
                out_weights, torch.where(world.idx[rank] < 0, 0.0, world.weights[rank])
            )
            assert buffer.combine(recv_x, handle)[1] is None and event.event is None
    buffer.destroy()


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_layout(ranks: Ranks) -> None:
    buffer = deep_ep.Buffer(ranks.group)
    for tokens in TOKENS:
        world = World.of(ranks, tokens, 13 if tokens == "uneven" else 12)
        for idx in (world.idx[ranks.rank], world.idx[ranks.rank].int()):
            per_rank, per_node, per_expert, in_ranks, event = buffer.get_dispatch_layout(
                idx, world.num_experts, buffer.capture(), True, True
            )
            assert (
                torch.equal(in_ranks, world.in_ranks(ranks.rank))
                and per_node is None
                and event.event is not None
            )
            assert torch.equal(per_rank, in_ranks.sum(0).int()) and per_rank.dtype == torch.int32
            assert per_expert.tolist() == [int((idx == e).sum()) for e in range(world.num_experts)]


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_fp8_pairs(ranks: Ranks) -> None:
    """Data and scales of any strides and of both dtypes come as they were sent, contiguous."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks, hidden=512, whole=False)
    pairs = [to_fp8(x) for x in world.x]
    # Whole numbers would have one.
    assert all(len(torch.unique(scales, dim=0)) == len(scales) for _, scales in pairs)
    data = world.take(rank, [pair[0].view(torch.uint8) for pair in pairs]).view(torch.float8_e4m3fn)
    for dtype in (torch.float32, torch.int32):
        all_scales = [pair[1].view(dtype) for pair in pairs]
        mine = all_scales[rank]
        for strided in (mine, mine.t().contiguous().t(), mine.repeat_interleave(2, 1)[:, ::2]):
            assert torch.equal(strided, mine)
            recv, *_, handle, _ = fresh(buffer, world, x=(pairs[rank][0], strided))
            assert isinstance(recv, tuple) and recv[1].is_contiguous() and recv[1].dtype == dtype
            assert torch.equal(recv[0].view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(recv[1], world.take(rank, all_scales))
            again = buffer.dispatch(x=(pairs[rank][0], strided), handle=handle)[0]
            assert torch.equal(again[0].view(torch.uint8), data.view(torch.uint8)) and torch.equal(
                again[1], recv[1]
            )


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_worst_case_rows(ranks: Ranks) -> None:
    """``num_worst_tokens`` gives the same rows, bit for bit, then ids of -1; also where it does not
    divide by the ranks.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    for tokens in TOKENS:
        world = World.of(ranks, tokens)
        most = max(len(idx) for idx in world.idx)
        exact, idx, weights, _, handle, _ = fresh(buffer, world)
        num_rows = len(exact)
        for worst in (most * ranks.world_size, most * ranks.world_size + 1):
            recv_x, recv_idx, recv_weights, counts, static, _ = fresh(
                buffer, world, num_worst_tokens=worst
            )
            assert len(recv_x) == len(recv_idx) == len(recv_weights) == worst and counts == []
            assert torch.equal(recv_x[:num_rows], exact) and torch.equal(recv_idx[:num_rows], idx)
            assert torch.equal(recv_weights[:num_rows], weights) and bool(
                (recv_idx[num_rows:] == -1).all()
            )
            assert static[0][:, rank].tolist() == world.prefix(rank) and len(static[3]) == worst
            assert static[0][:, rank - 1].tolist() == [-1] * ranks.world_size
            rows = torch.full_like(recv_x, float("nan"))
            rows[:num_rows] = world.work(rank, exact)
            out, out_weights, _ = buffer.combine(rows, static, topk_weights=recv_weights)
            want = buffer.combine(rows[:num_rows], handle, topk_weights=weights)
            assert torch.equal(out, want[0]) and torch.equal(out_weights, want[1])
            again = buffer.dispatch(world.x[rank], handle=static)[0]
            assert torch.equal(again[:num_rows], exact) and len(again) == worst


@without_devices  # there an object whose call was refused is of no more use
@distributed_test(world_size=2)
def test_refusals_among_several_bounds(ranks: Ranks) -> None:
    """A refusal reaches the ranks in a call of the same ``num_worst_tokens``, and ranks whose
    bounds by ranks differ say so."""
    rank, buffer, world = ranks.rank, deep_ep.Buffer(ranks.group), World.of(ranks, "uneven")
    exact, _, weights, _, known, _ = fresh(buffer, world)
    rows, least = world.work(rank, exact), 2 * len(world.idx[1])
    want = buffer.combine(rows, known, topk_weights=weights)
    for worst in range(least, least + 12):
        with warnings.catch_warnings(record=True) as told:
            x, its_idx, its_weights, _, handle, _ = fresh(buffer, world, num_worst_tokens=worst)
        assert ["6 objects" in str(each.message) for each in told] == (
            [True] if worst == least + 8 and not rank else []
        )
        assert len(x) == len(its_idx) == worst and torch.equal(x[: len(exact)], exact)
        assert bool((its_idx[len(exact) :] == -1).all())
        x[: len(exact)] = rows
        out, out_weights, _ = buffer.combine(x, handle, topk_weights=its_weights)
        assert torch.equal(out, want[0]) and torch.equal(out_weights, want[1])
    layout = buffer.get_dispatch_layout(world.idx[rank], world.num_experts)
    bad: dict[str, dict[str, Any]] = {
        "topk_weights": {"topk_weights": world.weights[rank][:, :1]},
        "topk_idx": {"topk_idx": world.idx[rank][:, 0]},
        "x has shape": {"x": world.x[rank][:, 0]},
        "num_tokens_per_expert": {"num_tokens_per_expert": layout[2].float()},
        "x is": {"num_worst_tokens": np.int64(least + 2), "x": world.x[rank].long()},
    }
    for words, changes in bad.items():
        changes = {"num_worst_tokens": least + 2, **(changes if rank else {})}
        with pytest.raises(ValueError if rank else ty.PeerError, match=words):
            fresh(buffer, world, layout=layout, **changes)
    with pytest.raises(ty.Mismatch, match="num_worst_tokens"):
        fresh(buffer, world, num_worst_tokens=least + 20 + 4 * rank)
    assert torch.equal(fresh(buffer, world, num_worst_tokens=least + 2)[0][: len(exact)], exact)


@distributed_test(world_size=3)
def test_bounds_that_differ_a_little(ranks: Ranks) -> None:
    """Ranks whose bounds are the same by ranks, rounded down, get all rows; others say so."""
    rank, buffer, world = ranks.rank, deep_ep.Buffer(ranks.group), World.of(ranks, "uneven")
    tokens = 4 if rank else 3
    world.x[rank] = torch.ones(tokens, 128, device=ranks.device)
    world.idx[rank] = torch.zeros(tokens, 1, dtype=torch.int64, device=ranks.device)
    world.weights[rank] = torch.ones(tokens, 1, device=ranks.device)
    with pytest.raises(ty.Mismatch, match="num_worst_tokens"):
        fresh(buffer, world, num_worst_tokens=12 if rank else 10)
    for worst in (12 + rank, 14 - rank):
        x, idx, weights, _, handle, _ = fresh(buffer, world, num_worst_tokens=worst)
        assert len(x) == len(idx) == len(handle[3]) == worst
        assert int((idx >= 0).sum()) == (0 if rank else 11)
        out, out_weights, _ = buffer.combine(x, handle, topk_weights=weights)
        assert out_weights is not None and bool((out == 1).all()) and bool((out_weights == 1).all())
        x, scales = buffer.dispatch(to_fp8(world.x[rank]), handle=handle)[0]
        assert len(x) == len(scales) == worst


@distributed_test(world_size=2)
def test_one_row_too_few(ranks: Ranks) -> None:
    """A bound that does not divide by the ranks holds for their sum."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world, here = World.of(ranks, "uneven"), ranks.device
    world.x[rank] = torch.ones(5, 128, dtype=torch.bfloat16, device=here)
    world.idx[rank] = torch.zeros(5, 1, dtype=torch.int64, device=here)
    world.weights[rank] = torch.ones(5, 1, device=here)
    with pytest.raises(ValueError, match=r"num_worst_tokens \(9\) must be at least 10"):
        fresh(buffer, world, num_worst_tokens=9)
    assert int((fresh(buffer, world, num_worst_tokens=10)[1] >= 0).sum()) == (0 if rank else 10)


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_without_top_k(ranks: Ranks) -> None:
    """Layout tensors alone: the same rows and counts, no ids; the handle serves cached dispatches
    and combine.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    for tokens, num_experts in product(
        TOKENS, (13, 16)
    ):  # some ranks hold one more, or all as many as fill whole words
        world = World.of(ranks, tokens, num_experts)
        recv_x, _, weights, counts, handle, _ = fresh(buffer, world, topk_weights=None)
        assert weights is None
        _, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(
            world.idx[rank], world.num_experts
        )
        bare = buffer.dispatch(
            world.x[rank],
            is_token_in_rank=in_ranks,
            num_tokens_per_expert=per_expert,
            expert_alignment=4,
        )
        assert torch.equal(bare[0], recv_x) and bare[1] is None and bare[2] is None
        assert bare[3] == [
            -(-count // 4) * 4 for count in world.counts(rank)
        ] and counts == world.counts(rank)
        assert torch.equal(bare[4][0], handle[0]) and bare[4][4] is in_ranks
        assert torch.equal(buffer.dispatch(world.x[rank], handle=bare[4])[0], recv_x)
        assert torch.equal(buffer.combine(recv_x, bare[4])[0], buffer.combine(recv_x, handle)[0])


class Seen(TorchFunctionMode):
    """Counts calls of torch, as ``torch.set_default_device`` would look at each of them."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@distributed_test(world_size=2)
def test_a_default_device_is_not_asked_for_each_call_of_torch(ranks: Ranks) -> None:
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks, "uneven", 12)
    x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
    _, _, _, _, handle, _ = fresh(buffer, world)
    blocks = buffer.low_latency_dispatch(x, idx, 28, 12)
    calls: list[Callable[[], Any]] = [
        lambda: fresh(buffer, world),
        lambda: buffer.dispatch(x, handle=handle),
        lambda: buffer.low_latency_dispatch(x, idx, 28, 12),
        lambda: buffer.low_latency_combine(from_fp8(*blocks[0]), idx, weights, blocks[2]),
    ]
    for call in calls:
        with Seen() as seen:
            call()
        assert seen.count < 12, seen.count


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_handle_tuple(ranks: Ranks) -> None:
    """Six items as DeepEP documents them; all rows count as sent through the first channel."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    for tokens in TOKENS:
        world = World.of(ranks, tokens)
        handle = fresh(buffer, world, config=deep_ep.Config(8, 6, 256))[4]
        assert isinstance(handle, tuple) and len(handle) == 6
        matrix, channels, recv_channels, source, in_ranks, head = handle
        assert matrix.t().tolist() == [world.prefix(peer) for peer in range(ranks.world_size)]
        assert source.tolist() == [token for _, token in world.rows[rank]]
        assert torch.equal(in_ranks, world.in_ranks(rank))
        assert channels.tolist() == [[int(count)] * 4 for count in in_ranks.sum(0)]
        sent = [
            world.prefix(rank)[peer] - (world.prefix(rank)[peer - 1] if peer else 0)
            for peer in range(ranks.world_size)
        ]
        assert recv_channels.tolist() == [[0, count, count, count] for count in sent]
        for peer in range(ranks.world_size):
            going = head[in_ranks[:, peer], peer]
            assert going.tolist() == list(range(len(going))) and bool(
                (head[~in_ranks[:, peer], peer] == -1).all()
            )
        assert all(
            item.dtype == torch.int32 for item in (matrix, channels, recv_channels, source, head)
        )
        assert (
            handle[0] is matrix
            and handle[-6] is matrix
            and handle[1:3] == (channels, recv_channels)
        )
        assert handle == handle and {handle: 1}[handle] == 1
        with pytest.raises(IndexError):
            handle[6]


def test_more_than_eight_ranks() -> None:
    """From 9 ranks on DeepEP counts nodes of 8."""
    world = World(9, "even", 18)
    for rank in (0, 3, 8):
        in_ranks = world.in_ranks(rank)
        per_rank, per_node, _, got = token_layout.layout(world.idx[rank], 18, 9)
        assert torch.equal(got, in_ranks) and per_rank.tolist() == in_ranks.sum(0).tolist()
        assert per_node is not None and per_node.dtype == torch.int32
        assert per_node.tolist() == [
            int(in_ranks[:, :8].any(1).sum()),
            int(in_ranks[:, 8:].any(1).sum()),
        ]
        runtime = Runtime(rank, 9, Streams())
        assert (
            runtime.get_num_rdma_ranks(),
            runtime.get_rdma_rank(),
            runtime.get_root_rdma_rank(True),
        ) == (
            2,
            rank // 8,
            rank % 8,
        )
    assert kind_for(8) is NormalHandle and kind_for(9) is InternodeHandle


@distributed_test(world_size=2)
def test_internode_handle_tuple(ranks: Ranks) -> None:
    """Ten items, made here from a dispatch between two ranks; what only forwarding ranks have is
    None.
    """
    world, rank = World.of(ranks), ranks.rank
    in_ranks, known = world.in_ranks(rank), fresh(deep_ep.Buffer(ranks.group), world)[4]
    handle = InternodeHandle.around(known.ep, known.native, in_ranks=in_ranks, num_sms=8)
    assert len(handle) == len(list(handle)) == 10 and handle[0] is in_ranks
    assert handle[-4].tolist() == world.prefix(rank) and handle[-3].tolist() == [
        list(row) for row in world.rows[rank]
    ]
    assert handle[1].tolist() == [[int(in_ranks.any(1).sum())] * 4]
    assert handle[2].tolist() == [[int(count)] * 4 for count in in_ranks.sum(0)]
    assert handle[5][:, 1].tolist() == [
        world.prefix(rank)[0],
        world.prefix(rank)[1] - world.prefix(rank)[0],
    ]
    assert handle[8][in_ranks.any(1), 0].tolist() == list(range(int(in_ranks.any(1).sum())))
    assert [handle[at] for at in (3, 4, 9)] == [None] * 3


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_close_to_exact_arithmetic(ranks: Ranks) -> None:
    """DeepEP's own measure and bounds, on random numbers; the same call twice gives the
    same bits.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks, "even", 32, 8, 1024, whole=False, dropped=0.0)
    times = world.in_ranks(rank).sum(1, keepdim=True)
    for x in (world.x[rank], to_fp8(world.x[rank])):
        recv, _, weights, _, handle, _ = fresh(buffer, world, x=x)
        rows = recv if isinstance(recv, Tensor) else from_fp8(*recv)
        want = world.x[rank] if isinstance(x, Tensor) else from_fp8(*x)
        out, out_weights, _ = buffer.combine(rows, handle, weights)
        assert calc_diff(out.float() / times, want) < 5e-6
        assert calc_diff(out_weights, world.weights[rank]) < 1e-9
        second = fresh(buffer, world, x=x)[0]
        pairs = zip(recv, second, strict=True) if isinstance(recv, tuple) else [(recv, second)]
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
        assert torch.equal(out, buffer.combine(rows, handle)[0])


@distributed_test(world_size=2)
def test_dtypes_bias_and_alignment(ranks: Ranks) -> None:
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    bias = [torch.full_like(world.x[rank], value) for value in (1.0, 2.0)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = [each.to(dtype) for each in world.x]
        recv_x, idx, _, counts, handle, _ = fresh(
            buffer, world, x=x[rank], topk_idx=world.idx[rank].int(), expert_alignment=8
        )
        assert torch.equal(recv_x, world.take(rank, x)) and idx.dtype == torch.int32
        assert counts == [-(-count // 8) * 8 for count in world.counts(rank)]
        rows, want = world.work(rank, recv_x), world.combined(rank)
        one, two = (bias[0].to(dtype), tuple(each.to(dtype) for each in bias))
        assert torch.equal(buffer.combine(rows, handle, bias=one)[0].float(), want + 1)
        assert torch.equal(buffer.combine(rows, handle, None, two)[0], (want + 3).to(dtype))


@without_devices  # counts of nvlink become a tensor when they are read
@distributed_test(world_size=2)
def test_no_operation_of_torch_but_those_of_native_calls(ranks: Ranks) -> None:
    """Fresh and cached dispatch, pairs too, static shapes, combine with weights or without."""
    buffer, world = deep_ep.Buffer(ranks.group), World.of(ranks)
    x, idx, weights = (each[ranks.rank] for each in (world.x, world.idx, world.weights))
    per_expert = buffer.get_dispatch_layout(idx, world.num_experts)[2]
    known = {"num_tokens_per_expert": per_expert, "topk_idx": idx, "topk_weights": weights}
    worst, pair = 2 * max(map(len, world.x)), to_fp8(x)
    rows, _, recv_weights, _, handle, _ = buffer.dispatch(x, **known)
    static = buffer.dispatch(x, **known, num_worst_tokens=worst)[4]
    ep, plan = handle.ep, handle.native
    calls = [
        (lambda: buffer.dispatch(x, **known), lambda: ep.dispatch(x, idx, weights)),
        (
            lambda: buffer.dispatch(pair, **known),
            lambda: ep.dispatch(ty.Quantized(*pair), idx, weights),
        ),
        (
            lambda: buffer.dispatch(x, **known, num_worst_tokens=worst),
            lambda: static.ep.dispatch(x, idx, weights, exact=False),
        ),
        (lambda: buffer.dispatch(x, handle), lambda: ep.dispatch(x, handle=plan)),
        (lambda: buffer.combine(rows, handle), lambda: ep.combine(rows, plan)),
        (
            lambda: buffer.combine(rows, handle, recv_weights),
            lambda: ep.combine(rows, plan, reduce_weights=recv_weights),
        ),
    ]
    for at, (layer, native) in enumerate(calls):
        layer(), native()  # what is worked out once
        with torch.no_grad():
            through, alone = counted(layer), counted(native)
        assert through == alone, (at, through, alone)


@pytest.mark.portable
@distributed_test(world_size=2)
def test_events(ranks: Ranks) -> None:
    """An event if and only if the call is asynchronous; any event may come before; nothing needs
    CUDA.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    before = [
        None,
        deep_ep.EventOverlap(),
        buffer.capture(),
        deep_ep.EventOverlap(deep_ep.EventHandle(), (world.x[0],)),
    ]
    for previous in before:
        for later in (False, True):
            options = {
                "previous_event": previous,
                "async_finish": later,
                "allocate_on_comm_stream": later,
            }
            *result, handle, event = fresh(buffer, world, **options)
            events = [event, buffer.dispatch(world.x[rank], handle=handle, **options)[5]]
            out, _, event = buffer.combine(world.work(rank, result[0]), handle, **options)
            for each in (*events, event):
                assert isinstance(each, deep_ep.EventOverlap) and (each.event is not None) == later
                if later:
                    each.current_stream_wait()
                    each.current_stream_wait()
                    each.event.current_stream_wait()
                with each as entered:
                    assert entered is each
            assert torch.equal(out.float(), world.combined(rank))
    with pytest.raises(AssertionError, match="not asynchronous"):
        deep_ep.EventOverlap().current_stream_wait()
    assert before[3].extra_tensors[0] is world.x[0]
    assert buffer.get_comm_stream() is not None


@distributed_test(world_size=2)
def test_autograd_stays_out(ranks: Ranks) -> None:
    """As in DeepEP results carry no gradients, whatever the mode; calls inside and outside of
    inference mode mix.
    """
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    x = world.x[rank].clone().requires_grad_()
    with torch.inference_mode():
        fresh(buffer, World.of(ranks, "only last"))
    recv_x, _, _, _, handle, _ = fresh(buffer, world, x=x)
    assert torch.is_grad_enabled() and not recv_x.requires_grad
    with torch.inference_mode():
        inside = fresh(buffer, world, num_worst_tokens=64)[0]
    assert torch.equal(
        fresh(buffer, world, num_worst_tokens=64)[0][: len(recv_x)], inside[: len(recv_x)]
    )
    assert not buffer.combine(recv_x.requires_grad_(), handle)[0].requires_grad


@distributed_test(world_size=2)
def test_other_default_device_and_dtype(ranks: Ranks) -> None:
    """DeepEP's own programs set both; ``meta`` shows every tensor that was made without saying
    where.
    """
    rank, world, here = ranks.rank, World.of(ranks), ranks.device
    want = world.take(rank, world.x), world.local_idx(rank), world.combined(rank)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        buffer = deep_ep.Buffer(ranks.group)
        recv_x, idx, _, _, handle, _ = fresh(buffer, world)
        assert torch.equal(recv_x, want[0]) and torch.equal(idx, want[1])
        assert torch.equal(buffer.combine(recv_x * (rank + 1), handle)[0].float(), want[2])
        assert all(item.device == here for item in handle)
        worst = fresh(buffer, world, num_worst_tokens=40)
        assert torch.equal(worst[0][: len(recv_x)], recv_x) and all(
            item.device == here for item in worst[4]
        )
        _, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(
            world.idx[rank], world.num_experts
        )
        bare = buffer.dispatch(
            world.x[rank], is_token_in_rank=in_ranks, num_tokens_per_expert=per_expert
        )
        assert torch.equal(bare[0], recv_x)
        rows, counts, padded, _, _ = buffer.low_latency_dispatch(
            world.x[rank], world.idx[rank], 16, 12
        )
        assert rows[1].device == padded[0].device == padded[1].device == here
        stats = torch.zeros(2, dtype=torch.int64, device=here)
        out, _, _ = buffer.low_latency_combine(
            from_fp8(*rows),
            world.idx[rank],
            world.weights[rank],
            padded,
            combine_wait_recv_cost_stats=stats,
        )
        assert out.device == here == counts.device
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
