"""``EPHandle``: what a dispatch of DeepEP's V2 buffers leaves."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.call_queue import keep_for
from tokenyard.deep_ep.handles import KeptHandle, known_picks, places, same_elements
from tokenyard.deep_ep.normal import aligned
from tokenyard.handle import Handle
from tokenyard.results import rows_of_experts
from tokenyard.routing import count_keys, pick_owners, tokens_in_ranks
from tokenyard.rows import take_values

_RANK = 1 << 32
"""By which sources of two ranks differ."""


class Shape(NamedTuple):
    """How a dispatch was asked for."""

    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    do_expand: bool
    do_cpu_sync: bool


class ReceivedIds(NamedTuple):
    """Ids that arrived with rows per rank, which the caller has too, and may change. With exact
    shapes a copy is kept; static ones are for decoding, where launches count and nobody repeats a
    dispatch."""

    given: Tensor
    version: int
    copy: Tensor | None

    def known(self) -> Tensor:
        """As they arrived; not to be handed out."""
        return self.given if self.copy is None else self.copy

    def again(self, ids: Tensor | None) -> Tensor | None:
        """``ids`` for another caller, or a copy of what they were if somebody has changed them."""
        if self.copy is None:
            return ids
        same = version_of(self.given) == self.version >= 0
        return ids if same else self.copy.clone()


class CoreHandle(KeptHandle):
    """T tokens dispatched, K picks of each, N tokens received (each once), L local experts, R
    ranks, M ``num_max_tokens_per_rank``. Without ``do_cpu_sync`` N is R * M, and rows behind
    ``psum_num_recv_tokens_per_scaleup_rank[-1]`` are unspecified. Tensors are worked out when
    somebody reads them: reading asks nobody.

    Good for any number of calls, in any order, on any buffer of its generation and group, until
    the buffer that made it is destroyed.

    As in DeepEP, combine finds rows by ``recv_src_metadata`` and ``do_expand``, which a caller may
    change (in a ``copy.copy()``, say): to have summed the rows of each token itself, for instance.

    Attributes:
        received: the ids that arrived.
        do_expand, num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
        was_expanded: ``do_expand`` of the dispatch, whatever it was changed to.
        given_metadata: what a caller has read or put there; None: nothing yet.
        token_metadata_at_forward, channel_linked_list: None, as no rank relays rows.
    """

    wanted = "the EPHandle that {} returned"
    token_metadata_at_forward = channel_linked_list = None
    given_metadata: Any = None
    _as_made: tuple[Tensor, int] | None = None
    """The metadata that were read, and their version."""
    _captured = False

    def __init__(
        self,
        ep: ExpertParallel,
        native: Handle,
        shape: Shape,
        topk_idx: Tensor,
        num_scaleup_ranks: int,
        received: ReceivedIds,
    ) -> None:
        self.ep, self.native, self.received, self._topk_idx = ep, native, received, topk_idx
        self._exact, self._scaleup = shape.do_cpu_sync, num_scaleup_ranks
        self.do_expand = self.was_expanded = shape.do_expand
        self.num_experts, self.num_sms = shape.num_experts, shape.num_sms
        self.expert_alignment = shape.expert_alignment
        self.num_max_tokens_per_rank = shape.num_max_tokens_per_rank

    def ids(self) -> Tensor:
        """Ids of the dispatch ``[T, K]``, or a copy of them."""
        return self._topk_idx

    # What the host knows

    @cached_property
    def num_recv_tokens(self) -> int:
        """N."""
        size = self.ep.world_size
        if not self._exact:
            return size * self.num_max_tokens_per_rank
        return int(self.native.plan.splits[size : 2 * size].sum())

    @cached_property
    def num_recv_tokens_per_expert_list(self) -> list[int]:
        """Rows of each local expert, aligned; empty without ``do_cpu_sync``."""
        if not self._exact:
            return []
        return aligned(rows_of_experts(self.native), self.expert_alignment)

    @cached_property
    def num_expanded_tokens(self) -> int:
        """Rows with ``do_expand``: all, aligned; the most there can be without ``do_cpu_sync``."""
        if self._exact:
            return sum(self.num_recv_tokens_per_expert_list)
        picks = self.ep.config.num_topk, self.ep.config.most_local_experts
        return most_rows(self.num_recv_tokens, *picks, self.expert_alignment)

    def note_capture(self) -> None:
        """A CUDA graph that is captured has made it: have its replays make the prefix sums, too."""
        self._captured = True
        self.psum_num_recv_tokens_per_scaleup_rank  # noqa: B018
        self.psum_num_recv_tokens_per_expert  # noqa: B018

    # Tensors

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """Tokens received from the ranks up to each of a scale-up group, each token once, over all
        groups: int32 ``[num_scaleup_ranks]``. The last is N."""
        native, size = self._native(), self.ep.world_size
        if self._exact:
            counts = native.plan.splits[size : 2 * size].to(native.arrived.source.device)
        else:
            source = self._arrived[0] if self.was_expanded else native.arrived.source
            if self._scaleup == size:  # few launches, as graphs of decoding hold them
                ends = torch.arange(_RANK, (size + 1) * _RANK, _RANK, device=source.device)
                in_order = source & torch.iinfo(torch.int64).max  # those of nobody come last
                return torch.searchsorted(in_order, ends, out_int32=True)
            counts = count_keys(source >> 32, size)
        return counts.view(-1, self._scaleup).sum(0).cumsum(0).to(torch.int32)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """Rows of the local experts up to each, aligned: int32 ``[L]``. With ``do_expand`` those
        before it, aligned, and its own, unaligned."""
        counts = self.num_unaligned_recv_tokens_per_expert
        if self.was_expanded:
            offsets = self._native().arrived.expert_offsets
            return offsets[:-1] + counts
        unit = self.expert_alignment
        if unit > 1:
            counts = (counts + unit - 1).div(unit, rounding_mode="floor") * unit
        return counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def num_unaligned_recv_tokens_per_expert(self) -> Tensor:
        """Rows of each local expert: int32 ``[L]``."""
        return self._native().arrived.tokens_per_expert

    @property
    def recv_src_metadata(self) -> Tensor:
        """Of each received token: int32 ``[N, 2 + K]``. Its global index (source rank * M + token);
        source rank * K + its first pick of a local expert; with ``do_expand`` the row of each pick,
        -1 for none (else -1)."""
        if self.given_metadata is not None:
            return self.given_metadata
        made = self.metadata_as_made()
        captures = made.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._captured == captures:  # else it is of one replay, or is not yet
            self.given_metadata, self._as_made = made, (made, version_of(made))
        return made

    @recv_src_metadata.setter
    def recv_src_metadata(self, given: Any) -> None:
        self.given_metadata = given

    def as_dispatched(self, expands: bool) -> bool:
        """Whether rows can only come back as the dispatch brought them. ``expands``: what
        ``do_expand`` is now. With it whoever has read ``recv_src_metadata`` may have changed it, in
        kernels that no one sees."""
        given = self.given_metadata
        if given is None or expands is not self.was_expanded:
            return expands is self.was_expanded
        if self.was_expanded or self._as_made is None:
            return False
        made, version = self._as_made
        same = same_elements(given, made) and version_of(given) == version == version_of(made)
        return same and version >= 0

    def metadata_as_made(self) -> Tensor:
        """``recv_src_metadata`` as the dispatch left it."""
        source, picks, rows = self._arrived
        rank, token = source >> 32, source & (_RANK - 1)
        first = rank * self.num_max_tokens_per_rank + token
        second = rank * self.ep.config.num_topk + picks
        columns = torch.stack([first, second], 1).masked_fill_(source[:, None] < 0, -1)
        return torch.cat([columns, rows], 1).to(torch.int32)

    @cached_property
    def dst_buffer_slot_idx(self) -> Tensor:
        """Of each pick: the place of its token among those that this rank sent to the same rank, at
        the first pick there, else -1: int32 ``[T, K]``."""
        self._native()
        config = self.ep.config
        idx = known_picks(self.ids(), config.num_experts)
        owners = pick_owners(idx.long(), config.num_experts, config.world_size)
        same = (owners.unsqueeze(2) == owners.unsqueeze(1)).tril(-1).any(2)
        sent = places(tokens_in_ranks(idx, config.num_experts, config.world_size))
        at = sent.long().gather(1, owners.clamp(min=0))
        return at.masked_fill(same | (owners < 0), -1).to(torch.int32)

    # Working them out

    def _native(self) -> Handle:
        """The native handle, which the current stream reads now."""
        native = self.native
        if self.made_on is not None:
            here = torch.cuda.current_stream(native.arrived.source.device)
            keep_for((*native.plan, *native.arrived), here)
        return native

    def order(self) -> Tensor | None:
        """Which of these each row of ``recv_src_metadata`` is about; None: they are in order."""
        if self._exact or not self.was_expanded:
            return None
        slots = self._native().plan.slots
        nobody = slots[:, 0] < 0 if slots.shape[1] else slots.new_ones(len(slots), dtype=torch.bool)
        order = torch.sort(nobody.to(torch.uint8), stable=True).indices
        return order[: self.num_recv_tokens]

    @property
    def _arrived(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of received tokens, by source rank and then token, those of nobody last: source as in
        ``Received.source`` ``[N]``, first local pick ``[N]``, rows of the picks ``[N, K]``."""
        native = self._native()
        plan, arrived, config = native.plan, native.arrived, self.ep.config
        if not self.was_expanded:
            first = (self.received.known() >= 0).to(torch.uint8).argmax(1)
            none = first.new_full((native.num_rows, config.num_topk), -1)
            return arrived.source, first, none
        slots, picks = plan.slots, plan.picks
        if not slots.shape[1]:  # a rank without experts: nobody's rows only
            slots, picks = slots.new_full((len(slots), 1), -1), picks.new_zeros((len(slots), 1))
        order = self.order()
        if order is not None:
            slots, picks = slots[order], picks[order]
        source = take_values(arrived.source, slots[:, 0], -1)
        rows = slots.new_full((slots.shape[0], config.num_topk + 1), -1)
        rows.scatter_(1, torch.where(slots < 0, config.num_topk, picks), slots)
        return source, picks[:, 0], rows[:, : config.num_topk]


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed, as far as torch knows; -1: it does not (inference mode)."""
    return -1 if tensor.is_inference() else tensor._version


def most_rows(num_tokens: int, num_topk: int, num_local: int, alignment: int) -> int:
    """The most rows that ``num_tokens`` received tokens can be with ``do_expand``. ``num_local``:
    experts of the rank that holds most, as all ranks have to say the same.

    >>> most_rows(8, 2, 4, 1), most_rows(8, 2, 4, 16)
    (16, 80)
    """
    rows = num_tokens * min(num_topk, num_local) + num_local * (alignment - 1)
    return -(-rows // alignment) * alignment
