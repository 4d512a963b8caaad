"""Results of dispatches in a heap, to which peers write their rows: without rings, and without a
rule of how long a result lasts.

A rank takes a block for as many rows as it expects, and tells where it is with its counts. If every
rank awaits its rows in a block, peers write there. If one has none, rows go through rings, in all
ranks. They launch before they know: so by what the last such call has told all of them alike, and
once more if it was wrong.

A cached dispatch is launched to heaps if its fresh one was there, and through rings behind that:
one of the two finds that it has nothing to do (``kernels/two_direct.py``), as ranks learn only from
each other's announcements whether all have a block.

A block is ``[metadata | scales | rows]``. The first two have room for as many rows as any rank may
get, so they lie as far before the rows on all ranks. A result's rows stay in the block. Its scales
are copied out, as metadata is: two results of one operator must not share a storage.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from tokenyard.engines.in_place import Target, store_rows
from tokenyard.engines.outputs import CallPlan, Known
from tokenyard.engines.signatures import Signature
from tokenyard.engines.status import StatusMonitor, pack_routing
from tokenyard.engines.tuning import LEAST_BYTES
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.errors import PeerTimeout
from tokenyard.kernels.structs import Payload as Sent
from tokenyard.kernels.structs import Result
from tokenyard.memory.heap import Heap
from tokenyard.types import Layout

_UNIT = 256
"""Bytes in which a plan tells places; parts of a block are multiples."""
_MOST_BEFORE = 8 << 30
"""Bytes before rows: kernels count 4-byte words of scales in 32 bits."""
LACKS_ROOM, LACKS_BLOCK = 1, 2
"""Bits of what the plan tells the host: no row has moved; some rank has no block."""


class ResultHeap:
    """The heap of one object, of ``num_bytes``; 0: there is none. ``noted_at``: the place in
    ``Plan.splits`` of what :meth:`note` keeps."""

    least = LEAST_BYTES

    def __init__(
        self, workspace: PeerWorkspace, monitor: StatusMonitor, num_bytes: int, noted_at: int
    ) -> None:
        self._workspace, self._monitor, self._noted_at = workspace, monitor, noted_at
        self._wanted, self._heap = num_bytes, None

    @property
    def num_bytes(self) -> int:
        """That the heap takes now; it is made when a call could have used it."""
        return 0 if self._heap is None else self._heap.num_bytes

    def close(self) -> None:
        """Let go of the heap. It lasts as long as results in it."""
        self._wanted, self._heap = 0, None

    def holds(self, signature: Signature) -> bool:
        """Whether results of such calls may lie in the heap."""
        spec, in_place = signature.spec, signature.fingerprint.in_place
        return bool(self._wanted) and spec.exact and spec.layout is Layout.FLAT and not in_place

    def prepare(self, signature: Signature) -> None:
        """Make the heap behind a call that :meth:`holds`, unless it is there. Collective."""
        if self._heap is not None or not self._is_large(signature) or self._wanted < self.least:
            return
        try:
            heap = self._workspace.memory.heap(self._wanted)
        except PeerTimeout as lost:
            raise self._monitor.attributed(lost) from None
        except RuntimeError:  # on all ranks: one is short of memory, or its torch is too old
            self._wanted = 0
            return
        if heap.take(self._wanted // 2) is None:  # the allocator's settings forbid it here
            self._wanted = 0
        else:
            self._heap = heap

    def take(self, signature: Signature, room: int) -> Tensor | None:
        """A block for ``room`` rows; None: there is none, or no number of rows."""
        most = signature.most_rows  # before rows there is room for no more
        if self._heap is None or not 0 < room <= most or not self.counts(signature):
            return None
        return self.block(signature, room) if _fits(self._heap, signature) else None

    def counts(self, signature: Signature) -> bool:
        """Whether statistics tell where the result of such a call was."""
        return self.holds(signature) and self._is_large(signature)

    def _is_large(self, signature: Signature) -> bool:
        """The same on all ranks."""
        return signature.most_rows * signature.sent.payload_bytes >= self.least

    def note(self, counts: Any, signature: Signature, *, in_heap: bool) -> None:
        """Keep where the rows of a fresh dispatch went in its plan's ``counts``: the most that a
        rank may get; 0: through rings. The same on all ranks."""
        counts[self._noted_at] = signature.most_rows if in_heap else 0

    def was_in_heap(self, counts: Any, signature: Signature) -> bool:
        """Whether the fresh dispatch of the plan with ``counts`` wrote to heaps, and a cached one
        of this signature may, whose rows are not too few bytes. The same on all ranks."""
        if self._heap is None or not self.holds(signature):
            return False
        signature.most_rows = int(counts[self._noted_at])
        large = signature.most_rows > 0 and self._is_large(signature)
        return large and _fits(self._heap, signature)

    def place(self, block: Tensor | None, signature: Signature) -> int:
        """What the plan tells of ``block``: see ``kernels/exchange.py``."""
        if block is None or not signature.in_heap:
            return 0 if block is None else -1
        assert self._heap is not None
        return self._awaited(block.data_ptr() - self._heap.begin, signature)

    def rows_in(self, block: Tensor, signature: Signature, num_rows: int) -> Tensor:
        """Uninitialised rows of a result over ``block``, which lives as long as they do."""
        sent, at = signature.sent, -_places_of(signature)[1] // signature.sent.dtype.itemsize
        rows: Any = torch.empty(0, dtype=sent.dtype, device=block.device)
        return rows.set_(block.untyped_storage(), at, (num_rows, sent.hidden), (sent.hidden, 1))

    def write(self, signature: Signature, plan: CallPlan, sent: Sent, result: Result) -> None:
        """Launch rows to the blocks of all ranks, of which that of ``result`` is mine."""
        target, tag = self._target(signature, rows=result.rows), signature.tag
        store_rows(self._workspace, signature, target, cast("Known", plan), sent, tag, result)

    def block(self, signature: Signature, num_rows: int) -> Tensor | None:
        """A block for ``num_rows`` rows and what lies before them; None: no room, or no row."""
        num_bytes = num_rows * signature.sent.payload_bytes - _places_of(signature)[1]
        return self._heap.take(num_bytes) if self._heap is not None and num_rows else None

    def rewrite(
        self,
        block: Tensor | None,
        sent: Sent,
        known: Known,
        signature: Signature,
        tag: int,
        num_rows: int,
    ) -> None:
        """Launch rows of a cached dispatch to the blocks of all ranks, if each has one that needs
        one; ``block`` is mine for ``num_rows``."""
        assert self._heap is not None
        # where no row comes there is no block, and any place will do
        begin = 0 if block is None else block.data_ptr() - self._heap.begin
        awaited = 0 if num_rows and block is None else self._awaited(begin, signature)
        tag ^= pack_routing(1)  # a rank whose handle of the same routing is not of heaps: found out
        target = self._target(signature, awaited=awaited)
        store_rows(self._workspace, signature, target, known, sent, tag)
        self._monitor.meets()  # what goes through rings behind it

    def _awaited(self, begin: int, signature: Signature) -> int:
        """Of the rows of a block that begins at byte ``begin`` of the heap."""
        return (begin - _places_of(signature)[1]) // _UNIT + 1

    def _target(self, signature: Signature, *, rows: int = 0, awaited: int = 0) -> Target:
        """All ranks' heaps; ``rows``: this rank's, if metadata is to be unpacked."""
        heap, places = self._heap, _places_of(signature)
        assert heap is not None
        return Target(heap.addresses.data_ptr(), rows, *places, heap.num_bytes, awaited)


def _fits(heap: Heap, signature: Signature) -> bool:
    """Whether there is room for what lies before rows; the same on all ranks."""
    return -_places_of(signature)[1] <= min(heap.num_bytes, _MOST_BEFORE)


def _places_of(signature: Signature) -> tuple[int, int]:
    """Bytes from the rows of a block to their scales and metadata: before them, alike on all ranks,
    whatever room each has for rows."""
    most, layout = signature.most_rows, signature.row_layout
    scales_at = -most * 4 * layout.scale_words // _UNIT * _UNIT
    return scales_at, scales_at + -most * 4 * layout.meta_words // _UNIT * _UNIT
