"""DeepEP V2.1's ``ElasticBuffer`` and ``EPHandle`` on native objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tokenyard.arguments import MOST_BYTES
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.elastic_core import DISPATCH_FLAGS, PATIENCE, CoreBuffer, rest_of, with_rest
from tokenyard.deep_ep.elastic_handle import CoreHandle
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.helpers.missing import missing_call
from tokenyard.deep_ep.inputs import Asked
from tokenyard.errors import NotSupported

Event = EventHandle | EventOverlap | None


class EPHandle(CoreHandle):
    """Handle of ``ElasticBuffer.dispatch``; see :class:`CoreHandle`.

    Attributes:
        topk_idx: ids of the dispatch ``[T, K]``, or a copy of them; or what a caller has put there,
            which changes no call.
    """

    source = "dispatch() of ElasticBuffer (DeepEP V2.1)"

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.topk_idx = self.ids()


class ElasticBuffer(CoreBuffer):
    """Dispatch and combine with the names of DeepEP V2.1, on any group of any size, CPU and CUDA
    tensors alike.

    Making one is collective; native objects are made by the first call with new sizes.

    Args:
        group: any ``torch.distributed`` group; gloo groups take CUDA tensors too.
        num_bytes: an upper bound for the rings of each native object, down to 32 MiB; more than
            128 MiB are not used, nor more than all rows need. Default: what
            :meth:`get_buffer_size_hint` says of ``num_max_tokens_per_rank`` and ``hidden``.
        num_cpu_bytes: must be 0 (Engram is not offered).
        num_max_tokens_per_rank: M, if a dispatch does not say it; the same on all ranks.
        num_topk, use_fp8_dispatch, deterministic, allow_multiple_reduction, sl_idx,
            num_allocated_qps: change nothing. Every call is deterministic; combine sums in
            float32, once per rank and once at the owner.
        allow_hybrid_mode: whether hosts count as scale-up groups.
        prefer_overlap_with_compute: of :meth:`get_theoretical_num_sms`.
        num_cpu_timeout_secs, num_gpu_timeout_secs: a silent rank is waited for as long as the
            larger one says, in whole seconds (``TOKENYARD_DEEP_EP_TIMEOUT`` overrides both).
        explicitly_destroy: echoed. :meth:`destroy` frees at once what goes with the last handle.

    Raises:
        ValueError: a bad argument; then other ranks raise ``PeerError``.
        Mismatch: ranks disagree on one.
        NotSupported: ``num_cpu_bytes``.
        RuntimeError: inside the capture of a CUDA graph.
    """

    _kind = EPHandle

    @with_rest(PATIENCE)
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        **rest: Any,
    ) -> None:
        given = dict(locals())  # all of them, by name
        super().__init__(group, given | rest_of("ElasticBuffer", rest, PATIENCE))

    def _settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if num_bytes := inputs.whole("num_cpu_bytes", given["num_cpu_bytes"], most=MOST_BYTES):
            raise NotSupported(
                f"num_cpu_bytes ({num_bytes}) is memory for Engram, which is not offered here: "
                f"leave it out"
            )
        return super()._settle(given)

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Collective: the current stream waits until every rank's has come here.

        Args:
            use_comm_stream: behind the calls on the communication stream, too.
            with_cpu_sync: the host waits for the device before and after.
            sequential: changes nothing.
        """
        self._barrier(("use_comm_stream", use_comm_stream), with_cpu_sync, sequential)

    @with_rest(DISPATCH_FLAGS)
    def dispatch(
        self,
        x: Any,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        **flags: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            x: ``[T, H]`` bf16, fp16 or fp32, or a pair: FP8 ``[T, H]``, float32 or int32 scales
                ``[T, S]`` of any strides. T is 0 to M (``num_max_tokens_per_rank``).
            topk_idx, topk_weights: ``[T, K]`` global expert ids (-1 = none); floats, or None.
            cumulative_local_expert_recv_stats: int32 ``[L]``, counts of fresh dispatches are added.
            num_experts, num_max_tokens_per_rank, expert_alignment: default: those of the handle; M
                of the constructor; 1.
            num_sms: echoed. ``num_qps``, ``allocate_on_comm_stream``: change nothing.
            previous_event, previous_event_before_epilogue: what the call waits for.
            async_with_compute_stream: run on the communication stream.
            handle: repeat the routing of an earlier dispatch; ``topk_weights`` may be new.
            flags: ``do_handle_copy``: copy ``topk_idx`` for the handle. ``do_cpu_sync``: exact
                shapes, for which the host waits (default without ``handle``), else R * M rows.
                ``do_expand``: a row per token and local expert, blocks padded to
                ``expert_alignment`` with zeros, with ``do_zero_padding`` or not.
                ``use_tma_aligned_col_major_sf``: scales by column, 16 bytes or a multiple apart.

        Returns:
            Rows as ``x``, by source rank and token (``do_expand``: by expert first); local ids
                ``[N, K]``, -1 elsewhere (``do_expand``: None); weights ``[N, K]`` (``[rows]``) or
                None; the handle; the event (None in it unless ``async_with_compute_stream``).
        """
        flags = rest_of("dispatch", flags, DISPATCH_FLAGS)
        return self._dispatch(Asked(**locals()))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        previous_event_before_epilogue: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token, back at its owner, without weights. Collective.

        Args:
            x: rows bf16, fp16 or fp32, in the shape of the dispatched ones.
            handle: of that dispatch; good for any number of calls, in any order.
            topk_weights: ``[N, K]`` (``do_expand``: ``[rows]``), brought back beside.
            bias: ``[T, H]``, or two of them, added last.

        Returns:
            ``[T, H]`` in the dtype of ``x``; ``[T, K]`` float32 or None; the event.
        """
        return self._combine(Asked(**locals()))


_NO_COUNTERPART = {
    "of Engram storage": "get_engram_storage_size_hint engram_write engram_fetch",
    "of pipeline parallelism": "get_pp_buffer_size_hint pp_set_config pp_send pp_recv",
    "of all-gather sessions": "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint "
    "create_agrs_session destroy_agrs_session agrs_new_session agrs_set_config "
    "agrs_get_inplace_tensor all_gather",
}
for _what, _names in _NO_COUNTERPART.items():
    for _name in _names.split():
        _why = f"{_what}, which is not offered here"
        setattr(ElasticBuffer, _name, staticmethod(missing_call(f"ElasticBuffer.{_name}", _why)))
