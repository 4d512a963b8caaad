"""What arguments alone make large is refused before anything is exchanged, by the argument's name,
on all engines alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenyard as ty
from bad_input import (
    CASE,
    Inputs,
    anyone,
    assert_works,
    check,
    complaint,
    error_of,
    make,
    meet,
)
from test_bad_input import bad, run
from tokenyard import limits
from tokenyard.config import Config
from tokenyard.limits import check_result
from tokenyard.rows import Payload
from tokenyard.testing import Ranks, distributed_test

FLAT, MAJOR, PADDED = ty.Layout
GIB = 2**30
STATIC = {"layout": MAJOR, "exact": False}

ROWS = [
    bad(
        "expert_alignment (16777216)|at most 65536|smaller",
        lambda _: {"layout": MAJOR, "expert_alignment": 2**24},
    ),
    bad(
        "expert_alignment (65537)|at most 65536|smaller",
        lambda _: {"layout": MAJOR, "expert_alignment": 2**16 + 1},
    ),
    bad(
        "expert_alignment (16777216)|at most 65536", lambda _: {**STATIC, "expert_alignment": 2**24}
    ),
    bad("expert_alignment (268435456)|smaller", lambda _: {**STATIC, "expert_alignment": 2**28}),
    bad(
        "expert_alignment (268435456)|smaller",
        lambda _: {"layout": MAJOR, "expert_alignment": 2**28},
    ),
    bad(
        "expert_alignment (16777216)|at most 65536",
        lambda _: {**STATIC, "expert_alignment": 2**24, "capacity": 16},
    ),
    bad(
        "capacity (2147483647)|half of the rank|smaller",
        lambda _: {**STATIC, "capacity": 2**31 - 1},
    ),
    bad("capacity (268435456)|half of the rank|smaller", lambda _: {**STATIC, "capacity": 2**28}),
]


@distributed_test(world_size=(1, 2, 4))
def test_a_result_that_one_call_makes_too_large(ranks: Ranks) -> None:
    """On all ranks, and on one: its peers learn why, and the object goes on."""
    inputs = Inputs.of(ranks)
    good = {"x": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    with mock.patch.object(limits, "memory_of", return_value=16 * GIB):
        run(ranks, ROWS, lambda ep: (inputs, ep.dispatch, good))


BOUNDS: list[tuple[int, dict[str, Any], str]] = [
    (2**31 - 1, {"layout": PADDED}, "int32"),
    (2**31 - 1, {"layout": PADDED, "exact": False}, "int32"),
    (2**31 - 1, {"exact": False}, "make it smaller"),
    (2**31 - 1, {**STATIC, "capacity": 8}, "max_tokens_per_rank"),
    (2**26, {"layout": PADDED}, "half of the rank's share"),
    (2**26, {**STATIC}, "half of the rank's share"),
    (2**26, {**STATIC, "capacity": 8}, "half of the rank's share"),
]


@distributed_test(world_size=(1, 2))
def test_a_result_that_the_object_makes_too_large(ranks: Ranks) -> None:
    """Exact shapes of the other layouts do not depend on ``max_tokens_per_rank``."""
    i = Inputs.of(ranks)
    with mock.patch.object(limits, "memory_of", return_value=16 * GIB):
        for bound, asked, words in BOUNDS:
            with make(ranks, max_tokens_per_rank=bound) as ep:
                error = error_of(lambda ep=ep, asked=asked: ep.dispatch(i.x, i.topk_idx, **asked))
                check(error, ValueError, f"max_tokens_per_rank ({bound})", words, "smaller")
                rows = ep.dispatch(i.x, i.topk_idx).x.shape[0]
                assert 0 < rows <= ranks.world_size * len(i.x)


def needs(world_size: int) -> list[tuple[dict[str, Any], int, str]]:
    """Arguments, bytes that they make a rank of E = 8, K = 3, H = 40, M = 13 take whatever comes,
    and who is to blame.
    """
    local, padded = -(-8 // world_size), 13 * world_size
    bound, row, places = "max_tokens_per_rank (13)", 80 + 20, padded * (2 * 80 + 64 * 3)
    picks = padded * min(3, local)
    return [
        ({"layout": MAJOR, "expert_alignment": 16}, local * 15 * row, "expert_alignment (16)"),
        ({"layout": PADDED}, local * padded * row, bound),
        ({"layout": PADDED, "quantize": ty.Quantize.FP8}, local * padded * (40 + 4 + 20), bound),
        ({"layout": PADDED, "exact": False}, places + local * padded * row, bound),
        ({"exact": False}, places + padded * (80 + 16 + 3 * 12), bound),
        ({**STATIC}, places + picks * row, bound),
        (
            {**STATIC, "expert_alignment": 999},
            places + (picks + local * 998) * row,
            "expert_alignment (999)",
        ),
        ({**STATIC, "capacity": 1000}, places + 1000 * row, "capacity (1000)"),
        ({**STATIC, "capacity": 2}, places + 2 * row, bound),
    ]


@distributed_test(world_size=(1, 2, 3))
def test_what_just_fits(ranks: Ranks) -> None:
    """To the byte, with the most local experts of any rank, so that all come to one verdict."""
    i = Inputs.of(ranks)
    for asked, need, blamed in needs(ranks.world_size):
        for most in (need, need - 1):
            with mock.patch("tokenyard.api.most_result_bytes", return_value=most):
                ep = make(ranks)
            error = error_of(
                lambda ep=ep, asked=asked: ep.dispatch(i.x, i.topk_idx, i.topk_weights, **asked)
            )
            if most == need:
                assert error is None, (asked, error)
            else:
                check(error, ValueError, blamed, "half of the rank's share of the memory")
            ep.close()


@distributed_test(world_size=(1, 2, 3))
def test_ranks_of_a_host_share_its_memory(ranks: Ranks) -> None:
    with mock.patch.object(limits, "memory_of", return_value=16 * GIB):
        with make(ranks) as ep:
            assert ep._validation._most_bytes == 8 * GIB // ranks.world_size
        with (
            mock.patch.dict("os.environ", {"TOKENYARD_HOST": f"host {ranks.rank}"}),
            make(ranks) as ep,
        ):
            assert ep._validation._most_bytes == 8 * GIB


def test_the_memory_of_a_container(tmp_path: Path) -> None:
    cpu, file = torch.device("cpu"), tmp_path / "memory.max"
    with mock.patch.object(limits, "_CGROUP", file):
        host = limits.memory_of(cpu)
        assert host > GIB // 4
        file.write_text("max\n")
        assert limits.memory_of(cpu) == host
        file.write_text("104857600\n")
        assert limits.memory_of(cpu) == 104857600
    assert (
        limits.most_result_bytes(cpu, 3)
        == limits.memory_of(cpu) // 6
        == limits.most_result_bytes(None, 3)
    )


ALONE = Config(
    num_experts=8, hidden=2, num_topk=3, max_tokens_per_rank=4, rank=0, world_size=2, timeout=1.0
)


def rows_of(num_tokens: int) -> Payload:
    """So many tokens, of no memory."""
    return Payload(torch.empty(num_tokens, 2, device="meta"), None)


@pytest.mark.parametrize("engine", ["collective", "nvlink", "twolevel"])
def test_tokens_that_int32_does_not_count(engine: str) -> None:
    """Exact shapes take any number of them, up to rows that could not be told apart."""
    flat, major = ty.handle.Spec(layout=FLAT, exact=True), ty.handle.Spec(layout=MAJOR, exact=True)
    for spec, most in ((flat, (2**31 - 1) // 2), (major, (2**31 - 1) // 6)):
        check_result(rows_of(most), None, spec, ALONE, engine != "collective", GIB)
        with pytest.raises(
            ValueError, match=rf"x has {most + 1} tokens: if each of 2 ranks .*split the batch"
        ):
            check_result(rows_of(most + 1), None, spec, ALONE, engine != "collective", GIB)


def test_kernels_have_tables_for_all_tokens_of_all_ranks() -> None:
    """Of each expert, also of exact shapes; engine collective has not."""
    large = replace(ALONE, max_tokens_per_rank=2**28)
    for exact in (True, False):
        spec = ty.handle.Spec(layout=MAJOR, exact=exact, capacity=None if exact else 4)
        with pytest.raises(
            ValueError,
            match=r"max_tokens_per_rank \(268435456\) x 2 ranks x 4 local experts .*int32",
        ):
            check_result(rows_of(4), None, spec, large, True, 2**50)
    check_result(rows_of(4), None, ty.handle.Spec(layout=MAJOR, exact=True), large, False, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_fewer_experts_refuse_what_others_do(rank: int) -> None:
    """The first rank holds two of three experts, the other one."""
    uneven = replace(ALONE, num_experts=3, num_topk=3, rank=rank)
    large, static = (
        replace(uneven, max_tokens_per_rank=2**29),
        ty.handle.Spec(layout=MAJOR, exact=False),
    )
    with pytest.raises(ValueError, match="x 2 ranks x 2 local experts makes more rows than int32"):
        check_result(rows_of(4), None, static, large, False, 2**60)
    exact = ty.handle.Spec(layout=MAJOR, exact=True)
    with pytest.raises(ValueError, match=r"2 rows of each on one rank .* split the batch"):
        check_result(rows_of(2**29), None, exact, uneven, False, GIB)


@distributed_test(world_size=1)
def test_hidden_and_picks_of_any_size_cost_what_comes(ranks: Ranks) -> None:
    """Nothing is allocated by ``hidden``, ``num_topk`` or ``timeout`` themselves."""
    most = {"hidden": 2**31 - 1, "num_topk": 4096, "num_experts": 65536, "timeout": 1e9}
    with make(ranks, **most) as ep:
        x = torch.empty(0, 2**31 - 1, dtype=torch.bfloat16, device=ranks.device)
        recv = ep.dispatch(x, torch.empty(0, 4096, dtype=torch.int64, device=ranks.device))
        assert ep.combine(recv.x, recv.handle).shape == x.shape


@distributed_test(world_size=2)
def test_as_many_experts_as_there_may_be(ranks: Ranks) -> None:
    i = Inputs.of(ranks)
    with make(ranks, num_experts=65536) as ep:
        recv = ep.dispatch(i.x, i.topk_idx + 65528, layout=MAJOR)
        assert recv.x.shape[0] == (0 if ranks.rank == 0 else 2 * CASE.num_topk * len(i.x))
        check(error_of(lambda: ep.dispatch(i.x, i.topk_idx, layout=PADDED)), None)


@distributed_test(world_size=2)
def test_symmetric_memory_that_no_rank_has(ranks: Ranks) -> None:
    """Of engines with kernels: the simulator runs this."""
    if ranks.engine != "nvlink":
        return
    for num_bytes in (2**47, 2**46):
        error = error_of(lambda num_bytes=num_bytes: make(ranks, buffer_bytes=num_bytes))
        assert not complaint(
            error, ValueError, (f"buffer_bytes ({num_bytes})", "symmetric memory", "smaller")
        )
        meet(ranks)
    i = Inputs.of(ranks)
    with make(ranks, max_tokens_per_rank=2**30) as ep:
        error = error_of(lambda: ep.dispatch(i.x, i.topk_idx, in_place=True))
        check(error, ValueError, "max_tokens_per_rank (1073741824)", "in_place", "smaller")
        assert not anyone(ranks, False)
    with make(ranks) as ep:
        assert_works(ranks, ep)
