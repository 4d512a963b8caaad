"""``tokenyard.deep_ep.Buffer`` from making to destroying, what it refuses, and what frameworks read
of it.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from bad_input import error_of, gloo, meet
from deep_ep_calls import fresh
from deep_ep_world import World
from tokenyard import deep_ep
from tokenyard.testing import Ranks, distributed_test


@distributed_test(world_size=2)
def test_life(ranks: Ranks) -> None:
    """Several buffers and handles at once, out of order; destroyed twice, collected, or asked after
    the end.
    """
    rank = ranks.rank
    first, second = (
        deep_ep.Buffer(ranks.group, explicitly_destroy=True),
        deep_ep.Buffer(gloo(ranks)),
    )
    worlds = [World.of(ranks, seed=seed, hidden=128 * (1 + seed)) for seed in range(3)]
    made = [
        (buffer, world, *fresh(buffer, world)) for world in worlds for buffer in (first, second)
    ]
    for buffer, world, recv_x, _, _, _, handle, _ in reversed(made):
        assert torch.equal(
            buffer.combine(world.work(rank, recv_x), handle)[0].float(), world.combined(rank)
        )
    first.destroy()
    first.destroy()
    assert first.runtime is None and first.group is ranks.group
    error = error_of(lambda: fresh(first, worlds[0]))
    assert isinstance(error, RuntimeError) and "destroyed" in str(error)
    rows, handle = made[0][2], made[0][6]
    for buffer in (first, second):
        error = error_of(lambda buffer=buffer: buffer.combine(rows, handle))
        assert (
            isinstance(error, RuntimeError) and "Buffer" in str(error) and "destroyed" in str(error)
        )
    rows, handle, gone = made[1][2], made[1][6], weakref.ref(second)
    made.clear()
    del second, buffer, error  # its traceback has the buffer
    gc.collect()
    assert gone() is None
    third = deep_ep.Buffer(gloo(ranks))
    assert torch.equal(
        third.combine(worlds[0].work(rank, rows), handle)[0].float(), worlds[0].combined(rank)
    )
    native = weakref.ref(handle.ep)
    handle = third = None
    gc.collect()
    assert native() is None
    meet(ranks)


@pytest.mark.parametrize("known", [(), (12,), (12, 18)], ids=str)
@distributed_test(world_size=3)
def test_ranks_that_disagree_on_sizes_learn_it_at_once(
    ranks: Ranks, known: tuple[int, ...]
) -> None:
    """Whoever has an object of its size already, and whoever makes one; every object, old and new,
    is good afterwards.
    """
    os.environ["TOKENYARD_DEEP_EP_TIMEOUT"] = "1000"
    worlds = {experts: World.of(ranks, num_experts=experts) for experts in (12, 18, 24, 30)}
    try:
        buffer = deep_ep.Buffer(ranks.group)
        fresh(deep_ep.Buffer(ranks.group), worlds[12])  # the group is used
        want = {experts: fresh(buffer, worlds[experts])[0] for experts in known}
        for mine in ((12, 24, 12), (24, 12, 12), (12, 24, 30), (24, 24, 12)):
            error = error_of(lambda mine=mine: fresh(buffer, worlds[mine[ranks.rank]]))
            assert type(error) is ty.Mismatch, repr(error)
            assert "ranks disagree on num_experts: rank " in str(error), str(error)
            for experts, rows in want.items():
                assert torch.equal(fresh(buffer, worlds[experts])[0], rows)
        if known:
            recv_x, _, _, _, handle, _ = fresh(buffer, worlds[12])
            error = error_of(
                lambda: buffer.combine(recv_x, handle) if ranks.rank else fresh(buffer, worlds[30])
            )
            assert type(error) is ty.Mismatch, repr(error)
            buffer.combine(recv_x, handle)
        for experts in (24, 12, 18):
            rows = fresh(buffer, worlds[experts])[0]
            assert experts not in want or torch.equal(rows, want[experts])
    finally:
        del os.environ["TOKENYARD_DEEP_EP_TIMEOUT"]
    meet(ranks)


@distributed_test(world_size=2)
def test_refusals(ranks: Ranks) -> None:
    """Errors name what was wrong; afterwards the buffer works."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    x, idx = world.x[rank], world.idx[rank]
    recv_x, _, _, _, handle, _ = fresh(buffer, world)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: deep_ep.Buffer(), ValueError, "Either 'group' or 'comm' must be provided"),
        (lambda: deep_ep.Buffer(comm=object()), ty.NotSupported, "mpi4py"),
        (lambda: deep_ep.Buffer(ranks.group, colour="red"), TypeError, "colour"),
        (lambda: buffer.dispatch(x, topk_idx=idx), ValueError, "num_tokens_per_expert"),
        (lambda: fresh(buffer, world, topk_idx=idx, x=None), ValueError, "x must be"),
        (lambda: buffer.dispatch(x, handle=handle, topk_idx=idx), ValueError, "leave them out"),
        (lambda: buffer.dispatch(x, handle=tuple(handle)[1:]), ValueError, "handle has 5"),
        (lambda: buffer.combine(recv_x, None), ValueError, "handle must be"),
        (lambda: fresh(buffer, world, num_worst_tokens=2), ValueError, "num_worst_tokens (2)"),
        (
            lambda: buffer.dispatch(
                x, num_tokens_per_expert=idx.new_zeros(12), num_worst_tokens=99
            ),
            ValueError,
            "topk_idx",
        ),
        (lambda: deep_ep.Buffer.set_num_sms(21), ValueError, "21"),
        (lambda: deep_ep.Config(20, 256, 256), ValueError, "256"),
        (lambda: deep_ep.Config(20, 6, 256, 65, 128), ValueError, "65"),
        (lambda: buffer.low_latency_query_mask_buffer(torch.zeros(2)), ValueError, "enable_shrink"),
    ]
    for call, kind, words in wrong:
        error = error_of(call)
        assert isinstance(error, kind) and words in str(error), (words, error)
    assert torch.equal(fresh(buffer, world)[0], recv_x)
    error = error_of(lambda: buffer.combine(recv_x[:-1], handle))
    assert isinstance(error, ValueError) and "x has shape" in str(error)


