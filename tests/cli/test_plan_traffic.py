"""``tokenyard plan``: how likely a token goes where, and the rows that follow from it."""

from __future__ import annotations

import itertools
import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.planner.traffic import SKEWS, Traffic, popularity, reach, traffic, traffic_of
from tokenyard.planner.workload import Workload
from tokenyard.routing import tokens_in_ranks
from tokenyard.testing import routing
from tokenyard.testing.cases import Case, all_sent, once_per_rank


def tried_all(chances: list[float], bounds: list[int], topk: int) -> list[float]:
    """What :func:`reach` is to find, from every sequence of picks there is."""
    found = [0.0] * (len(bounds) - 1)
    for picks in itertools.permutations(range(len(chances)), topk):
        likely, left = 1.0, 1.0
        for expert in picks:
            likely, left = likely * chances[expert] / left, left - chances[expert]
        for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
            found[group] += likely * any(begin <= expert < end for expert in picks)
    return found


@pytest.mark.parametrize(
    ("experts", "bounds", "topk"),
    [
        (6, [0, 2, 5, 6], 3),
        (7, [0, 1, 1, 7], 2),  # a rank without experts
        (5, [0, 2, 5], 5),  # every expert is picked
        (4, [0, 1, 4], 1),
        (1, [0, 1], 1),
    ],
)
@pytest.mark.parametrize("skew", SKEWS)
def test_reach_is_exact(experts: int, bounds: list[int], topk: int, skew: str) -> None:
    chances = popularity(skew, experts, seed=3)
    assert reach(chances, bounds, topk) == pytest.approx(
        tried_all(chances, bounds, topk), abs=1e-12
    )


def test_the_integral_agrees_with_the_closed_form() -> None:
    """Rates that differ in the 15th digit take the way of unequal ones."""
    chances = [1 / 256] * 255 + [(1 + 1e-15) / 256]
    assert min(chances) < max(chances)
    expected = 1 - math.comb(192, 8) / math.comb(256, 8)
    assert reach(chances, [0, 64, 128, 192, 256], 8) == pytest.approx([expected] * 4, abs=1e-9)


def test_each_pick_lands_somewhere() -> None:
    """With one expert per group, the groups reached are the picks."""
    assert sum(reach(popularity("zipf", 1024), list(range(1025)), 8)) == pytest.approx(8, abs=1e-9)


def test_what_is_drawn_comes_to_what_is_expected() -> None:
    """Successive picks by popularity, drawn by torch: 20000 tokens, four standard deviations."""
    chances, bounds, tokens = popularity("zipf", 32), [0, 8, 16, 24, 32], 20000
    random = torch.Generator().manual_seed(0)
    picks = torch.multinomial(torch.tensor(chances).expand(tokens, -1), 4, generator=random)
    drawn = [int(count) / tokens for count in tokens_in_ranks(picks, 32, 4).sum(0)]
    for seen, chance in zip(drawn, reach(chances, bounds, 4), strict=True):
        assert abs(seen - chance) < 4 * (chance * (1 - chance) / tokens) ** 0.5


def test_uniform_traffic_is_that_of_the_bench() -> None:
    """Mean rows over three inputs of 512 tokens on 4 ranks, within 2 %."""
    case = Case(tokens=512, hidden=8, topk=8, experts=64)
    inputs = [all_sent(case, 4, number, 0) for number in range(3)]
    counted = [once_per_rank(each[1], 64, case.row_bytes) for each in inputs]
    mean = sum(sum(each.sent) for each in counted) / len(counted) / 4
    work = Workload(nodes=1, gpus_per_node=4, tokens=512, hidden=8, experts=64, topk=8)
    assert mean == pytest.approx(traffic(work, "uniform").nvlink.mean * work.row_bytes, rel=0.02)


def test_once_per_node_is_what_a_drawn_routing_needs() -> None:
    """Rows that leave a rank of 3 nodes x 2 GPUs for other nodes, 2000 tokens a rank, within 2 %;
    and ranks reached there.
    """
    work = Workload(nodes=3, gpus_per_node=2, tokens=2000, hidden=8, experts=24, topk=4)
    once = flat = 0
    for rank in range(6):
        picks, _ = routing("uniform", rank, 6, 2000, 4, 24, 0)
        away = torch.arange(3) != rank // 2
        once += int(tokens_in_ranks(picks, 24, 3)[:, away].sum())
        flat += int(tokens_in_ranks(picks, 24, 6)[:, away.repeat_interleave(2)].sum())
    expected = traffic(work, "uniform")
    assert once / 6 == pytest.approx(expected.nic.mean, rel=0.02)
    assert flat / 6 == pytest.approx(expected.flat_nic.mean, rel=0.02)


