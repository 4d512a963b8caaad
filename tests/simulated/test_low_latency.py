"""Engine low_latency through ``ExpertParallel``, on simulated ranks: bodies shared with other
engines, hooks, refusals, mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenyard as ty
from nvlink_pool import SOAK, run_all, without_devices
from tokenyard.config import Config
from tokenyard.engines.tuning import crosses_once
from tokenyard.testing import ROUTINGS
from tokenyard.topology import Topology

pytestmark = without_devices

LAYOUTS = (ty.Layout.EXPERT_MAJOR, ty.Layout.EXPERT_PADDED)
SIZES = [
    {"hidden": 1},
    {"hidden": 7, "dtype": torch.float32},
    {"hidden": 33, "dtype": torch.int8},
    {"hidden": 256, "num_tokens": 9},
    {"num_topk": 12, "num_experts": 20, "num_tokens": 3},
    {"num_topk": 6, "num_experts": 2},
    {"num_experts": 1, "num_topk": 2},
    {"num_experts": 7},
    {"num_experts": 30},
    {"num_tokens": 1},
]


def with_this(layout: ty.Layout, at: int) -> bool:
    """Whether case ``at`` is tried with this layout; ``make soak`` tries all with both."""
    return SOAK > 1 or at % 2 == LAYOUTS.index(layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())
def test_matches_the_oracle(layout: ty.Layout) -> None:
    calls = [
        (size, at, {"layout": layout, "routing": name})
        for at, name in enumerate(ROUTINGS)
        for size in (1, 3)[(at if SOAK > 1 else at // 2) % 2 :][:1]
        if with_this(layout, at)
    ]
    run_all("low_latency_api.shared_body", calls)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.lower())
def test_any_size(layout: ty.Layout) -> None:
    run_all(
        "low_latency_api.shared_body",
        [
            (2 + (at > 6), at, {"layout": layout, **sizes})
            for at, sizes in enumerate(SIZES)
            if with_this(layout, at)
        ],
    )


def test_quantised_in_the_send() -> None:
    calls = [
        (2, 0, {"hidden": 300, "quantize": mode, "layout": layout})
        for at, mode in enumerate(ty.Quantize)
        for layout in LAYOUTS
        if with_this(layout, at)
    ]
    run_all("low_latency_api.shared_body", calls)


def test_scales_by_column() -> None:
    """Words of scales that are no power of two, and one; given with the rows; ranks without tokens,
    or without experts.
    """
    fp8 = ty.Quantize.FP8
    calls = [
        (1, {"hidden": 300, "quantize": fp8}),
        (3, {"hidden": 1100, "quantize": fp8, "num_tokens": 4, "routing": "duplicates"}),
        (2, {"hidden": 1100, "quantize": ty.Quantize.FP8_UE8M0, "num_tokens": 4}),
        (3, {"hidden": 40, "quantize": ty.Quantize.FP8_POW2, "num_tokens": 2, "num_experts": 2}),
        (2, {"hidden": 33, "dtype": torch.int8}),
        (2, {"hidden": 300, "quantize": ty.Quantize.FP8_UE8M0, "routing": "dropped"}),
        (2, {"hidden": 300, "quantize": fp8, "num_tokens": 1}),
        (2, {"hidden": 130, "quantize": fp8, "routing": "none"}),
        (2, {"hidden": 300, "quantize": fp8, "num_experts": 2}),  # one block of rows per rank
    ]
    run_all("low_latency_api.by_column", calls if SOAK > 1 else [*calls[:4], *calls[7:]])


def test_blocks_are_aligned() -> None:
    options = [
        {"layout": LAYOUTS[0], "expert_alignment": alignment, "num_experts": 11}
        for alignment in (2, 16)
    ]
    run_all("low_latency_api.shared_body", [(2, 0, each) for each in options])


def test_what_sums_lack() -> None:
    calls = [
        (2, {"layout": LAYOUTS[1], "routing": "uniform", "num_topk": 6, "seed": 1}),
        (3, {"layout": LAYOUTS[0], "routing": "duplicates", "num_topk": 5, "seed": 3}),
        (2, {"layout": LAYOUTS[1], "routing": "dropped"}),
    ]
    run_all("low_latency_api.left_out", calls)


def test_between_nodes() -> None:
    """Everything that the engine can, with ranks that get puts."""
    pair, fp8 = (2, 1), ty.Quantize.FP8
    sizes = {"hidden": 300, "quantize": fp8, "layout": LAYOUTS[0], "num_topk": 5}
    jobs: list[Any] = [
        (pair, "hooks", 0),
        (pair, "capacity", 1),
        (pair, "refusals", 0),
        (pair, "back_before_the_combine", 0),
        (pair, "no_experts", 0),
        (pair, "by_column", 2, {"hidden": 300, "quantize": fp8}),
        ((3, 1), "left_out", 3, {"layout": LAYOUTS[0], "routing": "duplicates", "seed": 3}),
        ((2, 2), "shared_body", 4, 5, {"routing": "dropped", **sizes}),
        (pair, "shared_body", 2, 7, {"dtype": torch.int8, "hidden": 33}),
        (pair, "left_out", 2, {"layout": LAYOUTS[1], "num_topk": 6, "seed": 1}),
        ((2, 2), "shared_body", 4, 6, {"layout": LAYOUTS[1], "num_tokens": 3}),
        (pair, "shared_body", 2, 8, {"num_tokens": 1, "num_topk": 12, "num_experts": 20}),
    ]
    run_all("low_latency_api.between_nodes", jobs if SOAK > 1 else jobs[:9])


def test_once_per_node() -> None:
    """The same where rows cross once per node, through the simulated network and through
    pointers: masks silence a rail, sums of a node have some picks only, the caller casts."""
    square, oblong, fp8 = (2, 2), (2, 4), ty.Quantize.FP8
    jobs: list[Any] = [
        (square, True, "left_out", 4, {"layout": LAYOUTS[0], "num_topk": 6, "seed": 1}),
        (square, False, "capacity", 1, 4),
        (square, True, "microscaled", 4, {"hidden": 33, "layout": LAYOUTS[0]}),
        (square, True, "hooks", 0, 4),
        (square, False, "hooks", 1, 4),
        (square, True, "capacity", 2, 4),
        (square, True, "by_column", 4, {"hidden": 300, "quantize": fp8}),
        (square, False, "left_out", 4, {"num_topk": 3, "seed": 2, "routing": "duplicates"}),
        (square, False, "microscaled", 4, {"hidden": 300}),
        (oblong, True, "left_out", 8, {"num_topk": 3, "num_experts": 17, "seed": 2}),
        *(
            (oblong, at % 2 == 0, "shared_body", 8, at, {"layout": LAYOUTS[at % 2], **sizes})
            for at, sizes in enumerate(SIZES)
        ),
        ((4, 4), True, "shared_body", 16, 6, {"num_topk": 12, "num_experts": 50}),
    ]
    run_all("low_latency_api.once_per_node", jobs if SOAK > 1 else jobs[:3])


def test_how_rows_cross_is_chosen_and_said() -> None:
    """By the option; else by the bytes that it saves."""
    per_rank = "2x2 nodes and ranks: rows cross once per rank"
    per_node = "2x2 nodes and ranks: rows cross once per node: sums are by rank, then by node"
    calls = [(None, 40), (True, 40), (False, 40)]
    assert run_all("low_latency_api.chosen", calls) == [per_rank, per_node, per_rank]
    config = Config(
        num_experts=256, hidden=7168, num_topk=8, max_tokens_per_rank=128, rank=0, world_size=16,
        timeout=5.0, topology=Topology(2, 8),
    )  # fmt: skip
    assert crosses_once(config)
    assert not crosses_once(replace(config, max_tokens_per_rank=1))
    assert not crosses_once(replace(config, topology=Topology(16, 1)))


def test_once_per_node_is_checked() -> None:
    sizes: dict[str, Any] = {"num_experts": 2, "hidden": 8, "num_topk": 1, "max_tokens_per_rank": 2}
    with pytest.raises(ValueError, match=r"once_per_node \(1\) must be True, False or None"):
        ty.ExpertParallel(**sizes, device="cpu", engine="low_latency", once_per_node=1)
    with pytest.raises(
        ValueError, match="belongs to engine 'low_latency', not 'auto': leave it out"
    ):
        ty.ExpertParallel(**sizes, device="cpu", once_per_node=True)


def test_other_engines_take_no_options_but_lost_weights() -> None:
    with ty.ExpertParallel(
        num_experts=2, hidden=8, num_topk=1, max_tokens_per_rank=2, device="cpu"
    ) as ep:
        recv = ep.dispatch(torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64))
        with pytest.raises(
            ty.NotSupported,
            match="engine 'collective' takes no options of a call but lost_weights; engine "
            "'low_latency' can",
        ):
            ep.combine(recv.x, recv.handle, options=ty.CallOptions(timeout=1.0))
        lost = torch.full((2,), torch.nan)
        ep.combine(recv.x, recv.handle, options=ty.CallOptions(lost_weights=lost))
        assert lost.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "what", ["hooks", "capacity", "refusals", "back_before_the_combine", "no_experts"]
)
def test_calls(what: str) -> None:
    run_all(f"low_latency_api.{what}", [(seed,) for seed in range(2)[:SOAK]])


@pytest.mark.parametrize(
    "what",
    [
        "no_second_half_behind_close",
        "few_operations",
        "shapes_and_numbers",
        "tags",
        "drop_in_adds_no_operation",
    ],
)
def test_on_the_host(what: str) -> None:
    run_all(f"low_latency_host.{what}", [()])
