"""DeepEP V2.5's load balance: experts that other ranks of the host hold a second time get their
weights, and give their gradients back, by plain copies.

A mapping int32 ``[ranks of the host, C]`` says which expert stands in each of the C redundant slots
of each rank, -1 for none. Experts are counted within the host, L per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.arguments import MOST_BYTES
from tokenyard.deep_ep.elastic_calls import event_of
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.inputs import REFUSED, TABLE, array, check_dtype, whole
from tokenyard.deep_ep.lending import Domain, Message
from tokenyard.deep_ep.runtime import memory
from tokenyard.deep_ep.streams import Streams
from tokenyard.errors import NotSupported
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.types import INDEX_DTYPES

# Memory for redundant experts


def get_num_allocation_alignment() -> int:
    """Bytes that buffers and planned tensors are aligned to: 2 MiB."""
    return 2 << 20


def get_num_tma_alignment() -> int:
    """Bytes of which DeepEP's copies need a multiple: 32. Copies here take any number."""
    return 32


def get_num_rdma_alignment() -> int:
    """Bytes that DeepEP aligns what crosses its network to: 64."""
    return 64


class BufferAllocator:
    """A plan of tensors, made before there is memory for them.

    Attributes:
        alignment: bytes that each tensor begins at a multiple of.
        allocations: each tensor and its offset in bytes; ``num_bytes``: of the whole plan.
        materialized: whether the tensors have memory.
    """

    def __init__(self) -> None:
        self.alignment = get_num_allocation_alignment()
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on device ``meta``, until the plan has its memory. ValueError: it has."""
        if self.materialized:
            raise ValueError(
                "allocate() after the plan was given its memory: plan all tensors, then make the "
                "buffer"
            )
        check_dtype(dtype)
        given: Any = [shape] if isinstance(shape, int) else shape
        sizes = [whole("shape", each, 0, MOST_BYTES) for each in given]
        tensor = torch.empty(sizes, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        parts = -(-tensor.nbytes // self.alignment)
        self.num_bytes += parts * self.alignment
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Let the planned tensors be parts of ``storage``: uint8 ``[num_bytes]``, contiguous.

        Raises:
            ValueError: it is something else, or the plan has memory already.
        """
        if self.materialized:
            raise ValueError("the plan was given its memory already: make a plan for each buffer")
        want = storage.dtype == torch.uint8 and storage.is_contiguous() and not storage.is_meta
        if not want or storage.shape != (self.num_bytes,):
            raise ValueError(
                f"storage is {storage.dtype} of shape {list(storage.shape)} on {storage.device}, "
                f"but must be contiguous uint8 [{self.num_bytes}] in memory"
            )
        for tensor, offset in self.allocations:
            part = storage[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, part)
        self.materialized = True


# What moves


NAMES = "redundant_expert_weights", "expert_weights"


Pair = tuple[Tensor, Tensor]
"""Redundant slots ``[C, bytes]`` of this rank and its own experts ``[L, bytes]``, as uint8."""


