"""Combine without rings: rows are pushed to a buffer at their tokens' owner.

Nobody waits for room or returns credits, and every program has work: that is faster. The buffer has
a budget. A combine takes it if every rank's rows fit, which all know from the plan; else rings,
which hold any batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch

from tokenyard.arguments import LARGEST
from tokenyard.config import Config
from tokenyard.engines.in_place import GrowingRegion
from tokenyard.engines.outputs import Known
from tokenyard.engines.rings import RowLayout
from tokenyard.engines.signatures import Signature
from tokenyard.engines.tuning import most_rows_back
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.kernels import region
from tokenyard.kernels.combine import Partials, Sums
from tokenyard.kernels.push import bind_push, chunks_of
from tokenyard.kernels.stand_in import launch_call


class CombineOptions(NamedTuple):
    """What combines of one signature may differ in."""

    dtypes: tuple[torch.dtype, ...]  # of up to two terms that are added
    placed: bool  # rows are by expert,
    weighted: bool  # and multiplied by weights before they are summed
    picks: int  # weights per arrival row that are summed too; 0: none


class ReceiveBuffer:
    """The receive buffer of one object, of ``num_bytes`` to begin with. Making one is collective if
    there are any; with none only combines in place use it, and make it."""

    def __init__(
        self, config: Config, workspace: PeerWorkspace, growing: GrowingRegion, num_bytes: int
    ) -> None:
        self._config, self._workspace, self._growing = config, workspace, growing
        self._always, at = num_bytes > 0, cast("Any", region).receive_rows_at
        self._rows_at: int = at(config.world_size, chunks_of(workspace))
        self.needed_at = 2 * config.world_size + 1 + config.matrix_ranks**2  # in ``Plan.splits``
        if num_bytes:
            growing.room(num_bytes)

    def needed(self, rows: Any, most_tokens: int) -> int:
        """Rows that come back to the rank that gets most, which ``Plan.splits`` keep; -1 where that
        is of no use. ``rows``: a numpy array, rows from each rank to each, of at most
        ``most_tokens`` tokens."""
        if not self._always:
            return -1
        limit = self._config.max_tokens_per_rank  # there are no flags for more
        if most_tokens > limit and rows.max() > limit:
            return LARGEST
        return max((np.add.reduce(rows, 1) - rows.diagonal()).tolist())

    def takes(self, counts: Any, row_layout: RowLayout, picks: int, *, exact: bool) -> bool:
        """Whether all ranks' rows of a combine fit, the same on all ranks. ``counts``:
        ``Plan.splits``, as a numpy array; ``picks``: weights per row that are summed too."""
        if not self._always:
            return False
        needed = int(counts[self.needed_at]) if exact else most_rows_back(self._config)
        return 0 <= needed <= self._most_rows(row_layout, picks)

    def push(
        self, known: Known, signature: Signature, tag: int, parts: Partials, sums: Sums,
        how: CombineOptions, *, grow: bool,
    ) -> None:  # fmt: skip
        """Launch rows to their owners, and the sums there.

        Args:
            parts, sums: as of a combine through rings.
            grow: make the buffer as large as any batch of M tokens per rank needs. Collective.
        """
        workspace, row_layout, picks = self._workspace, signature.row_layout, how.picks
        if grow:
            most = most_rows_back(self._config) * (row_layout.payload_bytes + 4 * picks)
            self._growing.room(self._rows_at + -(-most // 256) * 256, tag)
        weights_at = self._rows_at + self._most_rows(row_layout, picks) * row_layout.payload_bytes
        launch = signature.bound((how, picks and weights_at), lambda: bind_push(
            workspace, row_layout, signature.dtype, signature.slots_per_row if how.placed else 1,
            picks, how.dtypes, by_expert=how.placed, weighted=how.weighted, weights_at=weights_at,
        ))  # fmt: skip
        receive_buffers = self._growing.regions[-1].addresses.data_ptr()
        data = known.route_at, receive_buffers, parts, sums
        launch_call(launch, workspace, data, tag, known.num_tokens)
        workspace.memory.settle()

    def _most_rows(self, row_layout: RowLayout, picks: int) -> int:
        """Rows that the buffer holds."""
        row_bytes = row_layout.payload_bytes + 4 * picks
        return max(0, self._growing.num_bytes - self._rows_at) // row_bytes
