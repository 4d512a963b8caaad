"""DeepEP's handle tuples around the native handle. Items are worked out when somebody reads them:
reading asks nobody.

A program may keep the items alone (``ctx.save_for_backward(*handle)``) and make a tuple of them
again. So an item's memory knows its handle, and keeps it alive; a handle only knows its items as
long as somebody else has them. Nothing is left when the last item goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, SupportsIndex

import torch
from torch import Tensor

from tokenyard.api import ExpertParallel
from tokenyard.call_queue import keep_for
from tokenyard.handle import Handle
from tokenyard.routing import count_keys, tokens_in_ranks

RANKS_PER_NODE = 8
"""As DeepEP counts them."""

_TOKEN = (1 << 32) - 1


def num_nodes(num_ranks: int) -> int:
    return -(-num_ranks // RANKS_PER_NODE)


def per_node(in_ranks: Tensor) -> Tensor:
    """Which nodes each token goes to, from ``in_ranks [T, R]``: bool ``[T, nodes]``."""
    ranks = in_ranks.shape[1]
    whole = torch.nn.functional.pad(in_ranks, (0, num_nodes(ranks) * RANKS_PER_NODE - ranks))
    return whole.view(-1, num_nodes(ranks), RANKS_PER_NODE).any(2)


def known_picks(topk_idx: Tensor, num_experts: int) -> Tensor:
    """``topk_idx`` with -1 for ids out of range, which are nobody's."""
    return torch.where((topk_idx < 0) | (topk_idx >= num_experts), -1, topk_idx)


class KeptHandle:
    """A native handle whose memory is kept for the streams that read it.

    Attributes:
        source, wanted: the call that returns such, and what it is, for errors.
        ep, native: the object that dispatched, and its handle.
        made_on: the communication stream that made it; None if the caller's did.
        more_rows: absent ones at the end of the dispatched result, which the native one lacks.
    """

    source: ClassVar[str]
    wanted: ClassVar[str]
    ep: ExpertParallel
    native: Handle
    made_on: Any = None
    more_rows: int = 0
    _kept_for: tuple[Any, ...] = ()

    def keep_for(self, stream: Any) -> None:
        """Tell the allocator that calls on ``stream`` read the plan, perhaps memory of another."""
        if stream != self.made_on and stream not in self._kept_for:
            self._kept_for = (*self._kept_for, stream)
            keep_for(tuple(self.native.plan), stream)


class LazyTuple(KeptHandle, tuple[Any, ...]):
    """A tuple whose items are made when they are read. C code that does not ask finds none (Dynamo
    would take any that it finds for what is read)."""

    makers: ClassVar[tuple[Callable[[Any], Any], ...]]
    wanted = "the tuple that {} returned, or one of its items in the memory they were returned in"
    _read_on: tuple[Any, ...] = ()
    _items: dict[int, weakref.ref[Tensor]] | None = None

    @classmethod
    def around(cls, ep: ExpertParallel, native: Handle, **rest: Any) -> Any:
        """``rest``: attributes of this kind."""
        handle = tuple.__new__(cls, ())
        handle.ep, handle.native = ep, native
        vars(handle).update(rest)
        return handle

    def __getitem__(self, at: SupportsIndex | slice) -> Any:
        if isinstance(at, slice):
            return tuple(self)[at]
        place = range(len(self.makers))[at]
        if self._items is None:
            self._items = {}
        known = self._items.get(place)
        item = None if known is None else known()
        if item is None:
            item = self._make(place)
            if isinstance(item, Tensor):
                self._items[place] = weakref.ref(item)
        return item

    def _make(self, place: int) -> Any:
        if self.made_on is not None:  # this stream reads its memory now
            arrived = self.native.arrived
            here = torch.cuda.current_stream(arrived.source.device)
            if here not in self._read_on:
                self._read_on = (*self._read_on, here)
                keep_for((arrived.source, arrived.source_ranges), here)
        item = self.makers[place](self)
        if isinstance(item, Tensor) and not self.lends(place):
            # What the memory of an item knows: whose it is, its place there and its shape.
            item.untyped_storage().tokenyard_item = self, place, item.shape  # pyright: ignore[reportAttributeAccessIssue]
        return item

    def lends(self, place: int) -> bool:
        """Whether an item is a tensor of the caller's, in whose memory nothing may be noted."""
        return False

    def made(self, place: int, item: Any) -> bool:
        """Whether ``item`` is what stands at ``place``, perhaps as another tensor of its memory."""
        if not isinstance(item, Tensor) or self.lends(place):
            return same_elements(item, self[place])
        return _noted(item) == (self, place, item.shape)

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self.makers)))

    def __len__(self) -> int:
        return len(self.makers)

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _noted(tensor: Tensor) -> tuple[LazyTuple, int, torch.Size] | None:
    has_memory = tensor.layout is torch.strided
    return getattr(tensor.untyped_storage(), "tokenyard_item", None) if has_memory else None


