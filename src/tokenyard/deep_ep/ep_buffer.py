"""DeepEP V2.5's ``EPBuffer`` and ``EPHandle`` on native objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tokenyard.deep_ep.elastic import Event
from tokenyard.deep_ep.elastic_core import DISPATCH_FLAGS, PATIENCE, CoreBuffer, rest_of, with_rest
from tokenyard.deep_ep.elastic_facts import V2_5
from tokenyard.deep_ep.elastic_handle import CoreHandle, version_of
from tokenyard.deep_ep.inputs import Asked
from tokenyard.deep_ep.load_balance import LoadBalance
from tokenyard.errors import NotSupported


class BufferBase(ABC):
    """A communication buffer. ``explicitly_destroy``: echoed; ``runtime``: None once destroyed."""

    explicitly_destroy: bool = False
    runtime: Any = None

    @property
    def main_context(self) -> Any:
        """(the communicator of DeepEP's compiled runtime) Not supported."""
        raise NotSupported("main_context: there is no compiled runtime here; use .group")

    def print_memory_usage(self) -> None:
        """(of DeepEP's compiled runtime) Not supported."""
        raise NotSupported("print_memory_usage(): use `tokenyard plan`, or torch.cuda.memory_*()")

    @abstractmethod
    def destroy(self) -> None:
        """Let go of connections and memory."""


EP_DISPATCH_FLAGS = {**DISPATCH_FLAGS, "do_handle_copy": False, "defer_epilogue": False}
"""The last arguments of a dispatch."""


class EPHandle(CoreHandle):
    """Handle of ``EPBuffer.dispatch``; see :class:`CoreHandle`."""

    source = "dispatch() of EPBuffer (DeepEP V2.5)"

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self._version = version_of(self._topk_idx)

    def ids(self) -> Tensor:
        """The very ids of the dispatch.

        Raises:
            ValueError: they were changed since, as far as torch can tell.
        """
        if self._version != version_of(self._topk_idx):
            raise ValueError("topk_idx was modified while its EPHandle is in use: clone it before")
        return self._topk_idx

    topk_idx = property(ids)


class EPBuffer(CoreBuffer, LoadBalance, BufferBase):
    """Dispatch and combine with the names of DeepEP V2.5, on any group of any size, CPU and CUDA
    tensors alike.

    Making one is collective; native objects are made by the first call with new sizes.

    Args:
        lb_allocation_plan_or_num_bytes: bytes of memory for redundant experts, or a plan of them
            (``num_bytes``); see ``lb_prefetch_weights``.
        sl_idx: changes nothing.

    All others, and errors, as of ``ElasticBuffer`` (``tokenyard.deep_ep.elastic``).
    """

    _kind, _copies_handles, _sms_together, _estimate = EPHandle, False, 2, V2_5

    @with_rest(PATIENCE)
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        **rest: Any,
    ) -> None:
        given = dict(locals())  # all of them, by name
        super().__init__(group, given | rest_of("EPBuffer", rest, PATIENCE))
        self._open_load_balance(lb_allocation_plan_or_num_bytes)

    def _settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.check_plan(given["lb_allocation_plan_or_num_bytes"])
        return super()._settle(given)

    def barrier(
        self, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """As ``ElasticBuffer.barrier``, whose ``use_comm_stream`` is ``wait_comm_stream`` here."""
        self._barrier(("wait_comm_stream", wait_comm_stream), with_cpu_sync, sequential)

    @with_rest(EP_DISPATCH_FLAGS)
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        **flags: Any,
    ) -> Any:
        """As ``ElasticBuffer.dispatch``, but for these.

        Args:
            topk_idx: stays in the handle as it is; do not change it while the handle is in use.
            num_sms: rounded up to an even number.
            do_handle_copy: must be False.
            defer_epilogue: return the event alone, whose ``current_stream_wait()`` returns the
                other four. Needs ``async_with_compute_stream``. The call itself runs at once.

        Returns:
            Rows, ids, weights, handle and event, or the event.
        """
        flags = rest_of("dispatch", flags, EP_DISPATCH_FLAGS)
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        """As ``ElasticBuffer.combine``. With ``defer_epilogue`` it returns the event alone, whose
        ``current_stream_wait()`` returns the others. Needs ``async_with_compute_stream``."""
        return self._combine(Asked(**locals()), defer_epilogue)