class LoadBalance:
    """The part of ``EPBuffer`` that moves weights and gradients of experts. ``lb_storage``: uint8
    ``[num_lb_bytes]``, memory for redundant experts; None if there is none."""

    group: dist.ProcessGroup | MemoryGroup
    num_nvlink_ranks: int
    runtime: Any
    _streams: Streams
    num_lb_bytes: int = 0
    lb_storage: Tensor | None = None
    _domain: Domain | None = None

    @staticmethod
    def check_plan(lb_allocation_plan_or_num_bytes: BufferAllocator | int) -> int:
        """The bytes asked for. ValueError: a plan has its memory, or bytes are not aligned."""
        plan, name = lb_allocation_plan_or_num_bytes, "lb_allocation_plan_or_num_bytes"
        if isinstance(plan, BufferAllocator):
            if plan.materialized:
                raise ValueError(f"{name}: this plan belongs to another buffer: make a plan for it")
            return plan.num_bytes
        num_bytes = whole(name, plan, 0, MOST_BYTES, ", or a BufferAllocator")
        unit = get_num_allocation_alignment()
        if num_bytes % unit:
            raise ValueError(f"{name} ({num_bytes}) must be a multiple of {unit} bytes")
        return num_bytes

    def _open_load_balance(self, plan: BufferAllocator | int) -> None:
        """Take the memory, on the current GPU if there is one. Asks nobody."""
        self.num_lb_bytes = self.check_plan(plan)
        if not self.num_lb_bytes and not isinstance(plan, BufferAllocator):
            return
        self.lb_storage = memory(self.num_lb_bytes)
        if isinstance(plan, BufferAllocator):
            plan.materialize(self.lb_storage)

    def lb_get_theoretical_num_sms(self) -> int:
        """0: nothing of these copies is launched here; the group's backend takes what it needs."""
        return 0

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Sequence[Tensor] | Tensor,
        expert_weights: Sequence[Tensor] | Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
    ) -> EventOverlap:
        """Copy experts into the slots of the ranks that hold them a second time. Collective among
        the ranks of the host.

        The host waits for a mapping in device memory, so a CUDA graph cannot hold this; one in host
        memory is read at once. A silent rank: the group's own timeout.

        Args:
            redundant_expert_weights: ``[C, ...]`` to write into, contiguous, anywhere in memory;
                slots without expert keep what they hold.
            expert_weights: as many ``[L, ...]``, contiguous, the same bytes per expert.
            redundancy_mapping: ``[ranks of the host, C]``, the same on all.
            num_sms: changes nothing.
            previous_event: what the copies wait for, else for the current stream.

        Returns:
            The event after which slots are good.

        Raises:
            ValueError: a bad argument; then other ranks that are in the call raise ``PeerError``.
            Mismatch: ranks disagree. Nothing has moved.
        """

        def pairs() -> list[Pair]:
            many = _tensors(NAMES[0], redundant_expert_weights)
            own = _tensors(NAMES[1], expert_weights)
            if len(many) != len(own):
                raise ValueError(
                    f"redundant_expert_weights has {len(many)} tensors and expert_weights "
                    f"{len(own)}: pass as many"
                )
            both = enumerate(zip(many, own, strict=True))
            known = [_pair(f"weights[{at}]", *each) for at, each in both]
            for name, tensors in zip(NAMES, zip(*known, strict=True), strict=True):
                _check_alike(name, tensors)
            return known

        return self._lend("lb_prefetch_weights", pairs, redundancy_mapping, num_sms, previous_event)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
    ) -> EventOverlap:
        """Add the gradients of redundant slots to those of the experts, where they are at home: in
        float32, one after the other by rank, then slot, so that equal calls give equal bits.

        Args:
            redundant_expert_grads: float32 ``[C, hidden]``, contiguous; stays as it is.
            expert_grads: float32 ``[L, hidden]``, contiguous, added to.

        The rest, collective use and errors are those of :meth:`lb_prefetch_weights`.
        """

        def pairs() -> list[Pair]:
            both = {"redundant_expert_grads": redundant_expert_grads, "expert_grads": expert_grads}
            for name, value in both.items():
                array(name, value, "float32 [experts, hidden]", TABLE, (torch.float32,))
            return [_pair("grads", redundant_expert_grads, expert_grads)]

        given = redundancy_mapping, num_sms, previous_event
        return self._lend("lb_reduce_grads", pairs, *given, adds=True)

    # How

    def _lend(
        self,
        call: str,
        pairs: Callable[[], list[Pair]],
        mapping: Tensor,
        num_sms: Any,
        previous_event: Any,
        adds: bool = False,
    ) -> EventOverlap:
        """Check, agree, move; on the communication stream."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise NotSupported(f"{call}() in a CUDA graph capture: call it before the graph")
        if isinstance(self.group, MemoryGroup):
            raise NotSupported(f"{call}() among virtual ranks: use a torch.distributed group")
        if self.runtime is None:
            raise RuntimeError(f"{call}() after destroy()")
        if self._domain is None:
            self._domain = Domain(self.group, self.num_nvlink_ranks)
        domain = self._domain
        try:
            event = event_of("previous_event", previous_event)
            known = pairs()
            whole("num_sms", num_sms)
            slots, own = known[0]
            shape = domain.size, len(slots)
            meaning = "int32 [ranks of the host, redundant slots]"
            array("redundancy_mapping", mapping, meaning, shape, INDEX_DTYPES)
            wire = domain.wire(own.device)
        except REFUSED:
            domain.refuse()
            raise

        def run(*_: Any) -> None:
            sizes = [*(each.shape[1] for _, each in known), len(own)]
            try:
                rows = _experts(mapping, domain.size * sizes[-1])
            except REFUSED:
                domain.refuse()
                raise
            domain.agree(call, wire, sizes, rows)
            _move(domain, wire, known, rows, adds)

        after = None if event is None else EventOverlap(event)
        return self._streams.run(run, (mapping, *known), own, after, True)[1]


def _move(domain: Domain, wire: torch.device, pairs: list[Pair], mapping: Any, adds: bool) -> None:
    """Copy experts into the slots that hold them a second time; or (``adds``) what stands there
    back, and add it, in the order of the ``mapping``."""
    send: list[Message] = []
    recv: list[Message] = []
    sums: list[Tensor] = []
    for slots, own in pairs:
        filled = (
            (borrower, slot, *divmod(expert, len(own)))
            for borrower, row in enumerate(mapping)
            for slot, expert in enumerate(row)
            if expert >= 0
        )
        for borrower, slot, owner, local in filled:
            source, target = (owner, own[local]), (borrower, slots[slot])
            if adds:
                source, target = target, source
            if source[0] == domain.rank:
                send.append((target[0], source[1]))
            if target[0] == domain.rank:
                sums.append(target[1])
                recv.append((source[0], torch.empty_like(target[1]) if adds else target[1]))
    domain.exchange(send, recv, wire)
    if adds:
        for total, (_, term) in zip(sums, recv, strict=True):
            total.view(torch.float32).add_(term.view(torch.float32))


def _tensors(name: str, given: Any) -> list[Tensor]:
    many: list[Any] = [given] if isinstance(given, Tensor) else list(given or ())
    if not many or not all(isinstance(each, Tensor) for each in many):
        raise ValueError(f"{name} must be a tensor, or at least one tensor in a list")
    return many


def _pair(what: str, slots: Tensor, own: Tensor) -> Pair:
    """Both as bytes, without autograd."""
    names = f"redundant_expert_{what}", f"expert_{what}"
    for name, value in zip(names, (slots, own), strict=True):
        if value.layout is not torch.strided or not value.dim() or not value.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous tensor [experts, ...]: use .contiguous()"
            )
        if not (value.is_cpu or value.is_cuda):
            raise ValueError(
                f"{name} is on {value.device}, but must be in CPU or CUDA memory; tensors of a "
                f"plan are once its buffer is made"
            )
    if not own.shape[0]:
        raise ValueError(f"{names[1]} has shape {list(own.shape)}: a rank has at least one expert")
    if slots.device != own.device:
        raise ValueError(f"{names[0]} is on {slots.device}, but {names[1]} on {own.device}")
    width, num_slots = own.nbytes // len(own), len(slots)
    if slots.nbytes != width * num_slots:
        each = slots.nbytes // max(1, num_slots)
        raise ValueError(
            f"{names[0]} has {each} bytes per expert and {names[1]} {width}: they must be equal"
        )
    slots, own = (each.detach().view(-1).view(torch.uint8) for each in (slots, own))
    return slots.view(num_slots, width), own.view(-1, width)


def _check_alike(name: str, tensors: Sequence[Tensor]) -> None:
    """All have the same experts and device."""
    first = tensors[0]
    for at, each in enumerate(tensors):
        if len(each) != len(first) or each.device != first.device:
            raise ValueError(
                f"{name}[{at}] has {len(each)} experts on {each.device}, but {name}[0] "
                f"{len(first)} on {first.device}: they must be equal"
            )


def _experts(mapping: Tensor, num_experts: int) -> list[list[int]]:
    """The rows; each entry is an expert of the host, or -1."""
    rows: list[list[int]] = mapping.tolist()  # pyright: ignore[reportUnknownVariableType]
    for rank, row in enumerate(rows):
        for slot, expert in enumerate(row):
            if not -1 <= expert < num_experts:
                raise ValueError(
                    f"redundancy_mapping[{rank}, {slot}] ({expert}) must be an expert of the host "
                    f"from 0 to {num_experts - 1}, or -1 for none"
                )
    return rows
