"""``HybridEPBuffer`` against a dense layer in plain torch: rows, weights, sums and what backward
makes of them.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from bad_input import check, error_of
from deep_ep_world import World, to_fp8
from nvlink_pool import SOAK, without_devices
from tokenyard.deep_ep.hybrid import HybridEPBuffer, indices_to_map
from tokenyard.testing import Ranks, distributed_test

pytestmark = without_devices
EXPERTS = 12
TOKENS = ("uneven", "empty first", "only last")


def buffer_of(ranks: Ranks, most: int = 64, **options: Any) -> HybridEPBuffer:
    local = EXPERTS // ranks.world_size
    return HybridEPBuffer(ranks.group, 128, most, local, **options)


def maps(world: World, rank: int) -> tuple[Tensor, Tensor]:
    """Map and probabilities of a rank's tokens, by loops."""
    shape = len(world.idx[rank]), world.num_experts
    table, probs = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
    for token, picks in enumerate(world.idx[rank].tolist()):
        for place, expert in enumerate(picks):
            if expert >= 0:
                table[token, expert] = True
                probs[token, expert] = world.weights[rank][token, place]
    return table, probs


def blocks(world: World, rank: int, values: list[Tensor], pad: int) -> Tensor:
    """Rows of a rank's experts one after the other, each block padded with zeros: what the tokens
    of each source have in ``values``.
    """
    rows: list[Tensor] = []
    for here in world.expert_rows(rank):
        rows += [values[source][token] for source, token in here]
        rows += [values[0].new_zeros(values[0].shape[1:])] * (-len(here) % pad)
    return torch.stack(rows) if rows else values[0][:0]


def block_probs(world: World, rank: int, pad: int) -> Tensor:
    """Probabilities of those rows, 0 on padding."""
    table = [maps(world, source)[1] for source in range(world.size)]
    rows: list[Tensor] = []
    for expert, here in zip(world.experts_of(rank), world.expert_rows(rank), strict=True):
        rows += [table[source][token, expert] for source, token in here]
        rows += [torch.zeros(())] * (-len(here) % pad)
    return torch.stack(rows) if rows else torch.zeros(0)


