"""The plan's integers: worked examples in the docstrings, and properties for any routing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenyard import routing

pytestmark = pytest.mark.portable

settings.register_profile("plan", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("plan")


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Picks ``[T, K]`` with -1 and duplicates, number of experts, number of ranks."""
    experts, ranks = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    tokens, top = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    flat = draw(
        st.lists(st.integers(-1, experts - 1), min_size=tokens * top, max_size=tokens * top)
    )
    return torch.tensor(flat, dtype=torch.int64).view(tokens, top), experts, ranks


@given(st.integers(0, 40), st.integers(1, 12))
def test_experts_are_split_nearly_equally(experts: int, ranks: int) -> None:
    bounds = routing.expert_bounds(experts, ranks)
    sizes = [end - begin for begin, end in pairwise(bounds)]
    assert bounds[0] == 0
    assert bounds[-1] == experts
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    everyone = torch.arange(ranks + 1)
    assert routing.first_experts(everyone, experts, ranks).tolist() == bounds


@given(routings())
def test_owner_is_the_rank_whose_range_holds_the_expert(
    given_routing: tuple[Tensor, int, int],
) -> None:
    idx, experts, ranks = given_routing
    bounds = routing.expert_bounds(experts, ranks)
    owner = routing.pick_owners(idx, experts, ranks)
    for expert, rank in zip(idx.flatten().tolist(), owner.flatten().tolist(), strict=True):
        assert (rank == -1) if expert < 0 else bounds[rank] <= expert < bounds[rank + 1]


@given(routings(), st.booleans())
def test_merging_keeps_experts_and_total_weight(
    given_routing: tuple[Tensor, int, int], static: bool
) -> None:
    idx, _, _ = given_routing
    weights = torch.arange(1.0, idx.numel() + 1).view(idx.shape)
    merged = routing.merge_picks(idx, weights, static=static)
    for t, picks in enumerate(idx.tolist()):
        kept = [e for e in merged.topk_idx[t].tolist() if e >= 0]
        assert sorted(kept) == sorted({e for e in picks if e >= 0})
        for k, expert in enumerate(picks):
            assert merged.first_pick[t, k] == (picks.index(expert) if expert >= 0 else k)
            total = sum(w for e, w in zip(picks, weights[t].tolist(), strict=True) if e == expert)
            if expert >= 0 and picks.index(expert) == k:
                assert merged.topk_weights[t, k] == total
            else:
                assert merged.topk_weights[t, k] == 0


@given(routings(), st.integers(0, 3))
def test_send_orders_agree(given_routing: tuple[Tensor, int, int], spare: int) -> None:
    """Static places hold, per destination, the tokens of the exact order and then -1."""
    idx, experts, ranks = given_routing
    in_ranks = routing.tokens_in_ranks(idx, experts, ranks)
    room = idx.shape[0] + spare
    static = routing.send_order_static(in_ranks, room).view(ranks, room)
    per_rank = routing.send_order(in_ranks).split(in_ranks.sum(0).tolist())
    for rank, tokens in enumerate(per_rank):
        exact = tokens.tolist()
        assert exact == in_ranks[:, rank].nonzero().flatten().tolist()
        assert static[rank].tolist() == exact + [-1] * (room - len(exact))


@given(routings(), st.booleans())
def test_rows_come_back_to_their_token_in_rank_order(
    given_routing: tuple[Tensor, int, int], static: bool
) -> None:
    idx, experts, ranks = given_routing
    in_ranks = routing.tokens_in_ranks(idx, experts, ranks)
    width = min(idx.shape[1], ranks)
    stride = idx.shape[0] + 1 if static else None
    sent = routing.send_order_static(in_ranks, stride) if stride else routing.send_order(in_ranks)
    for token, places in enumerate(routing.return_places(in_ranks, stride, width).tolist()):
        valid = [place for place in places if place >= 0]
        assert valid == sorted(valid)
        assert valid == (sent == token).nonzero().flatten().tolist()


@given(routings(), st.sampled_from([1, 2, 4]), st.booleans())
def test_placement_is_a_bijection_onto_unpadded_places(
    given_routing: tuple[Tensor, int, int], alignment: int, static: bool
) -> None:
    idx, experts, _ = given_routing
    local = routing.merge_picks(idx, None).topk_idx
    counts = routing.count_keys(local, experts)
    starts = routing.block_offsets(counts, alignment)
    place = routing.place_rows(local, starts, experts, int(starts[-1]), static=static)
    assert place.slots.shape == place.picks.shape == (idx.shape[0], min(idx.shape[1], experts))
    seen = []
    for row, (slots, picks) in enumerate(
        zip(place.slots.tolist(), place.picks.tolist(), strict=True)
    ):
        valid = [(slot, pick) for slot, pick in zip(slots, picks, strict=True) if slot >= 0]
        assert [pick for _, pick in valid] == [
            k for k, e in enumerate(local[row].tolist()) if e >= 0
        ]
        unused = len(slots) - len(valid)
        assert (slots[len(valid) :], picks[len(valid) :]) == ([-1] * unused, [0] * unused)
        for slot, pick in valid:
            expert = int(local[row, pick])
            assert starts[expert] <= slot < starts[expert] + counts[expert]
            assert place.gather[slot] == row
            seen.append(slot)
    assert len(seen) == len(set(seen)) == int(counts.sum())
    assert int((place.gather < 0).sum()) == int(starts[-1]) - len(seen)
    for e in range(experts):
        block = place.gather[starts[e] : starts[e] + counts[e]].tolist()
        assert block == sorted(block)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_compaction_keeps_order_and_inverts(counts: list[int]) -> None:
    stride = 4
    place = routing.compact_rows(torch.tensor(counts), stride)
    want = [source * stride + i for source, count in enumerate(counts) for i in range(count)]
    assert place.gather.tolist() == want + [-1] * (len(counts) * stride - len(want))
    for row, slot in enumerate(place.slots[:, 0].tolist()):
        assert slot == (want.index(row) if row in want else -1)
