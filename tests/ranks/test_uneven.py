"""Experts that do not divide among ranks: what ranks lay out for each other follows the rank with
most, on every rank alike.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bad_input import make
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from tokenyard import header
from tokenyard.config import Config
from tokenyard.engines.plans import counts_by_rank
from tokenyard.handle import Spec
from tokenyard.memory.symmetric import Region
from tokenyard.routing import pick_owners
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.testing import Ranks, distributed_test
from tokenyard.topology import Topology
from tokenyard.types import Layout

EXPERTS = 9  # the first rank of two, and of four, holds one more


def config_of(rank: int, world_size: int, topology: Topology | None = None) -> Config:
    sizes = {"num_experts": EXPERTS, "hidden": 256, "num_topk": 2, "max_tokens_per_rank": 4}
    return Config(**sizes, rank=rank, world_size=world_size, timeout=1.0, topology=topology)


class Noting:
    """Memory of one rank that notes sizes, and constants of launches."""

    device, early, shared_gpu, ranks_per_node, num_sms = torch.device("cpu"), True, False, 0, 8

    def __init__(self, config: Config) -> None:
        self.rank, self.world_size, self.noted = config.rank, config.world_size, list[Any]()

    def allocate(self, num_bytes: int) -> Region:
        self.noted.append(num_bytes)
        return Region(
            torch.empty(16, dtype=torch.uint8), torch.zeros(self.world_size, dtype=torch.int64)
        )

    def host_words(self, count: int) -> torch.Tensor:
        self.noted.append(count)
        return torch.zeros(count, dtype=torch.int64)

    def tensors(self) -> Any:
        return nullcontext()

    def bind(self, kernel: Any, grid: int, **constants: Any) -> Any:
        self.noted.append((kernel.__name__, grid, constants))
        return lambda *_: None


def ringed(name: str, config: Config) -> list[Any]:
    """All that an engine with rings lays out."""
    from tokenyard.engines.failures import FailureReports
    from tokenyard.engines.ring_engine import choose_peer
    from tokenyard.kernels.plan import bind_plan

    memory, stats = Noting(config), Stats.zeros(config.rank, config.world_size)
    chosen = choose_peer(config, 16, 8 << 20, all_sms=True, nodes=name == "twolevel")
    failures = FailureReports(dist.HashStore(), config.rank, 1.0)
    engine = chosen.engine(chosen.config, memory, stats, chosen.tuning, 8 << 20, failures)
    for layout in Layout:
        for exact in (True, False):
            bind_plan(
                engine._workspace,
                config.num_topk,
                4,
                by_expert=layout is not Layout.FLAT,
                padded=layout is Layout.EXPERT_PADDED,
                exact=exact,
                weighted=True,
                wide=True,
            )
    return [*memory.noted, engine._workspace.header_words, engine._headers.shape]


def slotted(config: Config) -> list[Any]:
    """All that engine low_latency lays out."""
    from tokenyard.engines.low_latency import LowLatencyEngine
    from tokenyard.engines.low_latency_workspace import LowLatencyTuning
    from tokenyard.kernels.low_latency_memory import BOTH

    memory = Noting(config)
    engine = LowLatencyEngine(
        config,
        memory,
        Stats.zeros(config.rank, config.world_size),
        LowLatencyTuning(programs=8),
        None,
    )  # type: ignore[arg-type]
    spec = Spec(layout=Layout.EXPERT_PADDED, exact=False)
    payload = Payload(torch.empty(0, 256, dtype=torch.bfloat16), None)
    engine._signatures.dispatch(payload, spec, None).launch(True, True, 0, BOTH)
    engine._signatures.combine(payload.x, spec).launch(0, (), False, BOTH)
    workspace = engine._workspace
    return [*memory.noted, workspace.sizes, workspace.num_bytes, workspace.state.shape]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("engine", ["nvlink", "twolevel", "low_latency"])
def test_ranks_lay_out_alike(engine: str, world_size: int) -> None:
    """Sizes of regions, and constants of kernels that address peers: none follows the rank's own
    experts.
    """
    pytest.importorskip("triton")
    grid = Topology(2, world_size // 2)
    configs = [config_of(rank, world_size, grid) for rank in range(world_size)]
    assert len({config.num_local_experts for config in configs}) == 2
    laid = [
        slotted(config) if engine == "low_latency" else ringed(engine, config) for config in configs
    ]
    assert all(each == laid[0] for each in laid), [
        (mine, other)
        for each in laid
        for mine, other in zip(laid[0], each, strict=True)
        if mine != other
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_headers_have_words_for_the_most_experts(world_size: int) -> None:
    idx = torch.tensor([[0, 8], [4, -1], [8, 7]])
    for rank in range(world_size):
        counts = counts_by_rank(idx, config_of(rank, world_size))
        assert counts.shape == (world_size, -(-EXPERTS // world_size))
        assert counts[-1].tolist()[-2:] == [2, 0]  # of expert 8, and of none
        assert int(counts.sum()) == 5


def test_a_header_with_rows_for_an_expert_that_is_not_there() -> None:
    """The last rank holds 4 experts of the 5 that there are words for."""
    config = config_of(1, 2)
    row = [0] * (header.COUNTS + config.most_local_experts + config.matrix_ranks)
    row[header.NUM_TOKENS], row[header.NUM_ROWS] = 3, 2
    row[header.COUNTS + 3], row[-1] = 2, 2
    header._check_counts(0, row, config, 10)
    row[header.COUNTS + 4] = 1
    with pytest.raises(header.PeerError, match="announced impossible counts"):
        header._check_counts(0, row, config, 10)


@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.name.lower())
@distributed_test(world_size=(2, 4))
def test_rows_counts_and_matrix(ranks: Ranks, layout: Layout) -> None:
    size = ranks.world_size
    case = Case(size, num_experts=EXPERTS, layout=layout)
    owners = [pick_owners(idx, EXPERTS, size) for idx, _ in case.picks]
    want = [[int((owner == there).any(1).sum()) for there in range(size)] for owner in owners]
    with make(ranks, num_experts=EXPERTS) as ep:
        for exact in (True, False):
            same = replace(case, exact=exact)
            recv = dispatch(ranks, ep, same)
            check_received(recv, same, ranks.rank)
            matrix = recv.handle.rows_between()
            assert matrix is None or matrix.equal(recv.handle.rows_between(size))
            with pytest.raises(ValueError, match=f"must be {size}"):
                recv.handle.rows_between(size + 1)
            assert matrix is None if not exact else matrix is not None and matrix.tolist() == want
            y = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle)
            check_combined(y, case, ranks.rank, case.combined(ranks.rank).x)


@distributed_test(world_size=3)
def test_counters_of_a_combine_are_those_of_its_dispatch_turned_round(ranks: Ranks) -> None:
    """Rows go back where they came from; rank 0 gets more than it sends."""
    case = Case(3, num_experts=EXPERTS, num_topk=2)
    idx = torch.tensor([[0, 1 + 3 * ranks.rank]] * (ranks.rank + 1), device=ranks.device)
    x = torch.ones(len(idx), case.hidden, device=ranks.device).bfloat16()
    with make(ranks, num_experts=EXPERTS, num_topk=2) as ep:
        recv = ep.dispatch(x, idx)
        there = ep.stats()
        ep.combine(recv.x, recv.handle)
        back = ep.stats()
    own = ranks.rank + 1
    sent = [own if peer in (0, ranks.rank) else 0 for peer in range(3)]
    received = (
        [1, 2, 3] if ranks.rank == 0 else [own if peer == ranks.rank else 0 for peer in range(3)]
    )
    assert (there.rows_sent, there.rows_received) == (sent, received)
    assert [b - a for a, b in zip(there.rows_sent, back.rows_sent, strict=True)] == received
    assert [b - a for a, b in zip(there.rows_received, back.rows_received, strict=True)] == sent
    crossed = zip(there.bytes_sent, back.bytes_sent, there.rows_received, range(3), strict=True)
    assert all(
        (after > before) == (rows > 0 and peer != ranks.rank)
        for before, after, rows, peer in crossed
    )


@distributed_test(world_size=3)
def test_a_rank_without_experts(ranks: Ranks) -> None:
    """Nothing comes to the last of three ranks, which sends, and gets its sums, like the others."""
    with make(ranks, num_experts=2, num_topk=2) as ep:
        assert ep.config.num_local_experts == (1, 1, 0)[ranks.rank]
        for layout in Layout:
            for exact in (True, False):
                case = Case(3, num_experts=2, num_topk=2, layout=layout, exact=exact)
                recv = dispatch(ranks, ep, case)
                check_received(recv, case, ranks.rank)
                rows = rows_to_combine(recv, case, ranks.rank)
                want = case.combined(ranks.rank).x
                check_combined(ep.combine(rows, recv.handle), case, ranks.rank, want)
                x = case.x[ranks.rank]
                assert isinstance(x, torch.Tensor)
                again = ep.dispatch(x.to(ranks.device), handle=recv.handle)
                assert again.x.shape == recv.x.shape
