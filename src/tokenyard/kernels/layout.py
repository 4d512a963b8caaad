# pyright: basic
"""Where the tokens of one rank go, in one launch: counts per rank, node and expert, and a table of tokens and ranks.

Example: 2 ranks, 4 experts, picks ``[[0, 3], [1, 1], [2, -1]]``: ``in_ranks = [[1, 1], [1, 0], [0, 1]]``, 2 tokens per rank, and
``[1, 2, 1, 1]`` picks per expert: one that a token names twice counts twice, its rank once.

Every program counts its tiles of tokens in registers and adds its counts to tables of zeros, in any order: integers come to the same.
Nobody reads them before the kernel is over.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import owner_of


@triton.jit(repr=shown_as("layout"))
def layout_kernel(
    topk_idx, row_stride, pick_stride, in_ranks, per_expert, per_rank, per_node, T,
    E: tl.constexpr, R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RP: tl.constexpr, EP: tl.constexpr, P: tl.constexpr,
    TB: tl.constexpr, WIDE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """``topk_idx [T, K]`` of any strides (in elements; -1 and ids out of range are nobody's), int64 or (not ``WIDE``) int32.

    Fills ``in_ranks`` (bool ``[T, R]``) and adds to int32 ``per_expert [E]``, ``per_rank [R]`` and, if ``NODES``, ``per_node``, nodes
    of P ranks.
    """
    k, r = tl.arange(0, KP), tl.arange(0, RP)
    ids_at = topk_idx.to(tl.pointer_type(tl.int64 if WIDE else tl.int32))
    ranks, experts = tl.zeros([RP], tl.int32), tl.zeros([EP], tl.int32)
    nodes = tl.zeros([RP // P if NODES else 1], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(T, TB), tl.num_programs(0)):
        t = (tile + 0).to(tl.int64) * TB + tl.arange(0, TB)
        picked = (t < T)[:, None] & (k < K)[None, :]
        ids = tl.load(ids_at + t[:, None] * row_stride + k[None, :] * pick_stride, mask=picked, other=-1)
        ids = tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)
        goes = tl.max((owner_of(ids, E, R)[:, :, None] == r[None, None, :]).to(tl.int32), axis=1)
        to = in_ranks.to(tl.pointer_type(tl.int8)) + t[:, None] * R + r[None, :]
        tl.store(to, goes.to(tl.int8), mask=(t < T)[:, None] & (r < R)[None, :])
        ranks += tl.sum(goes, axis=0)
        if NODES:
            nodes += tl.sum(tl.max(tl.reshape(goes, [TB, RP // P, P]), axis=2), axis=0)
        flat = tl.reshape(ids, [TB * KP])
        experts += tl.histogram(flat, EP, mask=flat >= 0)
    e = tl.arange(0, EP)
    tl.atomic_add(per_expert.to(tl.pointer_type(tl.int32)) + e, experts, mask=(e < E) & (experts > 0), sem="relaxed")
    tl.atomic_add(per_rank.to(tl.pointer_type(tl.int32)) + r, ranks, mask=(r < R) & (ranks > 0), sem="relaxed")
    if NODES:
        n = tl.arange(0, RP // P)
        tl.atomic_add(per_node.to(tl.pointer_type(tl.int32)) + n, nodes, mask=nodes > 0, sem="relaxed")