def same_elements(given: Any, item: Any) -> bool:
    """Whether ``given`` is ``item``: tensors, if they are the same elements of the same memory."""
    if not (isinstance(given, Tensor) and isinstance(item, Tensor)):
        return type(given) is type(item) and given == item
    if given.layout is not torch.strided or given.dtype is not item.dtype:
        return False
    if given.shape != item.shape or given.stride() != item.stride():
        return False
    places = (each.untyped_storage()._cdata for each in (given, item))  # pyright: ignore
    return len({*places}) == 1 and given.storage_offset() == item.storage_offset()


def of_items(given: Any) -> Any:
    """The handle whose items a plain tuple (or list) holds; ``given`` itself if none of its items
    is a handle's. ValueError: only some are, or not in their places."""
    items: Any = given
    if isinstance(given, LazyTuple) or not isinstance(given, (tuple, list)):
        return items
    noted = [_noted(item) for item in items if isinstance(item, Tensor)]
    handle = next((item[0] for item in noted if item is not None), None)
    if handle is None:
        return items
    if len(items) != len(handle):
        raise ValueError(
            f"handle has {len(items)} items, but the dispatch that they are of returned "
            f"{len(handle)}: pass all of them"
        )
    wrong = [at for at, item in enumerate(items) if not handle.made(at, item)]
    if wrong:
        raise ValueError(
            f"handle[{wrong[0]}] is not what the dispatch returned there: pass all items of one "
            f"handle, in their order and in the memory they were returned in"
        )
    return handle


