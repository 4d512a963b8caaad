"""DeepEP's ``HybridEPBuffer`` (branch ``hybrid-ep``) on native objects."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction

from tokenyard.arguments import LARGEST, MOST_EXPERTS
from tokenyard.deep_ep import hybrid_calls as calls
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.handles import RANKS_PER_NODE
from tokenyard.deep_ep.hybrid_routing import (
    USUAL_SMS,
    BufferConfig,
    HybridHandle,
    PermutedHandle,
    indices_to_map,
)
from tokenyard.deep_ep.inputs import Asked, flag, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.runtime import MOST_SMS, Runtime
from tokenyard.deep_ep.streams import Streams
from tokenyard.header import CACHED, COMBINE

__all__ = ["HybridEPBuffer", "indices_to_map"]

FLAGS = ("use_mnnvl", "use_shared_buffer", "load_cached_kernels", "enable_custom_allgather")
"""Options of the constructor, in one version of the branch or another, that change nothing here."""

PERMUTE = "num_sms_permute_api"
"""Another, a number."""

NODE = ("num_of_ranks_per_nvlink_domain", "num_of_hybrid_ep_ranks_per_nvlink_domain")
"""Names of the ranks of a node, in older and newer versions."""

TOKENS, LOCAL_EXPERTS = "max_num_of_tokens_per_rank", "num_of_experts_per_rank"
_NAMES = {"num_local_experts": LOCAL_EXPERTS, "num_of_tokens_per_rank": TOKENS}
"""Of the config, by older ones."""


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
        inputs.check_fork("HybridEPBuffer", old, dict.fromkeys((*FLAGS, *NODE, PERMUTE), ""))
        _sms(PERMUTE, old.get(PERMUTE))
        for name in FLAGS:
            flag(name, old.get(name))
        inputs.check_group(group)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        _sms("num_blocks_permute", num_blocks_permute)
        _sms("num_blocks_unpermute", num_blocks_unpermute)
        per_node, most = _ranks_per_node(old, self.group_size), max_num_of_tokens_per_rank
        config = BufferConfig(
            whole("hidden_dim", hidden_dim, 1),
            whole("max_num_of_tokens_per_rank", most),
            whole("num_local_experts", num_local_experts, 1, MOST_EXPERTS // self.group_size),
            per_node,
            self.group_size // per_node,
            flag("use_fp8", use_fp8),
            _sms("num_sms_dispatch_api", num_sms_dispatch_api),
            _sms("num_sms_combine_api", num_sms_combine_api),
            _sms("num_sms_preprocessing_api", num_sms_preprocessing_api),
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
        names, most = {each.name for each in fields(BufferConfig)}, {LOCAL_EXPERTS: MOST_EXPERTS}
        said = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
        ours = {
            name: flag(name, value)
            if name == "use_fp8"
            else whole(name, value, most=most.get(name, LARGEST))
            for name, value in said.items()
            if name in names
        }
        tokens = max(ours.pop(TOKENS, 0), self.config.max_num_of_tokens_per_rank)
        self.config.max_num_of_tokens_per_rank = tokens
        return replace(self.config, **ours)

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
        return self._dispatch(PermutedHandle, Asked(**locals()))

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
        return self._combine(PermutedHandle, Asked(**locals()))

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
        return self._dispatch(HybridHandle, Asked(**locals()))

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`combine_with_unpermute`, of ``probs`` and rows as of :meth:`dispatch`."""
        return self._combine(HybridHandle, Asked(**locals()))

    # Both

    def _dispatch(self, kind: type[HybridHandle], asked: Asked) -> Any:
        natives, config, known, shape = self._natives, self.config, None, None
        try:
            with DisableTorchFunction():
                shape = calls.check_shape(kind, asked)
                if asked.handle is None:
                    given = calls.check_dispatch(natives, shape, asked, config)
                else:
                    known = calls.check_handle(asked.handle, kind, self.group)
                    given = calls.check_again(shape, asked, known)
        except inputs.REFUSED as error:
            if asked.handle is not None:
                raise natives.refused_with(error, asked.handle, HybridHandle, CACHED) from None
            raise calls.refused(natives, error, shape, asked, config) from None
        run, like = self._streams.run, given.rows[0]
        if known is None:
            return run(calls.dispatch, (natives, given, config), like, None, False)[0]
        natives.last_normal = known.ep
        return run(calls.redispatch, (given, known), like, None, False, known)[0]

    def _combine(self, kind: type[HybridHandle], asked: Asked) -> tuple[Tensor, Tensor | None]:
        natives, hidden, handle = self._natives, asked.hidden, asked.handle
        try:
            with DisableTorchFunction():
                calls.check_switches(asked)
                known = calls.check_handle(handle, kind, self.group)
                arguments = *calls.check_combine(asked, known), known
        except inputs.REFUSED as error:
            raise natives.refused_with(error, handle, HybridHandle, COMBINE) from None
        natives.last_normal = known.ep
        return self._streams.run(calls.combine, arguments, hidden, None, False, known)[0]


def _ranks_per_node(given: dict[str, Any], num_ranks: int) -> int:
    """Of the options ``given``, or 8 if that divides the ranks, or all."""
    asked = next((given[name] for name in NODE if given.get(name) is not None), None)
    if asked is None:
        return RANKS_PER_NODE if num_ranks % RANKS_PER_NODE == 0 else num_ranks
    number = whole("num_of_ranks_per_nvlink_domain", asked, 1)
    if num_ranks % number:
        raise ValueError(
            f"num_of_ranks_per_nvlink_domain ({number}) must divide the {num_ranks} ranks of the "
            f"group: leave it out, as nodes change nothing here"
        )
    return number


def _sms(name: str, value: Any) -> int:
    """Multiprocessors or blocks, echoed: engines take what they need. None: DeepEP's choice."""
    return USUAL_SMS if value is None else whole(name, value, 0, MOST_SMS * 64)
