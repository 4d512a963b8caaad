"""Results of fresh dispatches in a heap, to which peers write their rows: without rings, and
without a rule of how long a result lasts. Where multiprocessors are few, and rows have no scales:
else rings are as fast.

A rank takes a block for as many rows as it expects, and tells where it is with its counts. If every
rank awaits its rows in a block, peers write there. If one has none, rows go through rings, in all
ranks. They launch before they know: so by what the last such call has told all of them alike, and
once more if it was wrong.

A cached dispatch is launched to heaps if its fresh one was there, and through rings behind that:
one of the two finds that it has nothing to do (``kernels/two_direct.py``), as ranks learn only from
each other's announcements whether all have a block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenyard.engines.budget import LEAST_BYTES
from tokenyard.engines.in_place import Target, launch_in_place, launch_unpack
from tokenyard.engines.outputs import CallPlan, Counted, Known, result_of, sent_of
from tokenyard.engines.signatures import Signature
from tokenyard.engines.status import StatusMonitor, pack_routing
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.errors import PeerTimeout
from tokenyard.handle import Arrived
from tokenyard.rows import Payload
from tokenyard.types import Layout

_UNIT = 256
"""Bytes in which a plan tells places; parts of a block are multiples."""
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
        spec, others = signature.spec, signature.fingerprint.in_place or signature.sent.scale_words
        return bool(self._wanted) and spec.exact and spec.layout is Layout.FLAT and not others

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
        return self._heap.take(_before_rows(signature) + room * signature.sent.payload_bytes)

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
        rows = int(counts[self._noted_at])
        return rows > 0 and rows * signature.sent.payload_bytes >= self.least

    def place(self, block: Tensor | None, signature: Signature) -> int:
        """What the plan tells of ``block``: see ``kernels/header_validation.py``."""
        if block is None or not signature.in_heap:
            return 0 if block is None else -1
        assert self._heap is not None
        rows_at = block.data_ptr() - self._heap.begin + _before_rows(signature)
        return rows_at // _UNIT + 1

    def rows_in(self, block: Tensor, signature: Signature, num_rows: int) -> Tensor:
        """Uninitialised rows of a result over ``block``, which lives as long as they do."""
        sent, at = signature.sent, _before_rows(signature) // signature.sent.dtype.itemsize
        rows: Any = torch.empty(0, dtype=sent.dtype, device=block.device)
        return rows.set_(block.untyped_storage(), at, (num_rows, sent.hidden), (sent.hidden, 1))

    def write(
        self,
        block: Tensor,
        payload: Payload,
        counted: Counted,
        plan: CallPlan,
        arrived: Arrived,
        signature: Signature,
        num_rows: int,
    ) -> Payload:
        """Launch rows to the blocks of all ranks, of which ``block``, for ``num_rows``, is mine."""
        workspace, route = self._workspace, counted.route.data_ptr()
        out = Payload(self.rows_in(block, signature, num_rows), None)
        target = self._target(out.x.data_ptr(), metadata_at=-_before_rows(signature))
        workspace.memory.gate()
        moved = sent_of(payload, counted.meta_at)
        launch_in_place(workspace, signature, target, route, moved, signature.tag, counted.tokens)
        result = result_of(out, plan, arrived)
        launch_unpack(workspace, signature, target, route, result)
        return out

    def take_again(self, signature: Signature, num_rows: int) -> Tensor | None:
        """A block for ``num_rows`` rows of a cached dispatch; None: there is none, or no row
        comes."""
        assert self._heap is not None
        return self._heap.take(num_rows * signature.sent.payload_bytes) if num_rows else None

    def rewrite(
        self,
        block: Tensor | None,
        payload: Payload,
        known: Known,
        signature: Signature,
        tag: int,
        num_rows: int,
    ) -> None:
        """Launch rows of a cached dispatch to the blocks of all ranks, if each has one that needs
        one; ``block`` is mine for ``num_rows``."""
        heap, workspace = self._heap, self._workspace
        assert heap is not None
        awaited = 0 if num_rows else 1  # no row comes there
        if block is not None:
            awaited = (block.data_ptr() - heap.begin) // _UNIT + 1
        target = self._target(0, awaited=awaited)
        workspace.memory.gate()
        sent, tokens = sent_of(payload), known.num_tokens
        tag ^= pack_routing(1)  # a rank whose handle of the same routing is not of heaps: found out
        launch_in_place(workspace, signature, target, known.route_at, sent, tag, tokens)
        self._monitor.meets()  # what goes through rings behind it

    def _target(self, rows: int, *, metadata_at: int = 0, awaited: int = 0) -> Target:
        """All ranks' heaps; ``rows``: this rank's, if metadata is to be unpacked."""
        heap = self._heap
        assert heap is not None
        return Target(
            heap.addresses.data_ptr(),
            rows,
            scales_at=0,
            metadata_at=metadata_at,
            heap_bytes=heap.num_bytes,
            awaited=awaited,
        )


def _before_rows(signature: Signature) -> int:
    """Bytes of a block before its rows, where their metadata is. Alike on all ranks, whatever room
    each has for rows."""
    return -(-signature.most_rows * 4 * signature.row_layout.meta_words // _UNIT) * _UNIT
