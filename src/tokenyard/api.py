"""The public object: expert-parallel dispatch and combine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import checks
from tokenyard.arguments import check_device, check_once, check_optional, check_sizes, check_timeout
from tokenyard.call_queue import Waitable
from tokenyard.config import Config
from tokenyard.engines.base import CallOptions, Request
from tokenyard.engines.known import AUTO, ENGINES, LOW_LATENCY
from tokenyard.engines.select import choose
from tokenyard.errors import NotSupported
from tokenyard.handle import Handle
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.limits import most_result_bytes
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.recovery import Recoverable
from tokenyard.rendezvous import agree, check_group, group_store, place_in, ranks_sharing
from tokenyard.results import Combined, CombineOptions, Received
from tokenyard.stats import Stats
from tokenyard.topology import Topology, check_topology, node_numbers, settle_topology, this_host
from tokenyard.tracing import traced
from tokenyard.types import Layout, Quantize, Quantized

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("tokenyard")
_MOST_SAID = 200  # characters of an error that other ranks are told

BESIDE_COLLECTIVES = 32
"""A ``spare_sms`` for calls that overlap with NCCL's (``docs/reference/protocols.md``, Limits)."""


class ExpertParallel(Recoverable):
    """Sends tokens to the ranks that hold their experts, and their results back.

    Making one is collective over ``group``, and so are ``dispatch``, ``combine``, ``warmup`` and
    their backwards: every rank calls them in the same order with the same options. One object
    serves one thread at a time; different objects are independent. Up to
    ``tokenyard.call_queue.MAX_OUTSTANDING`` (8) asynchronous calls may be outstanding; while a hook
    of engine low_latency is, no other call begins.

    Args:
        group: a ``torch.distributed`` group, or a ``DeviceMesh`` of one dimension (default: the
            default group; without one this process is alone).
        num_experts: E, at most 65536, split contiguously over the ranks; the first ``E mod R`` hold
            one more.
        hidden: H, channels of a token.
        num_topk: K, picks per token, at most 4096.
        max_tokens_per_rank: M, bound for static shapes; exact shapes take any number of tokens.
        engine: "auto", "collective", "nvlink" (GPUs that map each other's memory), "twolevel" (GPUs
            of several nodes that form a grid, ``docs/reference/twolevel.md``) or "low_latency" (as
            nvlink, static expert layouts for decoding). "auto" takes nvlink where it can work.
        buffer_bytes: symmetric memory for rings (nvlink, twolevel), whatever the batch. Default:
            128 MiB. Besides, nvlink has a receive buffer, at most four times as large; and from the
            first large ``FLAT`` dispatch on a heap for results, at most six times as large (two of
            4096 tokens of 7168 channels), unless all multiprocessors of two ranks are lent. Engine
            low_latency: its slots; default: what rows of 2 bytes per channel need.
        num_sms: multiprocessors that kernels may fill (all but collective), the same on all ranks.
            Default: all.
        spare_sms: multiprocessors (all but collective) that others' kernels, if they wait for peers
            too, may hold when a call begins: NCCL's on another stream, say, for which
            ``BESIDE_COLLECTIVES`` is enough. Default: none.
        timeout: seconds that a silent peer is waited for (over NCCL the group's watchdog decides).
        device: where tensors live. Default: the accelerator if the group has a backend for it; over
            gloo any.
        topology: ``(num_nodes, ranks_per_node)``, nodes of consecutive ranks. Default: by host
            (``docs/reference/semantics.md``, Nodes).
        once_per_node: engine low_latency between nodes: whether a token crosses once per node, or
            per rank (``docs/reference/low_latency.md``). Default: what promises to be faster.

    Attributes:
        engine, why: the engine chosen, and the reason in one sentence.
        topology: the :class:`Topology` given or detected; None if hosts are uneven or a rank is
            gone.
        epoch: how often this object has recovered.

    Raises:
        ValueError: an argument is out of range.
        Mismatch: ranks disagree on one.
        PeerError: another rank refused.
        PeerTimeout: a rank did not come.
        NotSupported: the engine asked for cannot work here; says why.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dist.DeviceMesh | MemoryGroup | None = None,
        *,
        num_experts: int,
        hidden: int,
        num_topk: int,
        max_tokens_per_rank: int,
        engine: str = AUTO,
        buffer_bytes: int | None = None,
        num_sms: int | None = None,
        spare_sms: int | None = None,
        timeout: float = 30.0,
        device: torch.device | str | None = None,
        topology: Topology | tuple[int, int] | None = None,
        once_per_node: bool | None = None,
    ) -> None:
        self.group = check_group(group)
        self.rank, self.world_size = place_in(self.group)
        sizes = {"num_experts": num_experts, "hidden": hidden, "num_topk": num_topk}
        sizes["max_tokens_per_rank"] = max_tokens_per_rank
        store = group_store(self.group)
        optional = {"buffer_bytes": buffer_bytes, "num_sms": num_sms, "spare_sms": spare_sms}
        refusal: ValueError | None = None
        where: torch.device | None = None
        grid: Topology | None = None
        try:
            sizes, timeout = check_sizes(sizes), check_timeout(timeout)
            optional = check_optional(optional)
            if engine not in ENGINES:
                known = ", ".join(map(repr, ENGINES))
                raise ValueError(f"engine ({engine!r}) must be one of {known}")
            check_once(once_per_node, engine, LOW_LATENCY)
            where = None if device is None else check_device(device)
            grid = check_topology(topology, self.world_size)
        except ValueError as error:
            refusal = error
        hosts = [this_host()]
        if store is not None:
            same = {**sizes, **optional, "engine": engine, "topology": str(grid)}
            same["once_per_node"] = str(once_per_node)
            place, why = (self.rank, self.world_size), str(refusal or "")
            store, hosts = agree(store, *place, same, why, timeout, hosts[0])
        if refusal is not None:
            raise refusal
        self.topology, no_grid = settle_topology(grid, hosts)
        sizes |= {"rank": self.rank, "world_size": self.world_size}
        self.config = Config(**sizes, timeout=timeout, topology=self.topology, absent=())
        request = Request(engine, where, **optional, once_per_node=once_per_node, no_grid=no_grid)
        self._stats = Stats.zeros(self.rank, self.world_size, node_numbers(self.topology, hosts))
        self._store = store
        choice = choose(self.group, store, self.config, request)
        sharing = ranks_sharing(self.group, choice.device, hosts, self.rank)
        self._most_bytes = most_result_bytes(choice.device, sharing)
        self._begin(choice)
        self._calls.part = store
        if self.rank == 0:
            _log.info(self.why)

    # Collective calls

    def dispatch(
        self,
        x: Tensor | Quantized,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        handle: Handle | None = None,
        layout: Layout | None = None,
        exact: bool = True,
        expert_alignment: int = 1,
        capacity: int | None = None,
        quantize: Quantize | None = None,
        in_place: bool = False,
        async_op: bool = False,
        after: Waitable | None = None,
        return_hook: bool = False,
        options: CallOptions | None = None,
    ) -> Received:
        """Send every token once to each rank that holds one of its experts
        (``docs/reference/semantics.md``, Dispatch).

        Args:
            x: ``[T, H]`` bf16, fp16 or fp32, or ``Quantized(data, scales)``.
            topk_idx: ``[T, K]`` int64 or int32 global expert ids, -1 = none.
            topk_weights: ``[T, K]`` bf16, fp16 or fp32, rides along as float32.
            handle: repeat an earlier dispatch's routing and layout; leave out what describes them.
            layout: ``Layout.FLAT`` by default.
            exact: exactly the rows that came (the host learns the counts), or static shapes.
            expert_alignment: ``EXPERT_MAJOR`` pads each expert's block to a multiple of this.
            capacity: rows of a static ``EXPERT_MAJOR`` result; read ``overflow``.
            quantize: cast plain rows in the send. options: of engine low_latency.
            async_op, return_hook: return at once; ``recv.wait()`` or ``recv.hook()`` finishes; do
                not change arguments before. Engine low_latency launches twice in the current
                stream: it sends now and receives in the hook.
            in_place: leave ``recv.x`` and ``recv.scales`` in symmetric memory (nvlink, twolevel;
                ``FLAT``, T <= M): no copy. They are good until this object's next dispatch with
                ``in_place=True``; using them later raises.
            after: an event, or anything with ``wait()``, to wait for instead of the current stream.

        Raises:
            ValueError: bad arguments on this rank (the others get ``PeerError`` within the call).
            Mismatch: ranks disagree on dtype, layout or another option.
            PeerTimeout: a rank stayed silent.
            NotSupported: this engine cannot do it.
        """
        calls, check = self._calls, self._validation
        check.begin(handle)
        shape, how = (layout, exact, expert_alignment, capacity), (after, return_hook, options)
        try:
            when = check.when(async_op, *how, checks.is_cast(topk_weights))
            request = check.dispatch(
                x, topk_idx, topk_weights, handle, shape, quantize, in_place, when, options
            )
        except (ValueError, NotSupported) as error:
            op = DISPATCH if handle is None else CACHED
            raise calls.refuse(op, exact is not False, error) from None
        make = calls.dispatch if handle is None else calls.redispatch
        if not torch.compiler.is_compiling():
            return make(request)
        return traced(make, request, request.spec, handle is None)

    @overload
    def combine(
        self, x: Tensor, handle: Handle, *, async_op: Literal[False] = False,
        return_hook: Literal[False] = False, reduce_weights: None = None,
        **how: Unpack[CombineOptions],
    ) -> Tensor: ...  # fmt: skip

    @overload
    def combine(
        self, x: Tensor, handle: Handle, *, async_op: Literal[True], return_hook: bool = False,
        reduce_weights: Tensor | None = None, **how: Unpack[CombineOptions],
    ) -> Combined: ...  # fmt: skip

    @overload
    def combine(
        self, x: Tensor, handle: Handle, *, async_op: bool = False, return_hook: Literal[True],
        reduce_weights: Tensor | None = None, **how: Unpack[CombineOptions],
    ) -> Combined: ...  # fmt: skip

    @overload
    def combine(
        self, x: Tensor, handle: Handle, *, async_op: bool = False, return_hook: bool = False,
        reduce_weights: Tensor, **how: Unpack[CombineOptions],
    ) -> Combined: ...  # fmt: skip

    @overload
    def combine(
        self, x: Tensor, handle: Handle, *, async_op: bool = False, return_hook: bool = False,
        reduce_weights: Tensor | None = None, **how: Unpack[CombineOptions],
    ) -> Tensor | Combined: ...  # fmt: skip

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        *,
        weighted: bool = False,
        topk_weights: Tensor | None = None,
        reduce_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        out: Tensor | None = None,
        in_place: bool = False,
        async_op: bool = False,
        after: Waitable | None = None,
        return_hook: bool = False,
        options: CallOptions | None = None,
    ) -> Tensor | Combined:
        """Sum the rows of each token, back at its owner (``docs/reference/semantics.md``, Combine).

        Args:
            x: the experts' output in the shape of ``recv.x``; bf16, fp16 or fp32, also the dtype on
                the wire.
            handle: of the dispatch that made the rows.
            weighted: expert layouts only: multiply each row by its routing weight first.
            topk_weights: ``[T, K]`` at the owner, instead of the weights that rode along.
            reduce_weights: ``[N, K]`` float32 (``FLAT``), summed to ``[T, K]`` alongside.
            bias: ``[T, H]``, or two of them, added last.
            out: ``[T, H]`` to write into; not differentiable.
            in_place: rows go to their sums without rings (nvlink and twolevel, ``FLAT``, T <= M).
                Takes symmetric memory: for the rows that come back, or (twolevel) for ``x``: no
                copy then, if it is the ``recv.x`` of the last dispatch in place or from
                ``empty_for_combine``; else ``x`` is first copied over it. Not differentiable.
            options: of engine low_latency.

        Returns:
            ``[T, H]``; a :class:`Combined` if ``reduce_weights``, ``async_op`` or ``return_hook``
                was given.
        """
        calls, check = self._calls, self._validation
        check.begin(handle)
        weights, how = (weighted, topk_weights, reduce_weights), (after, return_hook, options)
        try:
            derives = checks.is_copied(x) or topk_weights is not None or reduce_weights is not None
            when = check.when(async_op, *how, derives)
            request = check.combine(x, handle, weights, bias, out, in_place, when, options)
        except (ValueError, NotSupported) as error:
            raise calls.refuse(COMBINE, True, error) from None
        if torch.compiler.is_compiling():
            combined = traced(calls.combine, request, request.handle.spec)
        else:
            combined = calls.combine(request)
        return combined if when.later or reduce_weights is not None else combined.x

    def warmup(self) -> None:
        """Collective: set up connections, and compile the kernels of BF16 rows with weights in
        ``FLAT`` (engine low_latency: ``EXPERT_PADDED``), so that the first such call does not pay
        for them. Other kinds of calls pay when they first come. Gradients cost nothing more."""
        device = torch.device("cpu") if self.device is None else self.device
        x = torch.empty(0, self.config.hidden, dtype=torch.bfloat16, device=device)
        picks = torch.empty(0, self.config.num_topk, dtype=torch.int64, device=device)
        exact, weights = self._calls.low is None, picks.float()
        layout = Layout.FLAT if exact else Layout.EXPERT_PADDED
        recv = self.dispatch(x, picks, weights, layout=layout, exact=exact)
        self.combine(recv.x, recv.handle)

    # One rank at a time

    def empty_for_combine(
        self, handle: Handle, dtype: torch.dtype = torch.bfloat16, *, in_place: bool = False
    ) -> Tensor:
        """Uninitialised rows in the shape of ``recv.x`` for the experts to write into, from where
        combine moves them best.

        ``in_place``: for a combine in place. Any memory will do for engine nvlink. Engine twolevel
        has it symmetric: collective, as it may have to grow; earlier results in place and earlier
        such rows end as with a dispatch in place.
        """
        try:
            known = self._validation.handle(handle)
            checks.check_row_dtype(dtype)
            if in_place:
                self._validation.combine_in_place(known, None, (), dtype)
        except (ValueError, NotSupported):
            if in_place:
                self._calls.come_to_rows_in_place(dtype)
            raise
        if in_place:
            return self._calls.rows_in_place(known.num_rows, dtype)
        padded = (self.config.num_local_experts, self.config.padded_rows)
        shape = padded if known.layout is Layout.EXPERT_PADDED else (known.num_rows,)
        shape, device = (*shape, self.config.hidden), known.plan.returns.device
        return torch.empty(shape, dtype=dtype, device=device)

    def stats(self) -> Stats:
        """A copy of the counters: calls, rows and wire bytes per peer, waits per source. Nothing
        waits for it."""
        self._calls.engine.count()
        return self._stats.copy()

    def check(self) -> None:
        """Wait for the device; raise what went wrong there since the last check.

        Raises:
            ValueError: a static dispatch without host wait was given ids out of range; names the
                first such pick.
            PeerTimeout, PeerError, Mismatch: a call that the host has not waited for came to this.
        """
        self._calls.check()

    @property
    def buffer_bytes(self) -> int:
        """Bytes that this object holds between calls now; 0 once it is closed."""
        return 0 if self._calls.closed else self._calls.engine.buffer_bytes

    @property
    def active_ranks(self) -> list[bool]:
        """Which ranks take part. Waits for the device if the engine is low_latency."""
        low = self._calls.low
        if low is not None:
            return self._calls.queue.run(low.active_ranks)
        return [rank not in self.config.absent for rank in range(self.world_size)]

    @property
    def active_mask(self) -> Tensor:
        """The same as int32 ``[R]`` on the device, 0 for ranks left out (engine low_latency):
        kernels read and write it."""
        return self._calls.need_low("has no mask").active

    def mask(self, rank: int) -> None:
        """Leave a rank out (engine low_latency), from the next launch on, the second one of an open
        hook too. Queued in the current stream, so CUDA graphs hold it."""
        self._calls.need_low(f"cannot go on without rank {rank}").mask(rank)

    def unmask(self, rank: int) -> None:
        """Let a rank in again, whose object has made as many calls as this one: see
        ``docs/reference/low_latency.md``."""
        self._calls.need_low(f"cannot go on without rank {rank}").mask(rank, active=True)

    def close(self) -> None:
        """Finish outstanding calls, let go of connections and buffers. Again it does nothing."""
        self._calls.close()

    def __enter__(self) -> ExpertParallel:
        self._calls.check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is None or self._calls.failure is not None:  # of which the others know
            self.close()
        else:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_SAID]
            self._calls.close(why=f"had left the with block of its ExpertParallel by {said}")
