"""Why an object has the engine that it has."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from nvlink_pool import without_devices
from rank_threads import run_threads
from tokenyard.config import Config
from tokenyard.engines import select
from tokenyard.memory import cuda, nvshmem, preflight
from tokenyard.memory.preflight import Report, Unreachable
from tokenyard.testing import Ranks, distributed_test

PAIRS = "; ".join(
    f"ranks {a} and 7 have no peer-to-peer path from GPU-{a} to GPU-7" for a in range(7)
)


def made(engine: str = "auto") -> ty.ExpertParallel:
    return ty.ExpertParallel(
        num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, engine=engine
    )


@without_devices  # beside real GPUs there is more to choose from
@distributed_test(world_size=1, engine="auto")
def test_auto_says_what_keeps_gpus_from_nvlink(ranks: Ranks) -> None:
    """All of it if it is short, and where all of it is asked for by name."""
    for obstacle, said in (
        ("it is Monday", "it is Monday"),
        (PAIRS, "ranks 0 and 7 have no peer-to-peer path"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select, "_gpu", lambda *_: torch.device("cuda", 0))
            patch.setattr(select, "obstacle_of", lambda _: "")
            patch.setattr(select, "_common_obstacle", lambda *_, found=obstacle: (found, 0, False))
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
            "needs ranks that form a grid: hosts must have equally many ranks, and a has 3; engine "
            "'collective' does not",
        ),
        (
            ty.Topology(64, 8),
            "takes at most 64 nodes, and 512 ranks and nodes together, but 64x8 are 64 and 576",
        ),
        (ty.Topology(65, 1), "but 65x1 are 65 and 130"),
    ],
)
def test_grids_that_twolevel_cannot_take_are_refused_before_anything_else(
    grid: ty.Topology | None, why: str
) -> None:
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
    request = select.Request(
        engine="twolevel", no_grid="hosts must have equally many ranks, and a has 3"
    )
    with pytest.raises(ty.NotSupported, match=why):
        select.choose(None, None, config, request)


def obstacle(
    patch: pytest.MonkeyPatch,
    gpus: list[tuple[str, int]],
    unreachable: list[Unreachable],
    **more: Any,
) -> list[Any]:
    """What each rank (its obstacle and its multiprocessors; none of those: on the CPU) learns
    through a store: the same.
    """
    store = dist.HashStore()
    mine = threading.local()
    patch.setattr(select, "multiprocessors", lambda _: gpus[mine.rank][1])
    patch.setattr(
        preflight, "report", lambda rank, _: Report(rank, "host", f"GPU-{rank}", rank, (), ())
    )
    patch.setattr(
        preflight, "unreachable", lambda reports: unreachable if len(reports) == len(gpus) else None
    )

    def body(rank: int) -> Any:
        mine.rank = rank
        config = Config(
            num_experts=4,
            hidden=8,
            num_topk=1,
            max_tokens_per_rank=1,
            rank=rank,
            world_size=len(gpus),
            timeout=60.0,
            topology=None,
        )
        why, sms = gpus[rank]
        gpu = torch.device("cuda", rank) if sms else None
        try:
            return select._common_obstacle(store, config, gpu, why, **more)
        except ty.Mismatch as error:
            return str(error)

    return run_threads(len(gpus), body, lambda rank, why: None, 120.0)


def test_ranks_learn_of_each_others_obstacles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest multiprocessors, the first obstacle with its rank, GPUs that cannot reach each
    other.
    """
    patch = monkeypatch
    assert obstacle(patch, [("", 132), ("", 78), ("", 114)], []) == [("", 78, False)] * 3
    assert (
        obstacle(patch, [("", 132), ("old", 78), ("older", 114)], [])
        == [("old (rank 1)", 0, False)] * 3
    )
    assert obstacle(patch, [("none", 0), ("none", 0)], []) == [("none (rank 0)", 0, False)] * 2
    disagree = "ranks disagree on device: rank 0 works on cuda, rank 2 on cpu"
    assert obstacle(patch, [("", 132), ("", 132), ("none", 0)], []) == [disagree] * 3
    pairs = [Unreachable(0, 1, "are far"), Unreachable(0, 2, "are on different hosts")]
    said = "ranks 0 and 1 are far; ranks 0 and 2 are on different hosts"
    assert obstacle(patch, [("", 132)] * 3, pairs) == [(said, 132, False)] * 3


