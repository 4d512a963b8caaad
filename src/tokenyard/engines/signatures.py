"""What all calls of one signature share, worked out once, so that a launch costs little."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.plans import num_result_rows
from tokenyard.engines.rings import RowLayout, meta_words, row_layout_of
from tokenyard.engines.status import pack
from tokenyard.formats import row_of
from tokenyard.handle import Spec
from tokenyard.header import CallKind, Fingerprint
from tokenyard.rows import RowFormat
from tokenyard.types import Layout, Quantize

Launch = Callable[..., None]


@dataclass(slots=True, eq=False, kw_only=True)
class Signature:
    """What dispatches or combines of one signature share. ``fingerprint``, ``words`` and ``tag``
    are what a call tells the others."""

    spec: Spec
    mode: Quantize | None
    weighted: bool  # whether weights ride along (fresh dispatch)
    fingerprint: Fingerprint  # its ``call`` is set anew each time
    words: Any  # they begin the header
    tag: int  # without the routing
    row_layout: RowLayout  # of a row on the wire
    dtype: torch.dtype
    sent: RowFormat  # of a row of the result
    experts: bool  # whether the layout has expert blocks
    padding: bool  # whether blocks end in rows of zeros
    holes: bool  # whether some result rows have no source (fresh dispatch)
    width: int  # of ``Plan.slots``
    static_rows: tuple[int, int]  # arrival rows and result rows of static shapes
    # tokens of the last call, and rows given to the result of a like one before counts are known
    room: tuple[int, int] = (-1, 0)
    # both are the same on all ranks: whether the next such call launches rows to blocks of heaps,
    # and rows for which a block has room before its rows
    in_heap: bool = False
    most_rows: int = 0
    launches: dict[Any, Launch] = field(default_factory=dict[Any, Launch])  # see :meth:`bound`
    ahead: Any = None  # ``outputs.Ahead`` of such a call
    blank: Any = None  # ``outputs.Blank`` of a static call, once it was needed
    # so far: such calls, and rows to and from each rank as far as the host knows
    calls: int = 0
    rows: Any = 0
    told: tuple[int, Any] = (0, 0)  # of these two, what statistics have

    @property
    def slots_per_row(self) -> int:
        """``width`` as kernels take it. A rank without experts has none; no row comes there."""
        return max(1, self.width)

    def bound(self, key: Any, bind: Callable[[], Launch]) -> Launch:
        """The launch ``key`` of such calls. ``bind`` makes it once, and may wait for the device."""
        launch = self.launches.get(key)
        if launch is None:
            launch = self.launches[key] = bind()
        return launch

    def count(self, splits: Any) -> None:
        """Count a call. ``splits``: rows to each rank, then from each."""
        self.calls += 1
        if self.spec.exact:
            self.rows += splits

    def room_for(self, tokens: int) -> int:
        """Rows of a fresh result before counts are known, so that rows move at once; 0: wait."""
        flat = self.spec.exact and not self.experts and not self.fingerprint.in_place
        return self.room[1] if flat and self.room[0] == tokens else 0

    def learn_room(self, tokens: int, num_rows: int) -> None:
        """``tokens`` brought ``num_rows``. A room that is about right stays: it is made ahead."""
        least, enough = num_rows + num_rows // 128 + 8, num_rows + num_rows // 32 + 32
        if self.room[0] != tokens or not least <= self.room[1] <= enough + num_rows // 32:
            self.room = tokens, enough


def signature_of(kind: CallKind, config: Config) -> Signature:
    """The signature of a call. ``weighted``: weights ride along, ``raw``, or weights reduced."""
    op, payload, spec, mode, weighted, *_ = kind
    fingerprint = head.fingerprint_of(kind)
    experts, fresh = spec.layout is not Layout.FLAT, op == head.DISPATCH
    most = config.padded_rows
    padding = spec.layout is Layout.EXPERT_MAJOR and spec.expert_alignment > 1
    words = meta_words(config.num_topk, experts=experts, weighted=weighted)
    return Signature(
        spec=spec,
        mode=mode,
        weighted=weighted and fresh,
        fingerprint=fingerprint,
        words=np.array(head.words_of(fingerprint, 0)),
        tag=pack(fingerprint, config),
        row_layout=row_layout_of(payload, mode, words if fresh else 0),
        dtype=payload.x.dtype,
        sent=row_of(payload, mode),
        experts=experts,
        padding=padding,
        holes=not spec.exact or spec.layout is Layout.EXPERT_PADDED or padding,
        width=min(config.num_topk, config.num_local_experts) if experts else 1,
        rows=np.zeros(2 * config.world_size, dtype=np.int64),
        static_rows=(0, 0) if spec.exact else (most, num_result_rows(spec, config, None, most)),
    )
