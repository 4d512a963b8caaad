"""DeepEP's ``HybridEPBuffer`` (branch ``hybrid-ep``) on native objects, as Megatron-LM, torchtitan
and NeMo Automodel call it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction

from tokenyard.arguments import MOST_EXPERTS
from tokenyard.deep_ep import hybrid_calls as calls
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.hybrid_config import BufferConfig, changed, check_old, ranks_per_node, sms
from tokenyard.deep_ep.hybrid_routing import HybridHandle, PermutedHandle, indices_to_map
from tokenyard.deep_ep.inputs import flag, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.runtime import Runtime
from tokenyard.deep_ep.streams import Streams
from tokenyard.header import CACHED, COMBINE

__all__ = ["HybridEPBuffer", "indices_to_map"]

OTHER = {"num_dispatched_tokens": "", "use_host_meta": "", "num_of_tokens_per_rank": ""}
"""Arguments of other versions of the branch. The second is the reverse of ``non_blocking``; the
last is what ranks with fewer tokens are padded to, which nobody is here."""


class HybridEPBuffer:
    """Dispatch with permutation: each expert gets its rows in one block, ready for a grouped GEMM.

    Making one talks to nobody and takes no memory. Ranks may have different numbers of tokens, and
    none. Results carry no graph, as in DeepEP.

    Args:
        group: any ``torch.distributed`` group, of one rank too.
        hidden_dim: echoed: calls take rows of any width.
        max_num_of_tokens_per_rank: bound of calls with ``num_permuted_tokens``, the same on all
            ranks; other calls take any number.
        num_local_experts: on each rank.
        use_fp8: echoed: rows say themselves what they are.
        num_sms_dispatch_api: echoed, as are all numbers of multiprocessors and blocks.
        old: of other versions of the branch: change nothing.

    Attributes:
        configurer: its ``buffer_config`` has the numbers given; ``config`` is the same.
        runtime: says that there is one, as of ``Buffer``.

    Raises:
        ValueError: a bad argument. Calls raise it before anything moves, and then other ranks that
            are in the call raise ``PeerError``.
        TypeError: an argument that no version has.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        **old: Any,
    ) -> None:
        check_old(old)
        inputs.check_group(group)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        sms("num_blocks_permute", num_blocks_permute)
        sms("num_blocks_unpermute", num_blocks_unpermute)
        per_node, most = ranks_per_node(old, self.group_size), max_num_of_tokens_per_rank
        config = BufferConfig(
            whole("hidden_dim", hidden_dim, 1),
            whole("max_num_of_tokens_per_rank", most),
            whole("num_local_experts", num_local_experts, 1, MOST_EXPERTS // self.group_size),
            per_node,
            self.group_size // per_node,
            flag("use_fp8", use_fp8),
            sms("num_sms_dispatch_api", num_sms_dispatch_api),
            sms("num_sms_combine_api", num_sms_combine_api),
            sms("num_sms_preprocessing_api", num_sms_preprocessing_api),
        )
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = per_node
        self.local_rank, self.node_rank = self.rank % per_node, self.rank // per_node
        self.num_of_nodes, self.use_fp8 = config.num_of_nodes, config.use_fp8
        self.config, self.configurer = config, SimpleNamespace(buffer_config=config)
        self._streams = Streams()
        self._natives = Natives(group, self.rank, self.group_size, 0)
        self.runtime = Runtime(self.rank, self.group_size, self._streams)

    def empty_jit_cache(self) -> None:
        """Nothing: there is no such cache."""

    def set_num_tokens_per_rank(self, rows: int) -> None:
        """Checked only: each call knows its tokens."""
        whole("rows", rows, 1, self.config.max_num_of_tokens_per_rank)

    def update_template_config(self, **given: Any) -> BufferConfig:
        """The config with what is ``given``. The bound ``max_num_of_tokens_per_rank`` (or
        ``num_of_tokens_per_rank``) only grows, and stays so; names of kernels' options are ignored.
        """
        made = changed(self.config, given)
        self.config.max_num_of_tokens_per_rank = made.max_num_of_tokens_per_rank
        return made

    # With permutation

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | Tensor | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        **old: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, PermutedHandle]:
        """Send each token to its experts: one row for each, grouped by local expert. Collective.

        Args:
            hidden: ``[T, H]`` bf16, fp16 or fp32; or FP8 (uint8, as DeepEP has it, too).
            topk_idx, topk_weights: ``[T, K]`` global ids (-1 = none) and floats, with
                ``num_of_experts``; or
            routing_map, probs: bool and float ``[T, E]``. The most picks of a token are agreed on
                by one more small exchange, unless ``num_permuted_tokens`` is given.
            scaling_factor: ``[T, S]`` float32 or int32 scales of FP8 rows; else ignored.
            num_permuted_tokens: static shapes, so many rows: later ones are dropped, and
                ``handle[-1]`` says so. With ``handle``: its number of rows.
            pad_multiple: each expert's block ends in zeros up to a multiple of this.
            handle: of an earlier dispatch, or its items: the same routing. Weights then may be new.
            non_blocking: the host does not wait; needs ``num_permuted_tokens``.
            use_fp8, fuse_permute_dispatch: change nothing.

        Returns:
            Rows ``[N, H]`` by local expert, source rank, then token. Their weights float32
                ``[N]``, 0 on padding, or None. Their scales or None. Rows of each block int32
                ``[L]``, with padding, on the CPU unless ``non_blocking``. The handle.
        """
        routing = calls.Routing(
            routing_map, probs, topk_idx, topk_weights, num_of_experts, num_of_experts_per_rank
        )
        try:
            non_blocking = _waiting(old, non_blocking)
            flag("use_fp8", use_fp8)
            flag("fuse_permute_dispatch", fuse_permute_dispatch)
            shape = calls.check_shape(True, pad_multiple, num_permuted_tokens, non_blocking)
        except inputs.REFUSED as error:
            raise self._refused(error, hidden, None, routing, handle) from None
        given = hidden, scaling_factor, shape, routing
        return self._dispatch(*given, handle, not non_blocking)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        non_blocking: bool = False,
        **old: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token, back at its owner, without weights. Collective.

        Args:
            hidden: ``[N, H]`` bf16, fp16 or fp32, in the order of the dispatch; padding is ignored.
            probs: ``[N]`` float, brought back beside (as gradients of weights are).
            handle: of that dispatch; good for any number of calls, in any order.
            pad_multiple: that of the dispatch, or None.
            fuse_unpermute_combine, non_blocking: change nothing.

        Returns:
            ``[T, H]`` in the dtype of ``hidden``; float32 ``[T, E]``, 0 where a token has no row,
                or None.
        """
        try:
            _waiting(old, non_blocking)
            flag("non_blocking", non_blocking)
            flag("fuse_unpermute_combine", fuse_unpermute_combine)
        except inputs.REFUSED as error:
            raise self._natives.refused_with(error, handle, HybridHandle, COMBINE) from None
        return self._combine(hidden, probs, handle, pad_multiple, PermutedHandle)

    # Without

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, HybridHandle]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            num_dispatched_tokens: (and its tensor) ignored: the rows that come are counted.
            num_of_tokens_per_rank: ignored: nobody is padded.
            others: as in :meth:`dispatch_with_permute`.

        Returns:
            Rows ``[N, H]`` by source rank, then token. Their weights float32 ``[N, L * ranks of a
                node]``, 0 but in this rank's columns, or None. Their scales or None. The handle.
        """
        routing = calls.Routing(routing_map, probs, topk_idx, topk_weights, num_of_experts, None)
        given = hidden, scaling_factor, calls.Shape(False), routing
        return self._dispatch(*given, handle, True)

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`combine_with_unpermute`, of ``probs`` and rows as of :meth:`dispatch`."""
        return self._combine(hidden, probs, handle, None, HybridHandle)

    # Both

    def _dispatch(
        self,
        hidden: Any,
        scales: Any,
        shape: calls.Shape,
        routing: calls.Routing,
        handle: Any,
        waits: bool,
    ) -> Any:
        natives, kind = self._natives, PermutedHandle if shape.permuted else HybridHandle
        known: Any = None
        try:
            with DisableTorchFunction():
                if handle is None:
                    given = calls.check_dispatch(
                        natives, hidden, scales, shape, routing, self.config
                    )
                else:
                    known = _checked(handle, kind, self.group)
                    given = calls.check_again(hidden, scales, shape, routing, known)
        except inputs.REFUSED as error:
            raise self._refused(error, hidden, shape, routing, handle) from None
        run, like = self._streams.run, given.data
        if known is None:
            arguments = natives, given, self.config, waits
            return run(calls.dispatch, arguments, like, None, False)[0]
        natives.last_normal = known.ep
        return run(calls.redispatch, (given, known, waits), like, None, False, known)[0]

    def _combine(
        self, hidden: Any, probs: Any, handle: Any, pad_multiple: Any, kind: type[HybridHandle]
    ) -> tuple[Tensor, Tensor | None]:
        natives = self._natives
        try:
            with DisableTorchFunction():
                known = _checked(handle, kind, self.group)
                rows, weights = calls.check_combine(hidden, probs, pad_multiple, known)
        except inputs.REFUSED as error:
            raise natives.refused_with(error, handle, HybridHandle, COMBINE) from None
        natives.last_normal = known.ep
        run, arguments = self._streams.run, (rows, weights, known)
        return run(calls.combine, arguments, rows, None, False, known)[0]

    def _refused(
        self,
        error: Exception,
        hidden: Any,
        shape: calls.Shape | None,
        routing: calls.Routing,
        handle: Any,
    ) -> Exception:
        if handle is not None:
            return self._natives.refused_with(error, handle, HybridHandle, CACHED)
        return calls.refused(self._natives, error, hidden, shape, routing, self.config)


def _checked(handle: Any, kind: type[HybridHandle], group: Any) -> Any:
    """A handle of the very ``kind``: one kind is a special case of the other."""
    known = inputs.check_handle(handle, kind, group)
    if type(known) is not kind:
        raise ValueError(
            f"handle is of {known.source}, but this call takes that of {kind.source}: use "
            f"combine_with_unpermute(), or dispatch()"
        )
    return known


def _waiting(old: dict[str, Any], non_blocking: Any) -> Any:
    """``non_blocking``, or what an ``old`` argument says instead."""
    inputs.check_fork("HybridEPBuffer's call", old, OTHER)
    told = old.get("use_host_meta")
    return non_blocking if told is None else not flag("use_host_meta", told)