@pytest.mark.parametrize("nvshmem", [False, True])
def test_ranks_of_different_nodes_need_no_way_but_nvshmem(
    monkeypatch: pytest.MonkeyPatch, nvshmem: bool
) -> None:
    """Pairs inside a node count whatever there is between nodes."""
    monkeypatch.setattr("tokenyard.memory.nvshmem.is_available", lambda: nvshmem)
    gpus, grid = [("", 132), ("", 100), ("", 132), ("", 132)], ty.Topology(2, 2)
    across = [Unreachable(a, b, "are on different hosts") for a in (0, 1) for b in (2, 3)]
    inside = Unreachable(2, 3, "share one GPU")
    missing = (
        "between nodes it needs NVSHMEM, which this torch cannot use: ranks 0 and 2 are on "
        "different hosts; "
    )
    for why, sms, apart in obstacle(monkeypatch, gpus, across, grid=grid):
        assert sms == 100 and apart == nvshmem
        assert why == "" if nvshmem else why.startswith(missing)
    for why, _, _ in obstacle(monkeypatch, gpus, [*across, inside], grid=grid):
        assert (
            why == "ranks 2 and 3 share one GPU"
            if nvshmem
            else why.startswith(missing) and "2 and 3 share" in why
        )
    for why, _, apart in obstacle(monkeypatch, gpus, [inside], grid=grid):
        assert not apart and why == "ranks 2 and 3 share one GPU"
    for why, _, _ in obstacle(monkeypatch, gpus, across):
        assert why.startswith("ranks 0 and 2 are on different hosts")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("forced", ["", "1"])
@pytest.mark.parametrize("engine", ["low_latency", "twolevel", "nvlink"])
def test_engines_take_nvshmem_where_they_put(
    monkeypatch: pytest.MonkeyPatch, engine: str, forced: str, apart: bool
) -> None:
    """Low latency only where ranks do not map each other's memory, or shall not."""
    made: list[str] = []
    monkeypatch.setenv(nvshmem.PUTS_VARIABLE, forced)
    monkeypatch.setattr(nvshmem, "is_available", lambda: True)
    monkeypatch.setattr(nvshmem, "NvshmemMemory", lambda *_, **__: made.append("nvshmem"))
    monkeypatch.setattr(cuda, "CudaMemory", lambda *_, **__: made.append("cuda"))
    config = Config(
        num_experts=4,
        hidden=8,
        num_topk=1,
        max_tokens_per_rank=1,
        rank=0,
        world_size=4,
        timeout=1.0,
        topology=ty.Topology(2, 2),
    )
    request = select.Request(engine=engine)
    select._cuda_memory(None, None, config, torch.device("cuda", 0), request, apart)
    puts = engine == "twolevel" or (engine == "low_latency" and (apart or bool(forced)))
    assert made == ["nvshmem" if puts else "cuda"]


@without_devices
@pytest.mark.parametrize("forced", [0, 1])
@distributed_test(world_size=2, engine="low_latency")
def test_puts_are_forced_on_all_ranks_or_on_none(ranks: Ranks, forced: int) -> None:
    """Else a rank would wait for stores, and its peer put."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(nvshmem.PUTS_VARIABLE, str(int(ranks.rank == forced)))
        with pytest.raises(
            ty.Mismatch, match=f"TOKENYARD_PUTS: it is set on rank {forced} and not on {1 - forced}"
        ):
            ty.ExpertParallel(
                num_experts=4,
                hidden=8,
                num_topk=2,
                max_tokens_per_rank=8,
                engine=ranks.engine,
                topology=(2, 1),
            )