def test_worked_by_hand() -> None:
    """2 nodes x 2 GPUs, 6 experts (2, 2, 1, 1), top-2 of equal chances, 15 tokens: all of it by
    counting pairs.

    Of the 15 pairs of experts, 9 contain one of a rank's two (ranks 0, 1), 5 a rank's only one (2,
    3); 14 contain one of node 0's four, 9 one of node 1's two.
    """
    work = Workload(nodes=2, gpus_per_node=2, tokens=15, hidden=8, experts=6, topk=2)
    assert work.bounds == [0, 2, 4, 5, 6]
    found = traffic(work, "uniform")
    assert found.ranks_reached == pytest.approx((9 + 9 + 5 + 5) / 15)
    assert found.nodes_reached == pytest.approx((14 + 9) / 15)
    # Node 0 sends 9 rows a rank and gets 14; node 1 the other way.
    assert astuple(found.nic) == pytest.approx(((14 + 9) / 2, 14))
    # Straight: a rank of node 0 sends 5 + 5 and gets 2 x 9.
    assert astuple(found.flat_nic) == pytest.approx(((10 + 18) / 2, 18))
    # Inside node 0 a rank hands 2 x 9 rows to its peer (of two source nodes), inside node 1 2 x 5.
    assert astuple(found.nvlink) == pytest.approx(((18 + 10) / 2, 18))
    assert astuple(found.flat_nvlink) == pytest.approx((7, 9))
    assert astuple(found.own) == pytest.approx((7, 9))


def workloads() -> st.SearchStrategy[Workload]:
    @st.composite
    def one(draw: st.DrawFn) -> Workload:
        experts = draw(st.integers(1, 40))
        return Workload(
            nodes=draw(st.integers(1, 5)),
            gpus_per_node=draw(st.integers(1, 5)),
            tokens=draw(st.integers(1, 5000)),
            hidden=8 * draw(st.integers(1, 1000)),
            experts=experts,
            topk=draw(st.integers(1, min(experts, 8))),
        )

    return one()


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-6)


@given(workloads(), st.sampled_from(SKEWS), st.integers(0, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_conservation(work: Workload, skew: str, seed: int) -> None:
    found = traffic(work, skew, seed)
    room = 1 + 1e-7
    for flow in (found.nvlink, found.nic, found.flat_nvlink, found.flat_nic, found.own):
        assert 0 <= flow.mean <= flow.busiest * room + 1e-6
    # Once per (token, node) is at most once per (token, rank) over the network, and at least a
    # GPU's share of it.
    assert found.nic.mean <= found.flat_nic.mean * room + 1e-6
    assert found.nic.busiest <= found.flat_nic.busiest * room + 1e-6
    assert found.flat_nic.mean <= work.gpus_per_node * found.nic.mean * room + 1e-6
    if work.gpus_per_node == 1:
        assert close(found.nic.mean, found.flat_nic.mean) and close(
            found.nic.busiest, found.flat_nic.busiest
        )
        assert found.nvlink.busiest == found.flat_nvlink.busiest == 0
    if work.nodes == 1:
        assert found.nic.busiest == found.flat_nic.busiest == 0
        assert found.nvlink == found.flat_nvlink
    # Each (token, rank) is its own, or straight over NVLink, or over the network.
    assert close(
        found.own.mean + found.flat_nvlink.mean + found.flat_nic.mean,
        work.tokens * found.ranks_reached,
    )
    # Each (token, rank) comes over NVLink, but for those of the GPU that took it off the network,
    # or that has it.
    assert close(
        found.nvlink.mean,
        (work.gpus_per_node - 1) / work.gpus_per_node * work.tokens * found.ranks_reached,
    )
    assert found.nodes_reached <= found.ranks_reached * room
    assert found.ranks_reached <= min(work.topk, work.ranks) * room


@given(workloads(), st.sampled_from(SKEWS))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_traffic_grows_with_tokens_alone(work: Workload, skew: str) -> None:
    def rows(found: Traffic) -> list[float]:
        flows = (found.nvlink, found.nic, found.flat_nvlink, found.flat_nic, found.own)
        return [count for flow in flows for count in astuple(flow)]

    ranks = reach(popularity(skew, work.experts), work.bounds, work.topk)
    nodes = reach(popularity(skew, work.experts), work.bounds[:: work.gpus_per_node], work.topk)
    once, thrice = (traffic_of(ranks, nodes, times * work.tokens, skew) for times in (1, 3))
    assert rows(thrice) == pytest.approx([3 * count for count in rows(once)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, r"nodes \(0\) must be a whole number of at least 1"),
        ({"tokens": 1.5}, r"tokens \(1.5\) must be a whole number of at least 1"),
        ({"topk": 7}, r"topk \(7\) must be at most experts \(6\)"),
        ({"sms": 200}, r"sms \(200\) must be at most 132"),
        ({"dtype": "fp4"}, r"dtype \('fp4'\) must be one of bf16, fp8"),
    ],
)
def test_a_workload_names_what_is_wrong(change: dict[str, int], message: str) -> None:
    sizes = {
        "nodes": 1,
        "gpus_per_node": 2,
        "tokens": 4,
        "hidden": 16,
        "experts": 6,
        "topk": 2,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        Workload(**sizes)  # pyright: ignore[reportArgumentType]


def test_an_unknown_skew_is_refused() -> None:
    with pytest.raises(ValueError, match=r"skew 'zip' is unknown; use one of uniform, zipf"):
        popularity("zip", 4)