def counts_of(world: World, rank: int, pad: int) -> list[int]:
    return [-(-len(here) // pad) * pad for here in world.expert_rows(rank)]


def factors(world: World, rank: int, pad: int) -> Tensor:
    """What each block's expert multiplies its rows with: ``[N, 1]``."""
    counts = torch.tensor(counts_of(world, rank, pad))
    each = torch.tensor([expert % 3 + 1.0 for expert in world.experts_of(rank)])
    return each.repeat_interleave(counts).unsqueeze(1)


def summed(world: World, rank: int) -> Tensor:
    """Of each token, over its experts: the token times the expert's factor."""
    table = maps(world, rank)[0]
    each = torch.tensor([expert % 3 + 1.0 for expert in range(world.num_experts)])
    return world.x[rank].float() * (table * each).sum(1, keepdim=True)


def local_map(world: World, rank: int) -> Tensor:
    """Local experts of the tokens that come to a rank, each once."""
    mine = world.experts_of(rank)
    tables = [maps(world, source)[0][:, mine.start : mine.stop] for source in range(world.size)]
    return world.take(rank, tables)


@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_permuted(ranks: Ranks) -> None:
    """Rows by expert, padded; sums; both again along the handle, as backward makes them."""
    rank, buffer = ranks.rank, buffer_of(ranks)
    for number, tokens in enumerate(TOKENS):
        world = World.of(ranks, tokens, EXPERTS, seed=number)
        table, probs = maps(world, rank)
        x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
        for pad in (None, 8):
            given: dict[str, Any] = {"routing_map": table, "probs": probs}
            if pad:
                given = {"topk_idx": idx, "topk_weights": weights, "num_of_experts": EXPERTS}
            rows, there, scales, counts, handle = buffer.dispatch_with_permute(
                hidden=x,
                **given,
                pad_multiple=pad,
                num_of_experts_per_rank=EXPERTS // world.size,
            )
            padded = pad or 1
            assert torch.equal(rows, blocks(world, rank, world.x, padded)) and scales is None
            assert there is not None and torch.equal(there, block_probs(world, rank, padded))
            assert counts.tolist() == counts_of(world, rank, padded)
            assert counts.dtype == torch.int32 and counts.is_cpu
            check_items(world, rank, handle)
            made = (rows.float() * factors(world, rank, padded)).bfloat16()
            out, none = buffer.combine_with_unpermute(hidden=made, handle=handle, pad_multiple=pad)
            assert none is None and torch.equal(out.float(), summed(world, rank))
            assert out.dtype == torch.bfloat16
            out, back = buffer.combine_with_unpermute(hidden=made, probs=there, handle=handle)
            assert torch.equal(out.float(), summed(world, rank))
            assert back is not None and torch.equal(back, probs)
            again = buffer.dispatch_with_permute(
                hidden=2 * x, handle=tuple(handle), num_permuted_tokens=counts.sum()
            )
            assert torch.equal(again[0], 2 * rows) and again[1] is None
            assert torch.equal(again[3], counts)
            again = buffer.dispatch_with_permute(hidden=x, handle=handle, probs=2 * probs)
            assert again[1] is not None and torch.equal(again[1], 2 * there)
        bare = buffer.dispatch_with_permute(hidden=x, routing_map=table)
        assert bare[1] is None and torch.equal(bare[0], blocks(world, rank, world.x, 1))


def check_items(world: World, rank: int, handle: Any) -> None:
    here = local_map(world, rank)
    assert len(handle) == 11 and handle.logical_num_tokens == len(world.x[rank]) == handle[8]
    assert [handle[at] for at in (0, 1, 2, 5, 6)] == [None] * 5
    assert handle[3].tolist() == [len(here)] and torch.equal(handle[4], here)
    assert handle[7].tolist() == [len(each) for each in world.expert_rows(rank)]
    assert handle[9].hidden_dim == 128 and handle[-1].tolist() == [0]


@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_static_shapes(ranks: Ranks) -> None:
    """With ``num_permuted_tokens``: so many rows, later ones dropped, and the flag that says so."""
    rank, buffer = ranks.rank, buffer_of(ranks)
    world = World.of(ranks, "uneven", EXPERTS)
    table, probs = maps(world, rank)
    everyone = [blocks(world, each, world.x, 4) for each in range(world.size)]
    longest = max(map(len, everyone))
    for most, waits in ((longest + 8, False), (longest + 8, True), (max(longest - 8, 4), False)):
        most -= most % 4
        rows, there, _, counts, handle = buffer.dispatch_with_permute(
            hidden=world.x[rank],
            routing_map=table,
            probs=probs,
            pad_multiple=4,
            num_permuted_tokens=most,
            non_blocking=not waits,
        )
        used = min(most, len(everyone[rank]))
        assert rows.shape == (most, 128) and there is not None
        assert torch.equal(rows[:used], everyone[rank][:used])
        assert torch.equal(there[:used], block_probs(world, rank, 4)[:used])
        assert not there[used:].any() and int(counts.sum()) == used
        lost = lost_here(world, rank, used)
        assert handle[-1].tolist() == [int(lost > 0)] and handle[-1].dtype == torch.int32
        assert handle[3].tolist() == [int(handle[4].any(1).sum())]
        out, back = buffer.combine_with_unpermute(
            hidden=rows, probs=torch.ones(most), handle=handle
        )
        kept = kept_picks(world, rank, most)
        assert torch.equal(out.float(), world.x[rank].float() * kept.sum(1, keepdim=True))
        assert back is not None and torch.equal(back, kept)
        again = buffer.dispatch_with_permute(
            hidden=world.x[rank], handle=handle, num_permuted_tokens=most, pad_multiple=4
        )
        assert torch.equal(again[0][:used], rows[:used])


def places(world: World, rank: int) -> dict[tuple[int, int, int], int]:
    """Row of each (source, token, expert) on a rank, blocks padded to 4."""
    found, at = {}, 0
    for expert, here in zip(world.experts_of(rank), world.expert_rows(rank), strict=True):
        for place, (source, token) in enumerate(here):
            found[source, token, expert] = at + place
        at += -(-len(here) // 4) * 4
    return found


def lost_here(world: World, rank: int, rows: int) -> int:
    return sum(place >= rows for place in places(world, rank).values())


def kept_picks(world: World, rank: int, rows: int) -> Tensor:
    """Which picks of a rank's tokens found room: float ``[T, E]``."""
    kept = torch.zeros(len(world.x[rank]), EXPERTS)
    for peer in range(world.size):
        for (source, token, expert), place in places(world, peer).items():
            if source == rank and place < rows:
                kept[token, expert] = 1
    return kept


@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_without_permutation(ranks: Ranks) -> None:
    """One row for each rank of a token, and weights by experts of the node."""
    rank, buffer = ranks.rank, buffer_of(ranks)
    for tokens in TOKENS:
        world = World.of(ranks, tokens, EXPERTS)
        table, probs = maps(world, rank)
        rows, there, scales, handle = buffer.dispatch(
            world.x[rank],
            topk_idx=world.idx[rank],
            topk_weights=world.weights[rank],
            num_of_experts=EXPERTS,
        )
        here = local_map(world, rank)
        assert torch.equal(rows, world.take(rank, world.x)) and scales is None
        assert len(handle) == 7 and handle[3].tolist() == [len(rows)]
        assert torch.equal(handle[4], here) and handle[5] == len(table)
        mine = world.experts_of(rank)
        want = torch.zeros(len(rows), EXPERTS)
        everyone = [maps(world, source)[1] for source in range(world.size)]
        want[:, mine.start : mine.stop] = world.take(rank, everyone)[:, mine.start : mine.stop]
        assert there is not None and torch.equal(there, want)
        made = rows * here.sum(1, keepdim=True)
        out, back = buffer.combine(made.bfloat16(), there, handle)
        assert torch.equal(out.float(), world.x[rank].float() * table.sum(1, keepdim=True))
        assert back is not None and torch.equal(back, probs)
        assert torch.equal(buffer.combine(made.bfloat16(), handle=handle)[0], out)
        known = {"routing_map": table, "probs": probs, "handle": handle}
        again = buffer.dispatch(world.x[rank], **known)
        assert torch.equal(again[0], rows) and again[1] is not None
        assert torch.equal(again[1], want) and type(again[3]) is type(handle)


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_fp8(ranks: Ranks) -> None:
    """Bytes as DeepEP has them, and FP8; scales come beside. Without them BF16 ignores scales."""
    rank, buffer = ranks.rank, buffer_of(ranks, use_fp8=True)
    world = World.of(ranks, "uneven", EXPERTS)
    table, _ = maps(world, rank)
    pairs = [to_fp8(x) for x in world.x]
    data, scales = [pair[0].view(torch.uint8) for pair in pairs], [pair[1] for pair in pairs]
    for kind in (torch.uint8, torch.float8_e4m3fn):
        given = {"hidden": data[rank].view(kind), "scaling_factor": scales[rank]}
        rows, _, there, _, handle = buffer.dispatch_with_permute(
            **given, routing_map=table, pad_multiple=16, use_fp8=True
        )
        assert rows.dtype == kind and there is not None
        assert torch.equal(rows.view(torch.uint8), blocks(world, rank, data, 16))
        assert torch.equal(there, blocks(world, rank, scales, 16))
        again = buffer.dispatch_with_permute(**given, handle=handle)
        assert torch.equal(again[0].view(torch.uint8), rows.view(torch.uint8))
        flat = buffer.dispatch(*given.values(), routing_map=table)
        assert torch.equal(flat[0].view(torch.uint8), world.take(rank, data))
        assert flat[2] is not None and torch.equal(flat[2], world.take(rank, scales))
    plain = buffer.dispatch_with_permute(
        hidden=world.x[rank], scaling_factor=scales[rank], routing_map=table
    )
    assert plain[2] is None and torch.equal(plain[0], blocks(world, rank, world.x, 1))


class Dispatch(torch.autograd.Function):
    """As Megatron-LM's, with nothing kept but the handle's items."""

    @staticmethod
    def forward(ctx: Any, buffer: Any, x: Tensor, table: Tensor, probs: Tensor, pad: int) -> Any:
        rows, there, _, counts, handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=table, probs=probs, pad_multiple=pad
        )
        ctx.buffer, ctx.handle, ctx.pad = buffer, handle, pad
        return rows, there, counts, handle

    @staticmethod
    def backward(ctx: Any, rows: Tensor, probs: Tensor, _counts: Any, _handle: Any) -> Any:
        x, there = ctx.buffer.combine_with_unpermute(
            hidden=rows, probs=probs, handle=ctx.handle, pad_multiple=ctx.pad
        )
        return None, x, None, there, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Any, rows: Tensor, handle: Any, most: Any, pad: int) -> Tensor:
        ctx.buffer, ctx.handle, ctx.most, ctx.pad = buffer, handle, most, pad
        return buffer.combine_with_unpermute(hidden=rows, handle=handle, pad_multiple=pad)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, *_ = ctx.buffer.dispatch_with_permute(
            hidden=grad, handle=ctx.handle, pad_multiple=ctx.pad, num_permuted_tokens=ctx.most
        )
        return None, rows, None, None, None


@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_trains(ranks: Ranks) -> None:
    """Gradients of tokens, probabilities and experts as of the dense layer, of two micro-batches
    whose forwards come first."""
    rank, buffer = ranks.rank, buffer_of(ranks)
    size, kept = 8, []
    generator = torch.Generator().manual_seed(3)
    experts = torch.randint(-2, 3, (EXPERTS, size, size), generator=generator).float()
    for seed, tokens in enumerate(("uneven", "empty first")):
        world = World.of(ranks, tokens, EXPERTS, hidden=size, seed=seed)
        table, probs = maps(world, rank)
        leaves = [world.x[rank].float(), probs, experts.clone()]
        x, p, w = (leaf.requires_grad_() for leaf in leaves)
        rows, there, counts, handle = Dispatch.apply(buffer, x, table, p, 8)  # type: ignore[misc]
        mine = world.experts_of(rank)
        out = torch.cat(
            [
                part @ w[expert]
                for expert, part in zip(mine, rows.split(counts.tolist()), strict=True)
            ]
        )
        y = Combine.apply(buffer, out * there.unsqueeze(1), handle, counts.sum(), 8)
        kept.append((world, y, x, p, w, handle))
    for world, y, x, p, w, _ in kept:
        dense = [
            (world.x[each].float().requires_grad_(), maps(world, each)[1].requires_grad_())
            for each in range(world.size)
        ]
        weights = experts.clone().requires_grad_()
        want = [
            torch.einsum("te,th,ehk->tk", q * maps(world, each)[0], t, weights)
            for each, (t, q) in enumerate(dense)
        ]
        sum((each**2).sum() / 2 for each in want).backward()  # type: ignore[union-attr]
        y.backward(y.detach())
        mine = world.experts_of(rank)
        assert torch.equal(y, want[rank])
        picked = torch.where(maps(world, rank)[0], dense[rank][1].grad, 0.0)
        assert torch.equal(x.grad, dense[rank][0].grad) and torch.equal(p.grad, picked)
        assert torch.equal(w.grad[mine.start : mine.stop], weights.grad[mine.start : mine.stop])


def test_indices_to_map() -> None:
    idx = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
    table, probs = indices_to_map(idx, torch.tensor([[0.5, 0.25], [9.0, 1.0], [9.0, 9.0]]), 3, 3)
    assert table.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    assert probs is not None
    assert probs.tolist() == [[0.25, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert indices_to_map(idx.int(), None, 3, 3)[1] is None
    assert torch.equal(indices_to_map(torch.where(idx < 0, 7, idx), None, 3, 3)[0], table)


@distributed_test(world_size=2)
def test_construction(ranks: Ranks) -> None:
    """All arguments of Megatron-LM, torchtitan, NeMo Automodel and the branch's versions; what was
    given is echoed, and rank 1's buffer goes with its last handle.
    """
    group = ranks.group
    titan = HybridEPBuffer(
        group=group,
        hidden_dim=128,
        max_num_of_tokens_per_rank=32,
        num_local_experts=6,
        use_fp8=False,
        num_sms_dispatch_api=16,
        num_sms_combine_api=16,
        load_cached_kernels=True,
        use_shared_buffer=True,
        enable_custom_allgather=True,
    )
    config = titan.configurer.buffer_config
    assert titan.group is group and config is titan.config
    assert (config.hidden_dim, config.max_num_of_tokens_per_rank) == (128, 32)
    assert (config.num_of_experts_per_rank, config.num_of_blocks_dispatch_api) == (6, 16)
    assert (config.num_of_nodes, config.num_of_ranks_per_node) == (1, 2)
    old = HybridEPBuffer(
        group, 128, 32, 6, True, 24, 24, 24, num_sms_permute_api=1056, use_mnnvl=None,
        num_of_ranks_per_nvlink_domain=1,
    )  # fmt: skip
    assert (old.num_of_nodes, old.node_rank, old.local_rank) == (2, ranks.rank, 0) and old.use_fp8
    assert old.num_of_hybrid_ep_ranks_per_nvlink_domain == 1 and old.runtime.is_available()
    made = old.update_template_config(
        hidden_dim=256, max_num_of_tokens_per_rank=16, num_local_experts=None, use_fp8=False
    )
    assert (made.hidden_dim, made.max_num_of_tokens_per_rank, made.use_fp8) == (256, 32, False)
    assert old.update_template_config(num_of_tokens_per_rank=48).max_num_of_tokens_per_rank == 48
    assert old.config.max_num_of_tokens_per_rank == 48 and old.config.hidden_dim == 128
    old.empty_jit_cache()
    old.set_num_tokens_per_rank(48)
    titan.update_template_config(num_of_stages_dispatch_api=8, fuse_permute_dispatch=True)
    world = World.of(ranks, "few", EXPERTS)
    table, probs = maps(world, ranks.rank)
    ragged = {"num_of_tokens_per_rank": 32}  # megatron.lite says it always
    two = old.dispatch(world.x[ranks.rank], routing_map=table, probs=probs, **ragged)
    given = {"hidden": world.x[ranks.rank], "routing_map": table, **ragged}
    rows, *_, handle = titan.dispatch_with_permute(**given)
    sums = titan.combine_with_unpermute(hidden=rows, handle=handle, non_blocking=True)[0]
    assert torch.equal(sums.float(), world.x[ranks.rank].float() * table.sum(1, keepdim=True))
    assert two[1] is not None and two[1].shape[1] == 6
    assert torch.equal(old.combine(two[0], two[1], two[3])[1], probs)  # type: ignore[arg-type]
    plan = weakref.ref(two[3].native.plan.returns)
    del old, two
    gc.collect()
    assert plan() is None


@distributed_test(world_size=2)
def test_the_first_call(ranks: Ranks) -> None:
    """Before there is any native object: the others, who make one, learn what was wrong; the next
    attempt works. Numbers that are no multiple of the padding are fine if the host waits.
    """
    rank, world = ranks.rank, World.of(ranks, "few", EXPERTS)
    table, _ = maps(world, rank)
    picks = {"topk_idx": world.idx[rank], "num_of_experts": EXPERTS}
    for number, (given, wrong, words) in enumerate(
        (
            ({"routing_map": table}, {"probs": table}, "probs is bool"),
            ({"routing_map": table, "num_permuted_tokens": 99}, {"hidden": 5}, "hidden must be"),
            (picks, {"pad_multiple": "all"}, "pad_multiple ('all')"),
            ({"routing_map": table}, {"handle": 5}, "handle must be the tuple"),
        )
    ):
        buffer, good = buffer_of(ranks), {"hidden": world.x[rank], **given}
        call = buffer.dispatch_with_permute
        if number < 3:
            changed = good | wrong if rank == number % 2 else good
            error = error_of(lambda given=changed, call=call: call(**given))
            check(error, ValueError if rank == number % 2 else ty.PeerError, words)
        else:  # no dispatch was ever made, so nobody can be in a call with a handle
            check(error_of(lambda: call(**good, **wrong)), ValueError, words)  # noqa: B023
        want = blocks(world, rank, world.x, 8)
        most = len(want) - 3 if number == 1 else None
        good["num_permuted_tokens"] = most
        rows, _, _, counts, handle = call(**good, pad_multiple=8)
        used = len(want) if most is None else most
        assert torch.equal(rows, want[:used]) and int(counts.sum()) == used
        assert len(buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]) == len(table)


@distributed_test(world_size=2)
def test_bad_input(ranks: Ranks) -> None:
    """By name, before anything moves; the other rank learns why. Afterwards the buffer works."""
    rank, buffer = ranks.rank, buffer_of(ranks, most=5)
    world = World.of(ranks, "uneven", EXPERTS)  # 3 and 8 tokens
    table, probs = maps(world, rank)
    good: dict[str, Any] = {"hidden": world.x[rank], "routing_map": table, "probs": probs}
    picks = {"hidden": world.x[rank], "topk_idx": world.idx[rank], "num_of_experts": EXPERTS}
    weights, beyond = {"topk_weights": world.weights[rank]}, world.idx[rank].clone()
    beyond[2, 1] = EXPERTS
    rows, there, _, _, handle = buffer.dispatch_with_permute(**good, pad_multiple=8)
    flat = buffer.dispatch(**good)
    other = tuple(buffer.dispatch_with_permute(**good)[4])
    known: dict[str, Any] = {"hidden": world.x[rank], "handle": handle}
    back: dict[str, Any] = {"hidden": rows, "probs": there, "handle": handle}
    data = world.x[rank].to(torch.float8_e4m3fn)
    fresh = again = buffer.dispatch_with_permute
    sums = buffer.combine_with_unpermute
    mixed = (*tuple(handle)[:4], other[4], *tuple(handle)[5:])
    cases: list[tuple[Any, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
        (fresh, good, {"routing_map": table[:, 1:]}, ("routing_map has shape", "12 experts")),
        (fresh, good, {"routing_map": table.int()}, ("routing_map is int32",)),
        (fresh, good, {"routing_map": None}, ("routing_map is missing",)),
        (fresh, good, {"probs": probs[:, 1:]}, ("probs has shape",)),
        (fresh, good, {"hidden": world.x[rank][0]}, ("hidden has shape", "[T, H]")),
        (fresh, good, {"hidden": None}, ("hidden must be",)),
        (fresh, good, {"hidden": data}, ("scaling_factor is missing",)),
        (fresh, good, {"hidden": data, "scaling_factor": probs[1:]}, ("scaling_factor has shape",)),
        (fresh, good, {"pad_multiple": -1}, ("pad_multiple (-1)",)),
        (fresh, good, {"pad_multiple": 1 << 17}, ("pad_multiple (131072)", "65536")),
        (fresh, good, {"num_of_experts_per_rank": 5}, ("routing_map has shape", "10 experts")),
        (fresh, good, {"use_fp8": "yes"}, ("use_fp8",)),
        (fresh, good, {"colour": 1}, ("colour",)),
        (fresh, good, {"use_host_meta": 7}, ("use_host_meta",)),
        (fresh, picks, {"num_of_experts": None}, ("num_of_experts (None) must be 12",)),
        (fresh, picks, {"num_of_experts": 6}, ("num_of_experts (6) must be 12",)),
        (fresh, picks, {"topk_idx": world.idx[rank].float()}, ("topk_idx is float32",)),
        (fresh, picks, {"topk_idx": beyond}, ("topk_idx[2, 1] is 12", "12 experts")),
        (fresh, picks | weights, {"topk_idx": beyond}, ("topk_idx[2, 1] is 12", "12 experts")),
        (again, known, {"hidden": world.x[rank][1:]}, ("hidden has shape", "handle was made")),
        (again, known, {"num_permuted_tokens": len(rows) + 1}, ("num_permuted_tokens", "rows of")),
        (again, known, {"pad_multiple": 4}, ("pad_multiple (4) must be 8",)),
        (again, known, {"handle": (1, 2)}, ("handle must be the tuple",)),
        (again, known, {"handle": flat[3]}, ("handle must be the tuple", "HybridHandle")),
        (again, known, {"handle": mixed}, ("handle[4] is not what",)),
        (again, known, {"probs": probs[1:]}, ("probs has shape",)),
        (sums, back, {"hidden": rows[1:]}, ("hidden has shape",)),
        (sums, back, {"hidden": rows.to(torch.float8_e4m3fn)}, ("hidden is float8",)),
        (sums, back, {"probs": rows}, ("probs has shape",)),
        (sums, back, {"handle": None}, ("handle must be the tuple",)),
        (sums, back, {"pad_multiple": 3}, ("pad_multiple (3) must be 8",)),
        (sums, back, {"fuse_unpermute_combine": 5}, ("fuse_unpermute_combine",)),
        (
            buffer.combine,
            {"hidden": flat[0], "handle": flat[3]},
            {"handle": handle},
            ("handle is of dispatch_with_permute",),
        ),
        (
            buffer.dispatch,
            {"hidden": world.x[rank], "handle": flat[3]},
            {"hidden": 5},
            ("hidden must be",),
        ),
    ]
    for number, (call, right, change, words) in enumerate(cases):
        here = number % 2 == rank
        error = error_of(lambda call=call, given=right | change if here else right: call(**given))
        kind = TypeError if words == ("colour",) else ValueError
        check(error, kind if here else ty.PeerError, *words)
    wide = {"num_permuted_tokens": 80, "non_blocking": True}
    error = error_of(lambda: fresh(**good, **wide))  # rank 1 has more than 5 tokens
    check(error, ValueError if rank else ty.PeerError, "hidden has 8 tokens", "is 5")
    for change, words in (
        ({"non_blocking": True}, ("num_permuted_tokens is missing",)),
        (wide | {"pad_multiple": 3}, ("num_permuted_tokens (80) must be a multiple",)),
    ):
        check(error_of(lambda change=change: fresh(**good, **change)), ValueError, *words)
    assert torch.equal(fresh(**good, pad_multiple=8)[0], rows)
    assert torch.equal(sums(**back)[1], probs)  # type: ignore[arg-type]
    for given, words in (
        ({"hidden_dim": 0}, "hidden_dim (0)"),
        ({"num_local_experts": 1 << 20}, "num_local_experts"),
        ({"max_num_of_tokens_per_rank": None}, "max_num_of_tokens_per_rank"),
        ({"use_mnnvl": 3}, "use_mnnvl"),
        ({"num_of_ranks_per_nvlink_domain": 3}, "must divide the 2 ranks"),
        ({"num_sms_combine_api": -1}, "num_sms_combine_api (-1)"),
        ({"group": 5}, "group"),
    ):
        base = {
            "group": ranks.group,
            "hidden_dim": 8,
            "max_num_of_tokens_per_rank": 4,
            "num_local_experts": 6,
        }
        check(error_of(lambda given=base | given: HybridEPBuffer(**given)), ValueError, words)
    with pytest.raises(TypeError, match="colour"):
        buffer_of(ranks, colour=1)
