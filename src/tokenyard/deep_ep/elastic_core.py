"""What ``ElasticBuffer`` (DeepEP V2.1) and ``EPBuffer`` (V2.5) have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction

from tokenyard.arguments import LONGEST, MOST_BYTES, MOST_PICKS
from tokenyard.deep_ep import elastic_calls, elastic_facts, inputs
from tokenyard.deep_ep.elastic_handle import CoreHandle, Shape
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.inputs import Asked, flag, whole
from tokenyard.deep_ep.natives import Natives, timeout_of
from tokenyard.deep_ep.normal import COUNT_WORDS, MAX_TOKENS
from tokenyard.deep_ep.runtime import Runtime
from tokenyard.deep_ep.streams import Streams, in_words_of_deep_ep
from tokenyard.errors import NotSupported
from tokenyard.header import CACHED, COMBINE
from tokenyard.rendezvous import agree, group_store
from tokenyard.topology import settle_topology, this_host

HYBRID_QPS, DIRECT_QPS = 129, 17
"""``num_allocated_qps`` that DeepEP settles on, with and without its hybrid mode; echoed."""

DISPATCH_FLAGS: dict[str, Any] = {
    "do_handle_copy": True,
    "do_cpu_sync": None,
    "do_expand": False,
    "do_zero_padding": False,
    "use_tma_aligned_col_major_sf": False,
}
"""The last arguments of a dispatch."""

PATIENCE: dict[str, Any] = {
    "num_cpu_timeout_secs": 300,
    "num_gpu_timeout_secs": 100,
    "explicitly_destroy": False,
}
"""The last arguments of a constructor."""

Function = TypeVar("Function", bound=Callable[..., Any])


def with_rest(defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """``inspect.signature``, which frameworks ask, shows ``defaults`` instead of ``**rest``."""

    def show(function: Function) -> Function:
        known, kind = inspect.signature(function), Parameter.KEYWORD_ONLY
        *named, _ = known.parameters.values()
        rest = [Parameter(name, kind, default=value) for name, value in defaults.items()]
        shown: Any = function
        shown.__signature__ = known.replace(parameters=[*named, *rest])
        return function

    return show


def rest_of(call: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The rest as ``given``, else by ``defaults``. TypeError: one is none of them."""
    for name in given.keys() - defaults.keys():
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
    return {**defaults, **given}


