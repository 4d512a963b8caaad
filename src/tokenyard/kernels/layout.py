# pyright: basic
"""Where the tokens of one rank go, in one launch: counts per rank, node and expert, and a table of
tokens and ranks.

Example: 2 ranks, 4 experts, picks ``[[0, 3], [1, 1], [2, -1]]``: ``in_ranks = [[1, 1], [1, 0], [0,
1]]``, 2 tokens per rank, and ``[1, 2, 1, 1]`` picks per expert: one that a token names twice counts
twice, its rank once.

Every program counts its tiles of tokens in registers and adds its counts to tables of zeros, in any
order: integers come to the same. Nobody reads them before the kernel is over.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import ints, owner_of


class LayoutConfig(NamedTuple):
    """What is known of a layout when its kernel is compiled. Each ``..._bins`` is a power of two,
    not less than what it counts."""

    num_experts: int
    expert_bins: int
    ranks: int
    rank_bins: int
    ranks_per_node: int
    topk: int
    topk_bins: int
    tokens: int  # of a tile
    wide: bool  # ids are int64, else int32
    several_nodes: bool


@triton.jit(repr=shown_as("layout"))
def layout_kernel(
    topk_idx, row_stride, pick_stride, in_ranks, per_expert, per_rank, per_node, num_tokens,
    k: tl.constexpr,
):  # fmt: skip
    """``topk_idx [T, K]`` of any strides (in elements; -1 and ids out of range are nobody's).
    ``k``: a :class:`LayoutConfig`. Fills ``in_ranks`` (bool ``[T, R]``) and adds to int32
    ``per_expert [E]``, ``per_rank [R]`` and, if there are several nodes, ``per_node``."""
    E: tl.constexpr = k.num_experts
    R: tl.constexpr = k.ranks
    P: tl.constexpr = k.ranks_per_node
    NODES: tl.constexpr = k.rank_bins // P if k.several_nodes else 1
    pick, r = tl.arange(0, k.topk_bins), tl.arange(0, k.rank_bins)
    ids_at = topk_idx.to(tl.pointer_type(tl.int64 if k.wide else tl.int32))
    ranks, experts = tl.zeros([k.rank_bins], tl.int32), tl.zeros([k.expert_bins], tl.int32)
    nodes = tl.zeros([NODES], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, k.tokens), tl.num_programs(0)):
        t = (tile + 0).to(tl.int64) * k.tokens + tl.arange(0, k.tokens)
        picked = (t < num_tokens)[:, None] & (pick < k.topk)[None, :]
        at = ids_at + t[:, None] * row_stride + pick[None, :] * pick_stride
        ids = tl.load(at, mask=picked, other=-1)
        ids = tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)
        goes = tl.max((owner_of(ids, E, R)[:, :, None] == r[None, None, :]).to(tl.int32), axis=1)
        to = in_ranks.to(tl.pointer_type(tl.int8)) + t[:, None] * R + r[None, :]
        tl.store(to, goes.to(tl.int8), mask=(t < num_tokens)[:, None] & (r < R)[None, :])
        ranks += tl.sum(goes, axis=0)
        if k.several_nodes:
            nodes += tl.sum(tl.max(tl.reshape(goes, [k.tokens, NODES, P]), axis=2), axis=0)
        flat = tl.reshape(ids, [k.tokens * k.topk_bins])
        experts += tl.histogram(flat, k.expert_bins, mask=flat >= 0)
    e = tl.arange(0, k.expert_bins)
    tl.atomic_add(ints(per_expert) + e, experts, mask=(e < E) & (experts > 0), sem="relaxed")
    tl.atomic_add(ints(per_rank) + r, ranks, mask=(r < R) & (ranks > 0), sem="relaxed")
    if k.several_nodes:
        n = tl.arange(0, NODES)
        tl.atomic_add(ints(per_node) + n, nodes, mask=nodes > 0, sem="relaxed")
