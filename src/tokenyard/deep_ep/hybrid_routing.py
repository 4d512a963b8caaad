"""HybridEP's routing: maps of tokens and experts, where native calls take picks; its handles, and
the config that these hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenyard.deep_ep.handles import LazyTuple
from tokenyard.types import Layout

USUAL_SMS = 32
"""What DeepEP's kernels take of one node's multiprocessors."""


@dataclass
class BufferConfig:
    """Sizes. All but ``max_num_of_tokens_per_rank`` (static shapes) and the experts are echoed."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    use_fp8: bool = False
    num_of_blocks_dispatch_api: int = USUAL_SMS
    num_of_blocks_combine_api: int = USUAL_SMS
    num_of_blocks_preprocessing_api: int = USUAL_SMS
    pad_multiple: int = 0


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """From ``topk_idx [T, K]`` (int64 or int32; -1, and what is no expert: none) and weights ``[T,
    K]`` or None.

    Returns:
        Which experts each token goes to (bool ``[T, E]``), and the weights there (float32
            ``[T, E]``, 0 elsewhere) or None. Both on the device of ``topk_idx``.
    """
    shape = num_of_tokens, num_of_experts
    routing_map = spread(topk_idx, torch.ones_like(topk_idx, dtype=torch.bool), shape)
    if topk_weights is None:
        return routing_map, None
    return routing_map, spread(topk_idx, topk_weights.float(), shape)


def spread(topk_idx: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """``values [T, K]`` at their experts: ``[T, E]``, 0 elsewhere."""
    tokens, experts = shape
    table = torch.zeros(tokens, experts + 1, dtype=values.dtype, device=values.device)
    outside = (topk_idx < 0) | (topk_idx >= experts)  # a dispatch refuses these by name
    at = torch.where(outside, experts, topk_idx).long()
    return table.scatter_(1, at, values)[:, :experts].contiguous()


def picks_of(routing_map: Tensor, num_topk: int) -> Tensor:
    """Experts of each token, ascending, then -1: int64 ``[T, K]``.

    >>> picks_of(torch.tensor([[True, False, True], [False, False, True]]), 2).tolist()
    [[0, 2], [2, -1]]
    """
    tokens, experts = routing_map.shape
    place = torch.where(routing_map, routing_map.cumsum(1) - 1, num_topk)
    ids = torch.arange(experts, device=routing_map.device).expand(tokens, experts)
    picks = torch.full((tokens, num_topk + 1), -1, device=routing_map.device)
    return picks.scatter_(1, place, ids)[:, :num_topk].contiguous()


def weights_of(probs: Tensor, topk_idx: Tensor) -> Tensor:
    """Of each pick, from ``probs [T, E]``: float32 ``[T, K]``, 0 where there is none."""
    known = probs.float().gather(1, topk_idx.clamp(0, probs.shape[1] - 1).long())
    return torch.where(topk_idx < 0, 0.0, known)


class HybridHandle(LazyTuple):
    """Handle of ``HybridEPBuffer.dispatch``: 7 items.

    ``(sparse_to_dense_map, rdma_to_attn_map, attn_to_rdma_map, num_dispatched_tokens_tensor int32
    [1], local_expert_routing_map bool [N, L], num_of_tokens_per_rank, config)``. The first three
    are the kernels' own: None here. N tokens came to this rank.

    Attributes:
        topk_idx: picks ``[T, K]`` of the tokens sent.
        config: of the buffer at the call.
    """

    source = "dispatch() of HybridEPBuffer"
    topk_idx: Tensor
    config: BufferConfig

    @property
    def logical_num_tokens(self) -> int:
        return self.native.num_tokens

    @property
    def num_experts(self) -> int:
        return self.ep.config.num_experts

    def kernels_own(self) -> None:
        """Items that only DeepEP's kernels read."""

    def num_dispatched_tokens_tensor(self) -> Tensor:
        return self._local_map().any(1).sum().view(1).to(torch.int32)

    def local_expert_routing_map(self) -> Tensor:
        """Rows without an expert, of static shapes, come last."""
        table = self._local_map()
        order = (~table.any(1)).to(torch.int8).argsort(stable=True)
        return table[order]

    def _local_map(self) -> Tensor:
        """Local experts of each row that arrived: bool ``[Nb, L]``."""
        arrived, plan, local = self.native.arrived, self.native.plan, self.ep.config
        if self.native.layout is Layout.FLAT:
            ids = arrived.topk_idx
        else:
            ends = arrived.expert_offsets[1:].long()
            ids = torch.searchsorted(ends, plan.slots.contiguous(), right=True)
            ids = torch.where(plan.slots < 0, -1, ids)
        return indices_to_map(ids, None, ids.shape[0], local.num_local_experts)[0]

    makers = (
        kernels_own,
        kernels_own,
        kernels_own,
        num_dispatched_tokens_tensor,
        local_expert_routing_map,
        lambda self: self.native.num_tokens,
        lambda self: self.config,
    )


class PermutedHandle(HybridHandle):
    """Handle of ``HybridEPBuffer.dispatch_with_permute``: 11 items.

    ``(sparse_to_dense_map, rdma_to_attn_map, attn_to_rdma_map, num_dispatched_tokens_tensor,
    local_expert_routing_map, dense_chunk_layout, dense_to_expert_map, tokens_per_expert int32 [L],
    num_of_tokens_per_rank, config, overflow_flag int32 [1])``; see :class:`HybridHandle`. The last
    is 1 if rows were dropped for want of ``num_permuted_tokens``.
    """

    source = "dispatch_with_permute() of HybridEPBuffer"

    def tokens_per_expert(self) -> Tensor:
        """Without padding; dropped rows count."""
        return self.native.arrived.tokens_per_expert.clone()

    def overflow_flag(self) -> Tensor:
        arrived = self.native.arrived
        if self.native.spec.capacity is None:
            return torch.zeros(1, dtype=torch.int32, device=arrived.source.device)
        return (arrived.overflow > 0).to(torch.int32)

    makers = (
        *HybridHandle.makers[:5],
        HybridHandle.kernels_own,
        HybridHandle.kernels_own,
        tokens_per_expert,
        *HybridHandle.makers[5:],
        overflow_flag,
    )


def _ids_in_node(handle: HybridHandle) -> Tensor:
    """Experts of the rows that came, as counted in this rank's node; -1 for none: ``[N, K]``."""
    ids, config = handle.native.arrived.topk_idx, handle.config
    place = handle.ep.rank % config.num_of_ranks_per_node
    return torch.where(ids < 0, -1, ids + place * config.num_of_experts_per_rank)


def to_node(handle: HybridHandle, values: Tensor) -> Tensor:
    """``values [N, K]`` of rows at this node's experts: ``[N, L * ranks]``, 0 on others' ranks."""
    config = handle.config
    width = config.num_of_experts_per_rank * config.num_of_ranks_per_node
    return spread(_ids_in_node(handle), values, (values.shape[0], width))


def from_node(handle: HybridHandle, table: Tensor) -> Tensor:
    """The reverse of :func:`to_node`: float32 ``[N, K]``."""
    return weights_of(table, _ids_in_node(handle))