class CoreBuffer:
    """See ``ElasticBuffer``."""

    _kind: ClassVar[type[CoreHandle]]
    _copies_handles: ClassVar[bool] = True
    _sms_together: ClassVar[int] = 1
    _estimate: ClassVar[elastic_facts.Estimate] = elastic_facts.V2_1

    def __init__(self, group: dist.ProcessGroup, given: Mapping[str, Any]) -> None:
        """``given``: all arguments by name."""
        name = type(self).__name__
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph is being captured: make {name} on every rank before the capture"
            )
        inputs.check_group(group)
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        words = {
            "timeout= of ExpertParallel": f"num_gpu_timeout_secs of {name}",
            "ExpertParallel": name,
            "max_tokens_per_rank": "num_max_tokens_per_rank",
        }
        refusal: ValueError | NotSupported | None = None
        try:
            same = self._settle(given)
        except (ValueError, NotSupported) as error:
            same, refusal = dict[str, Any](), error
        store, place = group_store(group), (self.rank_idx, self.num_ranks)
        assert store is not None  # there is a group
        try:
            _, hosts = agree(store, *place, same, str(refusal or ""), self._timeout, this_host())
        except (RuntimeError, ValueError) as error:
            in_words_of_deep_ep(error, words)
            raise
        if refusal is not None:
            raise refusal
        grid, _ = settle_topology(None, hosts)
        hybrid = self.allow_hybrid_mode
        self._physical, self._logical = elastic_facts.domains_of(grid, self.num_ranks, hybrid)
        self.num_rdma_ranks, self.num_nvlink_ranks = self._physical
        self.num_scaleout_ranks, self.num_scaleup_ranks = self._logical
        self.scaleout_rank_idx = self.rank_idx // self.num_scaleup_ranks
        self.scaleup_rank_idx = self.rank_idx % self.num_scaleup_ranks
        self._streams = Streams({**words, "num_topk": "columns of topk_idx"})
        rings = self.num_bytes - self.num_bytes % elastic_facts.HINT_UNIT
        self._natives = Natives(group, self.rank_idx, self.num_ranks, rings, timeout=self._timeout)
        self.runtime: Runtime | None = Runtime(self.rank_idx, self.num_ranks, self._streams)

    _timeout = 0.0
    """What a rank says that refuses its own."""

    def _settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check and take arguments; returns those that must be equal on all ranks."""
        tokens, hidden = (whole(n, given[n]) for n in ("num_max_tokens_per_rank", "hidden"))
        self.num_max_tokens_per_rank = tokens
        whole("num_topk", given["num_topk"], 0, MOST_PICKS)
        if given["num_bytes"] is not None:
            self.num_bytes = whole("num_bytes", given["num_bytes"], 0, MOST_BYTES)
            hidden = 0  # nothing depends on it then
        elif tokens and hidden:
            self.num_bytes = elastic_facts.size_hint(self.num_ranks, tokens, hidden, 0)
        else:
            raise ValueError(
                f"num_bytes (None), num_max_tokens_per_rank ({tokens}) and hidden ({hidden}): give "
                f"num_bytes, or both of the others"
            )
        self.use_fp8_dispatch = flag("use_fp8_dispatch", given["use_fp8_dispatch"])
        self.deterministic = flag("deterministic", given["deterministic"])
        self.allow_hybrid_mode = flag("allow_hybrid_mode", given["allow_hybrid_mode"])
        reduces, overlaps = "allow_multiple_reduction", "prefer_overlap_with_compute"
        self.allow_multiple_reduction = flag(reduces, given[reduces])
        self.prefer_overlap_with_compute = flag(overlaps, given[overlaps])
        self.explicitly_destroy = flag("explicitly_destroy", given["explicitly_destroy"])
        if given["sl_idx"] is not None:
            whole("sl_idx", given["sl_idx"])
        default = HYBRID_QPS if self.allow_hybrid_mode else DIRECT_QPS
        self.num_allocated_qps = whole("num_allocated_qps", given["num_allocated_qps"]) or default
        names = "num_cpu_timeout_secs", "num_gpu_timeout_secs"
        self._timeout = timeout_of(max(whole(n, given[n], 1, int(LONGEST)) for n in names))
        # Sizes first: bytes that follow from them are not what a caller gave.
        return {
            "num_max_tokens_per_rank": tokens,
            "hidden": hidden,
            "num_bytes": self.num_bytes,
            "allow_hybrid_mode": self.allow_hybrid_mode,
        }

    def destroy(self) -> None:
        """Finish outstanding calls and let go of connections and memory. Again does nothing."""
        self._natives.close()
        self.runtime = None

    # Facts

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes per rank that a native object takes here on GPUs: 32 to 128 MiB, as the tokens of
        all ranks need, and 128 bytes per token, so that the hint for more tokens is larger;
        whatever the flags and ``num_topk``."""
        inputs.check_group(group)
        flag("use_fp8_dispatch", use_fp8_dispatch)
        flag("allow_hybrid_mode", allow_hybrid_mode)
        flag("allow_multiple_reduction", allow_multiple_reduction)
        return elastic_facts.size_hint(group.size(), num_max_tokens_per_rank, hidden, num_topk)

    @staticmethod
    def capture() -> EventHandle:
        """The current stream as it is now."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls."""
        return self._streams.comm()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Hosts, and ranks of each; ``(R, 1)`` where hosts are uneven."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """The same with ``allow_hybrid_mode`` (on even hosts), else ``(1, R)``."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Multiprocessors that copy as fast as the links take it, for programs that plan with them:
        even, at most those of the GPU (without one, of an H100).

        Args:
            num_scaleout_topk: must be 0.
            rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs: GB/s; 0: 50, 450, 200 and 50
                (``EPBuffer``: 180 and 45).
        """
        sizes = elastic_facts.check_gate(num_experts, num_topk, num_scaleout_topk)
        given = rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs
        return self._num_sms(*sizes, elastic_facts.check_rates(given, self._estimate.rates))

    def _num_sms(self, experts: int, picks: int, rates: tuple[float, ...]) -> int:
        place, overlaps = (self._physical, self._logical), self.prefer_overlap_with_compute
        how = rates, overlaps, self._estimate
        return elastic_facts.theoretical_num_sms(experts, picks, *place, *how)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that DeepEP takes for ``num_sms``; here nothing takes any."""
        number = whole("num_sms", num_sms)
        wanted = 16 * number + 1 if self.allow_hybrid_mode else min(number, 9)
        return min(wanted, self.num_allocated_qps)

    # Collective calls

    def _barrier(self, on_comm: tuple[str, Any], with_cpu_sync: Any, sequential: Any) -> None:
        """The current stream waits for a row from every rank. ``on_comm``: name and value."""
        natives, later = self._natives.check_open(), flag(*on_comm)
        flag("sequential", sequential)
        on_gpu = torch.cuda.is_initialized()
        syncs = flag("with_cpu_sync", with_cpu_sync) and on_gpu
        if syncs:
            torch.cuda.synchronize()
        device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
        like = torch.zeros(natives.world_size, COUNT_WORDS, dtype=torch.int32, device=device)
        _, event = self._streams.run(natives.swap, (like, False), like, None, later)
        if event.event is not None:
            event.current_stream_wait()
        if syncs:
            torch.cuda.synchronize()

    def _dispatch(self, asked: Asked) -> Any:
        natives, most = self._natives.check_open(), self.num_max_tokens_per_rank
        handle, flags = asked.handle, asked.flags
        shape: Shape | None = None
        known: CoreHandle | None = None
        try:
            with DisableTorchFunction():
                later, after = elastic_calls.check_when(asked)
                elastic_calls.check_flags(flags, later, self._copies_handles)
                rows = inputs.check_rows(asked.x)
                if handle is None:
                    shape = elastic_calls.check_fresh(natives, rows[0], asked, most)
                else:
                    known = elastic_calls.check_cached(self._kind, rows[0], asked, self.group)
        except inputs.REFUSED as error:
            if handle is not None:
                raise natives.refused_with(error, handle, self._kind, CACHED) from None
            exact = flags["do_cpu_sync"] is not False
            raise elastic_calls.refused(natives, error, asked, exact, most or MAX_TOKENS) from None
        run, by_column = self._streams.run, bool(flags["use_tma_aligned_col_major_sf"])
        if known is not None:
            natives.last_normal = known.ep
            call = rows, known, asked.topk_weights, known.received, by_column
            result, event = run(elastic_calls.redispatch, call, rows[0], after, later, known)
            return _returned((*result, known), event, flags.get("defer_epilogue"))
        assert shape is not None
        picks = asked.topk_idx, asked.topk_weights
        stats = asked.cumulative_local_expert_recv_stats
        num_sms = shape.num_sms
        if not num_sms:
            sizes = shape.num_experts, asked.topk_idx.shape[1]
            num_sms = self._num_sms(*sizes, self._estimate.rates)
        shape = shape._replace(num_sms=num_sms + num_sms % self._sms_together)
        # exact shapes do not use the bound of their object
        tokens = (most or MAX_TOKENS) if shape.do_cpu_sync else shape.num_max_tokens_per_rank
        made = self._kind, flags["do_handle_copy"], self.num_scaleup_ranks
        call = natives, tokens, rows, picks, stats, shape, by_column, made
        result, event = run(elastic_calls.dispatch, call, rows[0], after, later)
        return _returned(result[:4], event, flags.get("defer_epilogue"))

    def _combine(self, asked: Asked, defers: Any = False) -> Any:
        natives, handle = self._natives.check_open(), asked.handle
        x, weights = asked.x, asked.topk_weights
        try:
            with DisableTorchFunction():
                later, after = elastic_calls.check_when(asked)
                elastic_calls.check_sms(asked)
                elastic_calls.check_deferred(defers, later)
                inputs.check_handle(handle, self._kind, self.group)
                terms, changed = elastic_calls.check_combine(x, handle, weights, asked.bias)
        except inputs.REFUSED as error:
            raise natives.refused_with(error, handle, self._kind, COMBINE) from None
        natives.last_normal = handle.ep
        given = x, handle, weights, terms, changed
        result, event = self._streams.run(elastic_calls.combine, given, x, after, later, handle)
        return _returned(result, event, defers)


def _returned(result: tuple[Any, ...], event: EventOverlap, defers: Any) -> Any:
    """What a call returns: the rest too, or (``defers``) the event, which brings it when it is
    waited for."""
    if not defers:
        return *result, event
    event.register_hook_after_wait(partial(tuple, result))
    return event
