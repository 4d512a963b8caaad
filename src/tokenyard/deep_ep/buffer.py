"""DeepEP's ``Buffer`` on native objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction

from tokenyard.arguments import MOST_BYTES, MOST_EXPERTS
from tokenyard.deep_ep import decode, inputs, normal, overlap, token_layout
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.handles import LowLatencyHandle, NormalHandle
from tokenyard.deep_ep.inputs import Asked, flag, whole
from tokenyard.deep_ep.natives import Natives
from tokenyard.deep_ep.runtime import MOST_SMS, USUAL_SMS, Config, Runtime, Scratch, check_config
from tokenyard.deep_ep.streams import Streams
from tokenyard.errors import NotSupported
from tokenyard.header import COMBINE
from tokenyard.types import INDEX_DTYPES


class Buffer(decode.LowLatencyState):
    """Dispatch and combine with DeepEP's (V1) names, on any group of any size, CPU and CUDA tensors
    alike.

    Making one talks to nobody and takes no memory; the first call of each kind does, collectively.
    ``docs/how-to/deep_ep.md`` says what is as in DeepEP, what is better and what is missing.

    Args:
        group: any ``torch.distributed`` group; gloo groups take CUDA tensors too.
        num_nvl_bytes: if given, an upper bound for the rings of each native object, down to 32 MiB;
            more than 128 MiB are not used. Echoed, as all others are. ``num_rdma_bytes``,
            ``num_qps_per_rank`` and what is said of NVLink, MNNVL and fabric change nothing.
        low_latency_mode: either mode works on any buffer.
        explicitly_destroy: echoed. :meth:`destroy` frees at once what goes with the last handle.
        enable_shrink: allow masks.
        comm: (mpi4py) not supported.

    Raises:
        ValueError: neither group nor comm, or a bad argument. Calls raise it before anything moves,
            and then other ranks that are in the call raise ``PeerError``.
        NotSupported: ``comm`` alone.
    """

    num_sms: int = USUAL_SMS
    _num_sms_is_set: bool = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        **fork: Any,
    ) -> None:
        inputs.check_fork("Buffer", fork, inputs.CONSTRUCTOR)
        if group is None:
            if comm is None:
                raise ValueError("Either 'group' or 'comm' must be provided.")
            raise NotSupported(
                "comm= (mpi4py) is not supported: call torch.distributed.init_process_group() and "
                "pass group="
            )
        inputs.check_group(group)
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes = whole("num_nvl_bytes", num_nvl_bytes, most=MOST_BYTES)
        self.num_rdma_bytes = whole("num_rdma_bytes", num_rdma_bytes, most=MOST_BYTES)
        self.low_latency_mode = flag("low_latency_mode", low_latency_mode)
        self.explicitly_destroy = flag("explicitly_destroy", explicitly_destroy)
        self.enable_shrink, self.nvshmem_qp_depth = flag("enable_shrink", enable_shrink), 1024
        qps: Any = num_qps_per_rank  # rtp-llm divides the experts by the ranks
        whole("num_qps_per_rank", int(qps) if isinstance(qps, float) and qps.is_integer() else qps)
        flag("allow_nvlink_for_low_latency_mode", allow_nvlink_for_low_latency_mode)
        flag("allow_mnnvl", allow_mnnvl)
        flag("use_fabric", use_fabric)
        self._streams = Streams()
        self._scratch = Scratch(self.num_nvl_bytes, self.num_rdma_bytes)
        self._natives = Natives(
            group, self.rank, self.group_size, self.num_nvl_bytes, self.enable_shrink
        )
        self.runtime: Runtime | None = Runtime(self.rank, self.group_size, self._streams)

    def destroy(self) -> None:
        """Finish outstanding calls and let go of connections and memory. Again does nothing."""
        self._natives.close()
        self.runtime = None

    # Facts

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: nothing is missing here that DeepEP compiles for SM90 only."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set ``Buffer.num_sms`` (even) for engines of normal mode that are made later."""
        number = whole("num_sms", new_num_sms, 0, MOST_SMS)
        if number % 2:
            raise ValueError(f"num_sms ({new_num_sms}) must be even, as in DeepEP")
        Buffer.num_sms, Buffer._num_sms_is_set = number, True

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP's choice for dispatch, for any number of ranks."""
        send = 24 if whole("num_ranks", num_ranks, 1) == 2 else 6
        return Config(Buffer.num_sms, send, 256, 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP's choice for combine, for any number of ranks."""
        send = {2: 10, 4: 9}.get(whole("num_ranks", num_ranks, 1), 4)
        return Config(Buffer.num_sms, send, 256, 6, 128)

    @staticmethod
    def capture() -> EventOverlap:
        """The current stream as it is now."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls."""
        return self._streams.comm()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of this rank to read and write: ``size`` elements (default: all that follow) from
        element ``offset`` of ``num_nvl_bytes`` (``num_rdma_bytes``) bytes, taken when first asked
        for. No engine uses it."""
        self._natives.check_open()
        return self._scratch.tensor(dtype, size, offset, use_rdma_buffer)

    # Normal mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Where the tokens of this rank go, from ``topk_idx [T, K]`` (int64 or int32, -1 = none).
        Asks nobody.

        Ids out of range count nowhere, like -1: nobody waits for the device here. ``dispatch``
        refuses them.

        Returns:
            Tokens per rank (int32 ``[R]``), per node of 8 (int32, None for one node), per expert
                (int32 ``[E]``); which ranks each token goes to (bool ``[T, R]``); the event.
        """
        self._natives.check_open()
        with DisableTorchFunction():
            later = inputs.check_when(previous_event, async_finish, allocate_on_comm_stream)
            inputs.array("topk_idx", topk_idx, "[T, K]", inputs.TABLE, INDEX_DTYPES)
        arguments = topk_idx, whole("num_experts", num_experts, 1, MOST_EXPERTS), self.group_size
        run = self._streams.run
        result, event = run(token_layout.layout, arguments, topk_idx, previous_event, later)
        return (*result, event)

    def dispatch(
        self,
        x: Any,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Any, Tensor | None, Tensor | None, list[int] | None, NormalHandle | None, EventOverlap
    ]:
        """Send each token once to every rank that holds one of its experts. Collective.

        Args:
            x: ``[T, H]`` float, or a pair: FP8 ``[T, H]``, float32 or int32 scales ``[T, S]``.
            handle: of an earlier dispatch, or its items, to repeat it; then only ``x`` counts.
            num_tokens_per_expert: ``[E]``; its length says how many experts there are.
            is_token_in_rank: bool ``[T, R]``, needed without ``topk_idx``, else worked out again.
            topk_idx, topk_weights: ``[T, K]`` global expert ids (-1 = none); floats, or None.
            expert_alignment: round the counts in the list up to a multiple.
            num_worst_tokens: static shapes: so many rows, and no list. At least ``R * max(T)``.
            config: its ``num_sms``, if any, counts. ``allocate_on_comm_stream``: changes nothing.
            previous_event: to wait for. ``async_finish``: run on the communication stream.

        Returns:
            Rows by source rank, then token; local expert ids ``[N, K]`` (-1 elsewhere), as
            ``topk_idx``; weights ``[N, K]`` float32; rows of each local expert; the handle; the
            event (None in it unless ``async_finish``). The middle four are None with ``handle``.
        """
        asked = Asked(**locals())
        natives, run = self._natives.check_open(), self._streams.run
        try:
            with DisableTorchFunction():
                later = inputs.check_when(previous_event, async_finish, allocate_on_comm_stream)
                num_sms = check_config(config, Buffer.num_sms)
                rows = inputs.check_rows(x)
                *numbers, known = normal.check_dispatch(natives, rows[0], asked, self.group)
        except inputs.REFUSED as error:
            raise normal.refused(natives, error, asked) from None
        if known is not None:
            natives.last_normal = known.ep
            call = normal.redispatch, (rows, known), rows[0]
            again, event = run(*call, previous_event, later, known)
            return again, None, None, None, None, event
        natives.num_sms = num_sms if Buffer._num_sms_is_set or num_sms != USUAL_SMS else None
        per_expert: Any = num_tokens_per_expert
        by_rank = is_token_in_rank, per_expert if topk_idx is None else None
        routed = (topk_idx, topk_weights), by_rank, per_expert.numel()
        arguments = natives, rows, *routed, *numbers, num_sms
        result, event = run(normal.dispatch, arguments, rows[0], previous_event, later)
        return (*result, event)

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token, back at its owner, without weights. Collective.

        Args:
            x: ``[N, H]`` bf16, fp16 or fp32, in the order of the dispatch.
            handle: of that dispatch; good for any number of calls, in any order.
            topk_weights: ``[N, K]`` float32, summed to ``[T, K]`` beside.
            bias: ``[T, H]``, or two of them, added last.

        Returns:
            ``[T, H]`` in the dtype of ``x``; ``[T, K]`` or None; the event.
        """
        natives = self._natives.check_open()
        try:
            with DisableTorchFunction():
                later = inputs.check_when(previous_event, async_finish, allocate_on_comm_stream)
                check_config(config, 0)
                known = inputs.check_handle(handle, NormalHandle, self.group)
                terms = normal.check_combine(x, known, topk_weights, bias)
        except inputs.REFUSED as error:
            raise natives.refused_with(error, handle, NormalHandle, COMBINE) from None
        natives.last_normal = known.ep
        arguments = x, known, topk_weights, terms
        run = self._streams.run
        result, event = run(normal.combine, arguments, x, previous_event, later, known)
        return *result, event

    internode_dispatch = dispatch
    internode_combine = combine

    # Low-latency mode

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes per rank of low-latency mode here on GPUs, for bf16 rows and up to 16 picks."""
        return decode.size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | bool | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **fork: Any,
    ) -> tuple[Any, Tensor, LowLatencyHandle, EventOverlap, decode.Hook | None]:
        """Send each token to its experts, into static blocks; no word to the host, so a CUDA graph
        can hold it. Collective.

        Args:
            x: ``[T, H]`` bf16 (or fp16, fp32; GPUs have room for 2 bytes per channel, so fp32 with
                ``use_fp8`` only), T at most ``num_max_dispatch_tokens_per_rank`` (M), which all
                ranks agree on.
            topk_idx: ``[T, K]`` global expert ids, -1 = none.
            cumulative_local_expert_recv_stats: int32 ``[L]``, counts are added. (A bool is
                ``use_fp8``, as in old versions.)
            dispatch_wait_recv_cost_stats: int64 ``[R]`` or ``[R, R]`` (this rank's row), waits are
                added in nanoseconds.
            use_fp8: cast to FP8 E4M3 with a float32 scale per 128 channels; ``round_scale``: powers
                of two; ``use_ue8m0``: those as bytes, four to an int32.

        Returns:
            ``[L, R * M, H]`` or that with scales ``[L, R * M, ceil(H / 128)]`` (int32: ``ceil(H /
                512)``), column-major; rows by source rank, then token, unspecified past the count.
                Counts int32 ``[L]``. The handle. The event (None inside unless ``async_finish``). A
                hook that makes the rows good, if ``return_recv_hook``.
        """
        natives, stats = self._natives.check_open(), cumulative_local_expert_recv_stats
        if isinstance(stats, bool):
            use_fp8, stats = stats, None
        try:
            inputs.check_fork("low_latency_dispatch", fork, inputs.LOW_LATENCY_DISPATCH)
            with DisableTorchFunction():
                later, hooked = decode.check_ways(async_finish, return_recv_hook)
                mode = decode.mode_of(use_fp8, round_scale, use_ue8m0)
                given = x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts
                sizes = decode.check_dispatch(natives, *given)
                decode.check_counts(natives, sizes[1], stats, x.device)
                name, waits = "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats
                waits = decode.check_waits(name, self.rank, self.group_size, waits, x.device)
        except inputs.REFUSED as error:
            raise decode.refused(natives, error, Asked(**locals())) from None
        arguments = (natives, sizes, x, topk_idx, mode, stats, waits, hooked)
        (rows, counts, handle, hook), event = self._streams.run(
            decode.dispatch, arguments, x, None, later
        )
        return rows, counts, handle, event, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **fork: Any,
    ) -> tuple[Tensor, EventOverlap, decode.Hook | None]:
        """Sum each token's rows times their weights, back at its owner. Collective.

        Args:
            x: ``[L, R * M, H]`` in the order of the dispatch.
            topk_idx: those of the dispatch, which the handle knows.
            topk_weights: ``[T, K]`` float.
            use_logfmt: changes nothing: rows travel in their own dtype, which is more exact.
            zero_copy: read what :meth:`get_next_low_latency_combine_buffer` gave out instead of
                ``x``.
            out: ``[T, H]`` to write into.
            combine_wait_recv_cost_stats: as in :meth:`low_latency_dispatch`.
            fork: ``overlap=True`` with signals: waits for the experts first (``overlap.py``).

        Returns:
            ``[T, H]`` (``out`` if given), the event, and a hook if ``return_recv_hook``.
        """
        natives = self._natives.check_open()
        try:
            with DisableTorchFunction():
                later, hooked = decode.check_ways(async_finish, return_recv_hook)
                flag("use_logfmt", use_logfmt)
                known = inputs.check_handle(handle, LowLatencyHandle, self.group)
                rows = decode.written_buffer(known) if flag("zero_copy", zero_copy) else x
                waits = decode.check_combine(
                    rows, known, topk_idx, topk_weights, out, combine_wait_recv_cost_stats
                )
                experts = overlap.checked(fork, known)
        except inputs.REFUSED as error:
            raise natives.refused_with(error, handle, LowLatencyHandle, COMBINE) from None
        natives.last_low_latency = known.ep
        arguments = (rows, known, topk_weights, out, waits, experts, hooked)
        (combined, hook), event = self._streams.run(
            decode.combine, arguments, rows, None, later, known
        )
        return combined, event, hook
