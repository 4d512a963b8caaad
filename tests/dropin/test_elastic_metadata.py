"""Handles of DeepEP's V2 buffers that a caller has changed: combine finds rows by what they say
now, as DeepEP's does. LightLLM sums the rows of each token itself, and NeMo Automodel puts back
what autograd has kept.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_calls_of import KINDS, Known, fresh, made, world_of
from elastic_checks import picked
from nvlink_pool import without_devices
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.testing import Ranks, distributed_test


def expanded(buffer: Any, world: Known, alignment: int, exact: bool) -> tuple[Tensor, Tensor, Any]:
    """A dispatch of a row per token and expert: rows that experts have worked on, weights, and the
    handle."""
    rank: int = buffer.rank_idx
    shape = {"do_expand": True, "expert_alignment": alignment, "do_cpu_sync": exact}
    rows, _, weights, handle, _ = fresh(buffer, world, **shape)
    num_rows, blocks = world.blocks(rank, alignment).num_rows, world.blocks(rank, alignment)
    rows[:num_rows] = blocks.work(rows[:num_rows])
    return rows, weights, handle


def wanted(world: Known, rank: int) -> Tensor:
    factors = torch.where(world.idx[rank] < 0, 0, world.idx[rank] % 3 + 1).sum(1, keepdim=True)
    return (world.x[rank].float() * factors).to(torch.bfloat16)


def summed(rows: Tensor, metadata: Tensor, weights: Tensor | None = None) -> Tensor:
    """The rows of each received token, or their weights ``[N, K]``."""
    slots = metadata[:, 2:].long()
    here = slots >= 0
    if weights is not None:
        return torch.where(here, weights[slots.clamp(min=0)], 0.0)
    return torch.where(here[..., None], rows[slots.clamp(min=0)].float(), 0.0).sum(1).to(rows.dtype)


@distributed_test(world_size=(1, 3))
def test_rows_that_the_caller_has_summed(ranks: Ranks) -> None:
    """``do_expand`` taken back (LightLLM's prefill), and one row for each token in the metadata
    (its decoding), replaced or written over, in a copy of the handle."""
    rank = ranks.rank
    for kind, alignment, exact in product(KINDS, (1, 4), (True, False)):
        world = world_of(ranks, "uneven" if alignment == 1 else "empty first")
        buffer = made(ranks, kind)
        rows, weights, handle = expanded(buffer, world, alignment, exact)
        want = wanted(world, rank)
        taken_back = copy.copy(handle)
        taken_back.do_expand = False
        metadata = taken_back.recv_src_metadata
        sums = summed(rows, metadata)
        each = summed(rows, metadata, weights)
        out, reduced, _ = buffer.combine(sums, taken_back, topk_weights=each, bias=world.x[rank])
        assert torch.equal(out.float(), want.float() + world.x[rank].float())
        assert torch.equal(reduced, picked(world, rank))
        replaced, rewritten = copy.copy(handle), copy.copy(handle)
        compact = metadata.clone()
        compact[:, 2:] = -1
        compact[:, 3] = torch.arange(len(compact))
        replaced.recv_src_metadata = compact
        rewritten.recv_src_metadata.copy_(compact)
        for changed in (replaced, rewritten):
            assert torch.equal(buffer.combine(sums, changed)[0], want)
        assert torch.equal(buffer.combine(rows, handle)[0], want)  # none of this changed it
        buffer.destroy()


@distributed_test(world_size=2)
def test_one_pick_of_each_token(ranks: Ranks) -> None:
    """As many rows as tokens, so that no size tells who finds rows by what."""
    rank, buffer = ranks.rank, made(ranks, ElasticBuffer, num_topk=1)
    world = world_of(ranks, "uneven", num_topk=1)
    rows, _, handle = expanded(buffer, world, 1, exact=True)
    metadata = handle.recv_src_metadata
    sums = summed(rows, metadata)
    metadata.data[:, 2] = torch.arange(len(metadata))  # as a kernel does: torch does not notice
    assert torch.equal(buffer.combine(sums, handle)[0], wanted(world, rank))
    buffer.destroy()


@distributed_test(world_size=2)
def test_other_orders_and_fewer_rows(ranks: Ranks) -> None:
    """Rows of either layout in any order; tokens without a row get zeros."""
    rank = ranks.rank
    for expands, exact in product((False, True), (True, False)):
        buffer, world = made(ranks, ElasticBuffer), world_of(ranks, "uneven")
        shape = {"do_expand": expands, "do_cpu_sync": exact}
        *_, handle, _ = fresh(buffer, world, **shape)
        metadata = handle.recv_src_metadata
        count = len(world.rows[rank])
        numbers = torch.arange(count, device=metadata.device)
        order = numbers.flip(0)[: count - rank]
        rows = numbers[:, None].expand(count, 128).to(torch.bfloat16).contiguous()
        changed = copy.copy(handle)
        changed.recv_src_metadata = metadata[order]
        changed.do_expand = False
        got = buffer.combine(rows[order], changed)[0].cpu()
        sent = [torch.arange(len(rows), dtype=torch.float32) for rows in world.rows]
        sent[1][:1] = 0.0  # its first row is left out
        want = torch.zeros(len(world.x[rank]))
        for peer, number in enumerate(world.rows):
            for place, (source, token) in enumerate(number):
                if source == rank:
                    want[token] += sent[peer][place]
        assert torch.equal(got, want[:, None].expand_as(got).to(torch.bfloat16))
        buffer.destroy()


@distributed_test(world_size=2)
def test_what_is_put_back(ranks: Ranks) -> None:
    """All tensors of a handle as autograd keeps them, the same or copies: as NeMo Automodel puts
    back those of V2.1, in every backward."""
    rank, world = ranks.rank, world_of(ranks, "uneven")
    names = (
        "topk_idx",
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "recv_src_metadata",
        "dst_buffer_slot_idx",
        "num_unaligned_recv_tokens_per_expert",
    )
    for expands, copies in product((False, True), (False, True)):
        buffer = made(ranks, ElasticBuffer)
        rows, *_, handle, _ = fresh(buffer, world, do_expand=expands)
        blocks = world.blocks(rank, 1)
        worked = blocks.work(rows) if expands else world.work(rank, rows)
        want = wanted(world, rank) if expands else world.combined(rank).to(torch.bfloat16)
        for name in names:
            value = getattr(handle, name)
            setattr(handle, name, value.clone() if copies else value)
        assert torch.equal(buffer.combine(worked, handle)[0], want)
        again = buffer.dispatch(world.x[rank], handle=handle, do_expand=expands)
        assert torch.equal(again[0], blocks.x if expands else world.take(rank, world.x))
        buffer.destroy()
    with pytest.raises(AttributeError):  # as in DeepEP V2.5
        fresh(made(ranks, KINDS[1]), world)[3].topk_idx = world.idx[rank]


@without_devices  # there a rank refuses alone, and a combine is the last
@distributed_test(world_size=2)
def test_what_no_handle_can_say(ranks: Ranks) -> None:
    """Refused on one rank, told to the other, and the buffer goes on."""
    rank, world = ranks.rank, world_of(ranks, "uneven")
    buffer = made(ranks, ElasticBuffer)
    rows, _, handle = expanded(buffer, world, 1, exact=True)
    metadata = handle.recv_src_metadata
    sums = summed(rows, metadata)
    far = metadata.clone()
    far[0, 2] = len(rows)
    bad: list[tuple[dict[str, Any], Tensor, str]] = [
        ({"recv_src_metadata": metadata[:, 1:]}, rows, r"must be \[N, 2 \+ K\]"),
        ({"recv_src_metadata": metadata.float()}, rows, "recv_src_metadata of the handle is float"),
        ({"recv_src_metadata": [1, 2]}, rows, "recv_src_metadata of the handle"),
        ({"recv_src_metadata": metadata.to_sparse()}, rows, "must be dense"),
        ({"recv_src_metadata": metadata.to("meta")}, rows, "on cpu, as the handle is"),
        ({"do_expand": torch.tensor([True, False])}, rows, "do_expand of the handle .* must be Tr"),
        ({"recv_src_metadata": far}, rows, f"points to row {len(rows)}, but x has {len(rows)}"),
        ({"do_expand": False}, sums[1:], r"must be \[N, H\], as many as recv_src_metadata has"),
    ]
    for changes, given, words in bad:
        changed = copy.copy(handle)
        for name, value in changes.items():
            setattr(changed, name, value if rank else getattr(handle, name))
        if changes.get("do_expand") is False:
            changed.do_expand, given = False, given if rank else sums
        with pytest.raises(ValueError if rank else RuntimeError, match=words if rank else "rank 1"):
            buffer.combine(given, changed)
    changed = copy.copy(handle)
    changed.do_expand = False
    with pytest.raises(ValueError, match=r"do_expand \(False\) must be True here"):
        buffer.dispatch(world.x[rank], handle=changed, do_expand=False)
    again = buffer.dispatch(world.x[rank], handle=changed, do_expand=True)[0]  # as it was
    assert torch.equal(again, world.blocks(rank, 1).x)
    with pytest.raises(ValueError, match=r"from 1 to 1073741823: .* in int32"):
        fresh(buffer, world, num_max_tokens_per_rank=1 << 30)
    assert torch.equal(buffer.combine(rows, handle)[0], wanted(world, rank))
    buffer.destroy()


def numbered(rows: Tensor) -> Tensor:
    """Rows that tell their places."""
    numbers = torch.arange(1.0, len(rows) + 1, device=rows.device)
    return numbers.to(rows.dtype)[:, None].expand_as(rows).contiguous()


@distributed_test(world_size=2)
def test_orders_one_after_the_other(ranks: Ranks) -> None:
    """Metadata that take the memory of the first, with a version as theirs; and changes in place,
    in inference mode too."""
    buffer, world = made(ranks, ElasticBuffer), world_of(ranks, "uneven")
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows, *_, handle, _ = fresh(buffer, world)
        values = numbered(rows)
        want = buffer.combine(values, handle)[0]
        for _ in range(2):
            order = torch.randperm(len(rows), generator=generator).to(rows.device)
            handle.recv_src_metadata = handle.recv_src_metadata[order]
            values = values[order]
        assert torch.equal(buffer.combine(values, handle)[0], want)
    for infers in (False, True):
        with torch.inference_mode(infers):
            rows, *_, handle, _ = fresh(buffer, world)
            values = numbered(rows)
            want = buffer.combine(values, handle)[0]
            handle.recv_src_metadata.copy_(handle.recv_src_metadata.flip(0))
            assert torch.equal(buffer.combine(values.flip(0), handle)[0], want)
    buffer.destroy()


@distributed_test(world_size=2)
def test_views_and_other_dtypes(ranks: Ranks) -> None:
    """The first rows of the metadata are fewer rows, and int64 say what int32 do; weights sum as
    those of a handle that nobody has changed, also at ids of other ranks."""
    buffer, world = made(ranks, ElasticBuffer), world_of(ranks, "uneven")
    for exact in (True, False):
        rows, _, _, handle, _ = fresh(buffer, world, do_cpu_sync=exact)
        count = len(world.rows[ranks.rank])
        values = numbered(rows)
        weights = torch.ones(len(rows), world.idx[0].shape[1], device=rows.device)
        want = buffer.combine(values, handle, topk_weights=weights)
        wide, first = copy.copy(handle), copy.copy(handle)
        wide.recv_src_metadata = handle.recv_src_metadata.long()
        got = buffer.combine(values, wide, topk_weights=weights)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        first.recv_src_metadata = handle.recv_src_metadata[: count - 1]
        values[count - 1 :] = 0
        want = buffer.combine(values, handle)[0]
        assert torch.equal(buffer.combine(values[: count - 1], first)[0], want)
    buffer.destroy()


@distributed_test(world_size=2)
def test_metadata_that_nobody_has_read(ranks: Ranks) -> None:
    """They are worked out within the call, which comes behind ``previous_event``: not before."""
    rank, buffer, world = ranks.rank, made(ranks, ElasticBuffer), world_of(ranks, "uneven")
    rows, _, handle = expanded(buffer, world, 1, exact=True)
    sums = summed(rows, copy.copy(handle).recv_src_metadata)
    handle.do_expand = False
    assert torch.equal(buffer.combine(sums, handle)[0], wanted(world, rank))
    assert handle.given_metadata is None
    handle.recv_src_metadata = handle.recv_src_metadata[:0]
    assert not buffer.combine(sums[:0], handle)[0].any()
    buffer.destroy()


@distributed_test(world_size=2)
def test_a_replay_after_the_metadata_were_read(ranks: Ranks) -> None:
    """What a CUDA graph's replay writes into the tensors of a dispatch, outside of which somebody
    has read the metadata: the rows of the replay come back."""
    buffer = made(ranks, ElasticBuffer)
    world, other = (world_of(ranks, "uneven", seed=seed) for seed in (0, 1))
    _, _, captured = expanded(buffer, world, 1, exact=False)
    captured.note_capture()
    stale = captured.recv_src_metadata
    rows, _, handle = expanded(buffer, other, 1, exact=False)
    for into, new in zip(
        (*captured.native.plan, *captured.native.arrived),
        (*handle.native.plan, *handle.native.arrived),
        strict=True,
    ):
        if isinstance(into, Tensor):
            into.copy_(new)
    assert torch.equal(buffer.combine(rows, captured)[0], wanted(other, ranks.rank))
    assert torch.equal(captured.recv_src_metadata, handle.recv_src_metadata)
    assert not torch.equal(captured.recv_src_metadata, stale)
    buffer.destroy()