class NormalHandle(LazyTuple):
    """Handle of a normal dispatch on up to 8 ranks: 6 items.

    ``(rank_prefix_matrix [R, R], channel_prefix_matrix [R, C], recv_channel_prefix_matrix [R, C],
    recv_src_idx [N], is_token_in_rank [T, R], send_head [T, R])``, int32 and bool. C is half of the
    multiprocessors that the call was allowed; all rows count as sent through the first channel.
    With static shapes only this rank's column of ``rank_prefix_matrix`` is known, the others are
    -1.

    Attributes:
        in_ranks, topk_idx: one of them says where tokens go.
        num_sms: multiprocessors that the call was allowed.
    """

    source = "dispatch() of Buffer (DeepEP V1)"
    in_ranks: Tensor | None = None
    topk_idx: Tensor | None = None
    num_sms: int

    def is_token_in_rank(self) -> Tensor:
        if self.in_ranks is None:
            assert self.topk_idx is not None
            num_experts = self.ep.config.num_experts
            # Static shapes on GPUs have not refused others yet.
            known = known_picks(self.topk_idx, num_experts)
            self.in_ranks = tokens_in_ranks(known, num_experts, self.ep.world_size)
        return self.in_ranks

    def lends(self, place: int) -> bool:
        return self.makers[place] is NormalHandle.is_token_in_rank

    def received(self) -> Tensor:
        """Rows from each rank: int64 ``[R]``."""
        size, source = self.ep.world_size, self.native.arrived.source
        if not self.native.spec.exact:
            return count_keys(source >> 32, size)
        return self.native.plan.splits[size : 2 * size].to(source.device)

    def recv_rank_prefix_sum(self) -> Tensor:
        """Rows from the ranks up to each: int32 ``[R]``."""
        return self.received().cumsum(0).to(torch.int32)

    def rank_prefix_matrix(self) -> Tensor:
        size, device = self.ep.world_size, self.native.arrived.source.device
        between = self.native.rows_between()
        if between is not None:
            return between.cumsum(0).to(device, torch.int32)
        matrix = torch.full((size, size), -1, dtype=torch.int32, device=device)
        matrix[:, self.ep.rank] = self.recv_rank_prefix_sum()
        return matrix

    def channel_prefix_matrix(self) -> Tensor:
        return self._by_channel(self.is_token_in_rank().sum(0))

    def recv_channel_prefix_matrix(self) -> Tensor:
        before = self._by_channel(self.received())
        before[:, 0] = 0
        return before

    def recv_src_idx(self) -> Tensor:
        return (self._keys() & _TOKEN).to(torch.int32)

    def _keys(self) -> Tensor:
        """Source of each row: its rank << 32 | its token there; -1 for none."""
        return longer(self.native.arrived.source, self.more_rows, -1)

    def send_head(self) -> Tensor:
        return places(self.is_token_in_rank())

    # More than one node

    def rdma_channel_prefix_matrix(self) -> Tensor:
        return self._by_channel(per_node(self.is_token_in_rank()).sum(0))

    def recv_src_meta(self) -> Tensor:
        """Source rank and token of each row: int32 ``[N, 2]``."""
        source = self._keys()
        return torch.stack([source >> 32, source & _TOKEN], dim=1).to(torch.int32)

    def send_rdma_head(self) -> Tensor:
        return places(per_node(self.is_token_in_rank()))

    def nothing(self) -> None:
        """Of rows that are forwarded."""

    def _by_channel(self, counts: Tensor) -> Tensor:
        """All are in the first channel: int32 ``[len(counts), C]``."""
        return counts.to(torch.int32).unsqueeze(1).repeat(1, max(self.num_sms // 2, 1))

    makers = (
        rank_prefix_matrix,
        channel_prefix_matrix,
        recv_channel_prefix_matrix,
        recv_src_idx,
        is_token_in_rank,
        send_head,
    )


class InternodeHandle(NormalHandle):
    """Handle of a normal dispatch on more than 8 ranks: 10 items, of which ``recv_rdma_*`` and
    ``send_nvl_head``, about rows that a rank forwards for others, are None: nobody forwards here.

    ``(is_token_in_rank, rdma_channel_prefix_matrix, gbl_channel_prefix_matrix,
    recv_rdma_channel_prefix_matrix, recv_rdma_rank_prefix_sum, recv_gbl_channel_prefix_matrix,
    recv_gbl_rank_prefix_sum, recv_src_meta, send_rdma_head, send_nvl_head)``.
    """

    makers = (
        NormalHandle.is_token_in_rank,
        NormalHandle.rdma_channel_prefix_matrix,
        NormalHandle.channel_prefix_matrix,
        NormalHandle.nothing,
        NormalHandle.nothing,
        NormalHandle.recv_channel_prefix_matrix,
        NormalHandle.recv_rank_prefix_sum,
        NormalHandle.recv_src_meta,
        NormalHandle.send_rdma_head,
        NormalHandle.nothing,
    )


def kind_for(num_ranks: int) -> type[NormalHandle]:
    return NormalHandle if num_ranks <= RANKS_PER_NODE else InternodeHandle


def longer(rows: Tensor, more: int, value: int = 0) -> Tensor:
    """``rows`` and ``more`` of ``value`` behind them."""
    if not more:
        return rows
    end = torch.full((more, *rows.shape[1:]), value, dtype=rows.dtype, device=rows.device)
    return torch.cat((rows, end))


def places(goes: Tensor) -> Tensor:
    """Of each token among those that go to the same place, -1 if it does not go there."""
    return torch.where(goes, goes.cumsum(0) - 1, -1).to(torch.int32)


class LowLatencyHandle(LazyTuple):
    """Handle of a low-latency dispatch: 5 items.

    ``(packed_recv_src_info int32 [L, R * M], packed_recv_layout_range int64 [L, R], M, hidden,
    num_experts)``: source token of each row (-1 on padding), and ``begin << 32 | count`` of each
    source rank's rows. ``next_buffer``: what ``get_next_low_latency_combine_buffer`` gave out.
    """

    source = "low_latency_dispatch() of Buffer (DeepEP V1)"
    next_buffer: Tensor | None = None

    def packed_recv_src_info(self) -> Tensor:
        config = self.ep.config
        shape = config.num_local_experts, config.padded_rows
        return (self.native.arrived.source & _TOKEN).to(torch.int32).view(shape)

    def packed_recv_layout_range(self) -> Tensor:
        ranges = self.native.arrived.source_ranges.long()
        return ranges[..., 0] << 32 | ranges[..., 1]

    makers = (
        packed_recv_src_info,
        packed_recv_layout_range,
        lambda self: self.ep.config.max_tokens_per_rank,
        lambda self: self.ep.config.hidden,
        lambda self: self.ep.config.num_experts,
    )
