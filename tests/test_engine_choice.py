"""Why an object has the engine that it has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from tokenyard.engines import select
from tokenyard.testing import Ranks, distributed_test

PAIRS = "; ".join(f"ranks {a} and 7 have no peer-to-peer path from GPU-{a} to GPU-7" for a in range(7))


def made(engine: str = "auto") -> ty.ExpertParallel:
    return ty.ExpertParallel(num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, engine=engine)


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


@distributed_test(world_size=1, engine="auto")
def test_on_cpus_nobody_expects_nvlink(ranks: Ranks) -> None:
    ep = made()
    assert "nvlink" not in ep.why
    ep.close()