@distributed_test(world_size=1)
def test_multiprocessors_that_a_caller_allows(ranks: Ranks) -> None:
    """None, until a config or ``set_num_sms`` asks for some; 20 in a config is nobody's wish."""
    buffer, world, patch = deep_ep.Buffer(ranks.group), World.of(ranks), pytest.MonkeyPatch()
    natives = buffer._natives  # pyright: ignore[reportPrivateUsage]
    patch.setattr(deep_ep.Buffer, "num_sms", 20)
    patch.setattr(deep_ep.Buffer, "_num_sms_is_set", False)
    usual = deep_ep.Buffer.get_dispatch_config(1)
    try:
        for wish in (None, 20, 24):
            if wish:
                deep_ep.Buffer.set_num_sms(wish)
            for config, want in ((None, wish), (deep_ep.Config(16), 16)):
                fresh(buffer, world, config=config)
                assert natives.num_sms == want
            fresh(buffer, world, config=usual)
            assert natives.num_sms == (wish and 20)
    finally:
        patch.undo()


@distributed_test(world_size=1)
def test_facts(ranks: Ranks) -> None:
    """Attributes, static methods and hints that frameworks read."""
    buffer = deep_ep.Buffer(
        ranks.group, 256, 512, True, 12, allow_mnnvl=True, use_fabric=True, num_nvl_peers=8
    )
    assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, ranks.group)
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes, buffer.low_latency_mode) == (
        256,
        512,
        True,
    )
    assert (
        not buffer.explicitly_destroy
        and not buffer.enable_shrink
        and weakref.ref(buffer)() is buffer
    )
    assert deep_ep.Buffer.num_sms == 20 and deep_ep.Buffer.is_sm90_compiled() is True
    deep_ep.Buffer.set_num_sms(24)
    try:
        for n in (1, 2, 3, 8, 12, 160, 200):
            for config in (
                deep_ep.Buffer.get_dispatch_config(n),
                deep_ep.Buffer.get_combine_config(n),
            ):
                assert (
                    config.num_sms == 24 and config.get_nvl_buffer_size_hint(2 * 7168, n) % 128 == 0
                )
                assert config.get_rdma_buffer_size_hint(2 * 7168, n) == 0
        for n, there, back in ((2, 24, 10), (4, 6, 9), (8, 6, 4), (16, 6, 4)):
            assert deep_ep.Buffer.get_dispatch_config(n) == deep_ep.Config(24, there, 256, 6, 128)
            assert deep_ep.Buffer.get_combine_config(n) == deep_ep.Config(24, back, 256, 6, 128)
    finally:
        deep_ep.Buffer.set_num_sms(20)
    names = ["num_sms", "num_max_nvl_chunked_send_tokens", "num_max_nvl_chunked_recv_tokens"]
    names += ["num_max_rdma_chunked_send_tokens", "num_max_rdma_chunked_recv_tokens"]
    values = [24, 8, 512, 16, 128]
    assert deep_ep.Config(**dict(zip(names, values, strict=True))) == deep_ep.Config(*values)
    for size_hint in (
        deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288),
        deep_ep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=1024, hidden=7168, num_ranks=8, num_experts=256
        ),
    ):
        assert isinstance(size_hint, int) and size_hint % 128 == 0
    view = buffer.get_local_buffer_tensor(torch.bfloat16, torch.Size([4, 8]), 2)
    view.fill_(3)
    assert buffer.get_local_buffer_tensor(torch.bfloat16)[:35].tolist() == [0] * 2 + [3] * 32 + [0]
    assert (
        buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).fill_(5).numel()
        == 512
    )
    assert buffer.get_local_buffer_tensor(torch.bfloat16).max() == 3  # the other memory
    runtime: Any = buffer.runtime
    assert runtime.is_available() and (runtime.get_num_rdma_ranks(), runtime.get_rdma_rank()) == (
        1,
        0,
    )
    assert runtime.get_root_rdma_rank(True) == runtime.get_root_rdma_rank(False) == 0
    assert deep_ep.topk_idx_t == torch.int64 and isinstance(deep_ep.__version__, str)
    assert not hasattr(deep_ep, "ElasticBuffer") and not hasattr(deep_ep, "HybridEPBuffer")
    assert dist.is_initialized()
