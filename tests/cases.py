"""One case of the shared test body: what every rank brings, what the oracle says, and the
comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tokenyard as ty
from tokenyard import reference
from tokenyard.config import MOST_MATRIX_RANKS
from tokenyard.routing import expert_bounds
from tokenyard.testing import Ranks, assert_same_bits, payload, routing

SMALL_RINGS = 8 << 20
"""Bytes of rings that tests give the nvlink engine: enough for a few rows each, so that rings go
round.
"""
PLAIN = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Case:
    """Sizes, routing and options of one dispatch and its combine."""

    world_size: int
    routing: str = "uniform"
    num_tokens: int = 13
    num_topk: int = 3
    num_experts: int = 8
    hidden: int = 40
    dtype: torch.dtype = torch.bfloat16
    layout: ty.Layout = ty.Layout.FLAT
    exact: bool = True
    expert_alignment: int = 1
    capacity: int | None = None
    weighted: bool = True
    """Whether weights ride along."""
    quantize: ty.Quantize | None = None
    seed: int = 0
    topology: ClassVar[tuple[int, int] | None] = None  # of every case, see on_grid

    def tokens_of(self, rank: int) -> int:
        """Ranks differ in size, so that a wrong stride shows."""
        return max(self.num_tokens - rank, 0)

    @cached_property
    def picks(self) -> list[tuple[Tensor, Tensor]]:
        size, top, experts = self.world_size, self.num_topk, self.num_experts
        return [
            routing(self.routing, r, size, self.tokens_of(r), top, experts, self.seed)
            for r in range(size)
        ]

    @cached_property
    def x(self) -> list[Tensor | ty.Quantized]:
        rows = [
            payload(r, len(self.picks[r][0]), self.hidden, self.dtype, self.seed)
            for r in range(self.world_size)
        ]
        if self.dtype in PLAIN:
            return list(rows)
        random = torch.Generator().manual_seed(self.seed)
        return [ty.Quantized(row, torch.randn(row.shape[0], 3, generator=random)) for row in rows]

    @cached_property
    def expected(self) -> list[reference.ReferenceRows]:
        return reference.dispatch(
            self.x,
            [idx for idx, _ in self.picks],
            [weights.float() for _, weights in self.picks] if self.weighted else None,
            num_experts=self.num_experts,
            layout=self.layout,
            expert_alignment=self.expert_alignment,
            max_tokens_per_rank=self.num_tokens,
            capacity=self.capacity,
            quantize=self.quantize,
        )

    @cached_property
    def expert_rows(self) -> list[Tensor]:
        """What the experts of each rank return for the rows that the oracle says they get."""
        dtype = self.dtype if self.dtype in PLAIN else torch.bfloat16
        out = []
        for rank, rows in enumerate(self.expected):
            generator = torch.Generator().manual_seed(1000 * self.seed + rank)
            out.append(torch.randn(*rows.source.shape, self.hidden, generator=generator).to(dtype))
        return out

    def combined(
        self, rank: int, rows: list[Tensor] | None = None, **options: object
    ) -> reference.ReferenceCombined:
        """What the oracle's combine gives ``rank`` for ``rows`` (default: those of the experts), by
        the tree of the topology, unless ``options`` have another.
        """
        rows = self.expert_rows if rows is None else rows
        options = {"ranks_per_node": self.ranks_per_node, **options}
        [mine] = reference.combine(rows, self.expected, owners=[rank], **options)
        return mine

    @property
    def ranks_per_node(self) -> int | None:
        return None if self.topology is None else self.topology[1]

    @property
    def options(self) -> dict[str, object]:
        return {
            "layout": self.layout,
            "exact": self.exact,
            "expert_alignment": self.expert_alignment,
            "capacity": self.capacity,
            "quantize": self.quantize,
        }

    def make(self, ranks: Ranks, **options: object) -> ty.ExpertParallel:
        skip_without_gpus(ranks)
        return ty.ExpertParallel(
            ranks.group,
            num_experts=self.num_experts,
            hidden=self.hidden,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.num_tokens,
            engine=ranks.engine,
            device=ranks.device,
            topology=self.topology,
            **{"buffer_bytes": SMALL_RINGS if ranks.engine == "nvlink" else None, **options},
        )


@contextmanager
def on_grid(num_nodes: int, ranks_per_node: int) -> Iterator[None]:
    """Objects of cases have this topology meanwhile, and what the oracle combines follows
    its tree.
    """
    with mock.patch.object(Case, "topology", (num_nodes, ranks_per_node)):
        yield


def skip_without_gpus(ranks: Ranks) -> None:
    """Kernels need a GPU per rank; ranks that share one are threads
    (``TOKENYARD_TEST_DEVICE=virtual``).
    """
    shared = ranks.device.type == "cuda" and isinstance(ranks.group, dist.ProcessGroup)
    if ranks.engine != "collective" and shared and ranks.world_size > torch.cuda.device_count():
        pytest.skip(
            f"{ranks.world_size} ranks, {torch.cuda.device_count()} GPUs: virtual ranks cover this"
        )


def to(value: Tensor | ty.Quantized, device: torch.device) -> Tensor | ty.Quantized:
    if isinstance(value, ty.Quantized):
        return ty.Quantized(value.data.to(device), value.scales.to(device))
    return value.to(device)


def dispatch(ranks: Ranks, ep: ty.ExpertParallel, case: Case, **more: object) -> ty.Received:
    idx, weights = case.picks[ranks.rank]
    options = {**case.options, **more}
    return ep.dispatch(
        to(case.x[ranks.rank], ranks.device),
        idx.to(ranks.device),
        weights.to(ranks.device) if case.weighted else None,
        **options,
    )


def check_received(recv: ty.Received, case: Case, rank: int) -> None:
    """Every field of ``recv`` against the oracle, bit for bit; of static shapes the part that is
    stated.
    """
    want = case.expected[rank]
    valid = want.source >= 0
    num = want.source.shape[0]
    check = _Check(rank)
    if case.layout is ty.Layout.EXPERT_PADDED:
        for name in ("x", "scales", "source", "row_weights"):
            got, right = getattr(recv, name), getattr(want, name)
            assert (got is None) == (right is None), name
            if right is not None:
                assert got.shape == right.shape
                check(f"{name} (valid rows)", got.cpu()[valid], right[valid], want.source[valid])
        check("source_ranges", recv.source_ranges, want.source_ranges)
    else:
        for name in ("x", "scales", "source", "topk_idx", "topk_weights", "row_weights"):
            got, right = getattr(recv, name), getattr(want, name)
            if right is None:
                assert got is None, name
            else:
                ids = name == "topk_idx"
                assert not ids or got.dtype == recv.handle.index_dtype
                check(name, got[:num].long() if ids else got[:num], right, want.source)
        check_tail(recv, case, num)
    check("tokens_per_expert", recv.tokens_per_expert, want.tokens_per_expert)
    if case.layout is ty.Layout.EXPERT_MAJOR:
        check("expert_offsets", recv.expert_offsets, want.expert_offsets)
    assert (recv.overflow is None) == (case.capacity is None)
    assert recv.overflow is None or recv.overflow.tolist() == [want.overflow]
    if case.exact:
        assert recv.tokens_per_expert_list == want.tokens_per_expert.tolist()
    check_matrix(recv, case)


def check_matrix(recv: ty.Received, case: Case) -> None:
    """Rows from each rank to each, where the host knows them."""
    matrix = recv.handle.rows_between()
    if not case.exact or case.world_size > MOST_MATRIX_RANKS:
        assert matrix is None
        return
    arrived = [each.source[each.source >= 0].unique() >> 32 for each in case.expected]
    columns = [torch.bincount(sources, minlength=case.world_size) for sources in arrived]
    assert torch.equal(matrix, torch.stack(columns, dim=1))


def check_tail(recv: ty.Received, case: Case, num: int) -> None:
    """Static shapes: how many rows there are, and what rows past the last say of themselves."""
    if case.exact:
        assert recv.x.shape[0] == num
        return
    local = recv.tokens_per_expert.numel()
    room = case.world_size * case.num_tokens
    if case.layout is ty.Layout.EXPERT_MAJOR:
        room = room * min(case.num_topk, local) + local * (case.expert_alignment - 1)
        room = room if case.capacity is None else case.capacity
    else:
        assert (recv.topk_idx[num:] == -1).all()
    weights = recv.row_weights if recv.topk_weights is None else recv.topk_weights
    assert weights is None or not weights[num:].any()
    assert recv.x.shape[0] == room
    assert (recv.source[num:] == -1).all()


class _Check:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, what: str, got: Tensor, want: Tensor, source: Tensor | None = None) -> None:
        assert_same_bits(got.cpu(), want, what=what, source=source, rank=self.rank)


def rows_to_combine(
    recv: ty.Received, case: Case, rank: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The expert rows of the oracle in the shape of ``recv.x``; NaN wherever no row is defined."""
    rows = case.expert_rows[rank]
    rows = rows if dtype is None else rows.to(dtype)
    want = case.expected[rank]
    out = torch.full(recv.x.shape, float("nan"), dtype=rows.dtype)
    if case.layout is ty.Layout.EXPERT_PADDED:
        valid = want.source >= 0
        out[valid] = rows[valid]
    else:
        num = want.source.shape[0]
        out[:num] = torch.where(want.source.unsqueeze(1) >= 0, rows, float("nan"))
    return out.to(recv.x.device)


def check_combined(
    got: Tensor, case: Case, rank: int, want: Tensor, what: str = "combined"
) -> None:
    idx, _ = case.picks[rank]
    source = (rank << 32) + torch.arange(len(idx))
    assert_same_bits(got.cpu(), want, what=what, source=source, experts=idx, rank=rank)


def bounds_of(case: Case, rank: int) -> tuple[int, int]:
    bounds = expert_bounds(case.num_experts, case.world_size)
    return bounds[rank], bounds[rank + 1]
