"""Why an object has the engine that it has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from nvlink_pool import without_devices
from tokenyard.config import Config
from tokenyard.engines import select
from tokenyard.testing import Ranks, distributed_test

PAIRS = "; ".join(f"ranks {a} and 7 have no peer-to-peer path from GPU-{a} to GPU-7" for a in range(7))


def made(engine: str = "auto") -> ty.ExpertParallel:
    return ty.ExpertParallel(num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, engine=engine)


@without_devices  # beside real GPUs there is more to choose from
@distributed_test(world_size=1, engine="auto")
def test_auto_says_what_keeps_gpus_from_nvlink(ranks: Ranks) -> None:
    """All of it if it is short, and where all of it is asked for by name."""
    for obstacle, said in (("it is Monday", "it is Monday"), (PAIRS, "ranks 0 and 7 have no peer-to-peer path")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "_gpu", lambda *_: torch.device("cuda", 0))
            patch.setattr(select, "obstacle_of", lambda _: "")
            patch.setattr(select, "_common_obstacle", lambda *_, found=obstacle: (found, 0))
            ep = made()
            assert ep.engine == "collective"
            assert f"; not nvlink: {said}" in ep.why
            assert len(ep.why) < 800
            ep.close()
            with pytest.raises(ty.NotSupported) as refused:
                made("nvlink")
            assert obstacle in str(refused.value)
    assert dist.is_initialized()


@without_devices
@distributed_test(world_size=1, engine="auto")
def test_on_cpus_nobody_expects_nvlink(ranks: Ranks) -> None:
    ep = made()
    assert "nvlink" not in ep.why
    ep.close()


@pytest.mark.parametrize(
    ("grid", "why"),
    [
        (
            None,
            "needs ranks that form a grid: hosts must have equally many ranks, and a has 3; engine 'collective' does not",
        ),
        (ty.Topology(64, 8), "takes at most 64 nodes, and 512 ranks and nodes together, but 64x8 are 64 and 576"),
        (ty.Topology(65, 1), "but 65x1 are 65 and 130"),
    ],
)
def test_grids_that_twolevel_cannot_take_are_refused_before_anything_else(grid: ty.Topology | None, why: str) -> None:
    """Not by a list of all pairs of GPUs on different hosts."""
    size = 4 if grid is None else grid.world_size
    config = Config(
        num_experts=size,
        hidden=8,
        num_topk=1,
        max_tokens_per_rank=1,
        rank=0,
        world_size=size,
        timeout=1.0,
        topology=grid,
    )
    asked = select.Asked(engine="twolevel", no_grid="hosts must have equally many ranks, and a has 3")
    with pytest.raises(ty.NotSupported, match=why):
        select.choose(None, None, config, asked)
