"""What engines make of their buffer: as much memory as was planned, and sizes in errors that are
enough the first time.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.config import Config
from tokenyard.engines.ring_engine import choose_peer
from tokenyard.engines.rings import RowLayout
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.memory.symmetric import Region
from tokenyard.planner.prediction import sizes_of
from tokenyard.planner.workload import DTYPES, Workload


def workspace_of(work: Workload, engine: str) -> tuple[Any, int]:
    """What the engine makes, as ``engines/select.py`` does, and the bytes of symmetric memory that
    it asks for.
    """
    asked: list[int] = []

    def allocate(num_bytes: int) -> Region:
        asked.append(num_bytes)
        return Region(torch.empty(0, dtype=torch.uint8), torch.ones(work.ranks, dtype=torch.int64))

    def host_words(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64)

    memory: Any = SimpleNamespace(
        world_size=work.ranks,
        ranks_per_node=work.gpus_per_node,
        device=torch.device("cpu"),
        allocate=allocate,
        host_words=host_words,
        tensors=nullcontext,
    )
    config = Config(
        num_experts=work.experts,
        hidden=work.hidden,
        num_topk=work.topk,
        max_tokens_per_rank=work.tokens,
        rank=0,
        world_size=work.ranks,
        timeout=1.0,
        topology=work.grid,
    )
    all_sms = work.sms == work.most_sms
    nodes = engine == "twolevel"
    chosen = choose_peer(config, work.sms, work.buffer_bytes, all_sms=all_sms, nodes=nodes)
    workspace = PeerWorkspace(chosen.config, memory, chosen.tuning, work.buffer_bytes)
    asked += [chosen.receive_bytes, chosen.heap_bytes]
    return workspace, sum(asked)


def layer(nodes: int, gpus: int, **sizes: Any) -> Workload:
    known: dict[str, Any] = {"hidden": 7168, "experts": max(256, nodes * gpus), "topk": 8, **sizes}
    return Workload(nodes=nodes, gpus_per_node=gpus, tokens=64, **known)


@pytest.mark.parametrize(
    ("nodes", "gpus"),
    [(1, 1), (1, 2), (1, 3), (1, 8), (2, 1), (2, 2), (3, 2), (4, 8), (5, 7), (16, 8), (128, 8)],
)
def test_planned_memory_is_what_engines_allocate(nodes: int, gpus: int) -> None:
    """To the byte, with headers and node headers that grow with ranks and experts."""
    engine = "nvlink" if nodes == 1 else "twolevel"
    for work in (
        layer(nodes, gpus),
        layer(nodes, gpus, experts=1400),
        layer(nodes, gpus, sms=24, hidden=1024),
    ):
        assert sizes_of(engine, work).symmetric_bytes == workspace_of(work, engine)[1]


GRIDS = st.sampled_from(
    [(1, 1), (1, 2), (1, 8), (2, 1), (5, 1), (2, 2), (3, 2), (2, 8), (4, 8), (16, 8)]
)
BUFFERS = st.one_of(st.integers(1, 1 << 27), st.sampled_from([1, 1000, 10**5, 10**6, 10**7]))
HIDDEN = st.one_of(st.integers(1, 300), st.sampled_from([1024, 7168, 16384]))
MORE = st.integers(0, 1 << 30)
"""Bytes beyond what was suggested as the least."""


def suggested(refusal: ValueError) -> int:
    found = re.search(r"at least (\d+)$", str(refusal))
    assert found is not None, refusal
    return int(found[1])


@given(
    st.one_of(GRIDS, st.sampled_from([(128, 8), (1000, 8), (100_000, 8)])),
    BUFFERS,
    HIDDEN,
    st.integers(1, 128),
    st.sampled_from([16, 24, 132]),
    st.sampled_from(DTYPES),
    MORE,
)
@settings(max_examples=1500, deadline=None, derandomize=True)
def test_what_a_plan_suggests_is_enough(
    grid: tuple[int, int],
    buffer_bytes: int,
    hidden: int,
    topk: int,
    sms: int,
    dtype: Any,
    more: int,
) -> None:
    """Or any larger size, for rows of either dtype."""
    work = layer(*grid, hidden=hidden, topk=topk, sms=sms, buffer_bytes=buffer_bytes)
    engine = "nvlink" if work.nodes == 1 else "twolevel"
    try:
        sizes_of(engine, replace(work, dtype=dtype))
    except ValueError as refusal:
        for size in (suggested(refusal), suggested(refusal) + more):
            for other in DTYPES:
                sizes_of(engine, replace(work, dtype=other, buffer_bytes=size))


@given(
    GRIDS,
    BUFFERS,
    HIDDEN,
    st.integers(0, 512),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([16, 24, 132]),
    st.booleans(),
    MORE,
)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_what_engines_suggest_is_enough(
    grid: tuple[int, int],
    buffer_bytes: int,
    hidden: int,
    meta: int,
    item: int,
    sms: int,
    near_first: bool,
    more: int,
) -> None:
    """Or any larger size, for rings inside nodes and between them, whichever of them refused."""
    work = layer(*grid, hidden=hidden, sms=sms, buffer_bytes=buffer_bytes)
    row_layout = RowLayout(hidden, hidden, 8 * item, 0, meta // 4 * 4)
    for engine in ("nvlink", "twolevel")[work.nodes > 1 :]:

        def use(size: int, engine: str = engine) -> None:
            workspace, _ = workspace_of(replace(work, buffer_bytes=size), engine)
            asks = (
                [workspace.slots] if engine == "nvlink" else [workspace.slots, workspace.net_ring]
            )
            for ask in asks if near_first else asks[::-1]:
                ask(row_layout)

        try:
            use(buffer_bytes)
        except ValueError as refusal:
            use(suggested(refusal))
            use(suggested(refusal) + more)
