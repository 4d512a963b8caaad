"""``Buffer.runtime``: where a rank stands, as DeepEP's compiled object tells it."""

from __future__ import annotations

from typing import Any

import torch

from tokenyard.deep_ep.handles import RANKS_PER_NODE, num_nodes
from tokenyard.deep_ep.streams import Streams


class Runtime:
    """Place of ``rank`` among ``num_ranks``, counted in nodes of 8."""

    def __init__(self, rank: int, num_ranks: int, streams: Streams) -> None:
        self._rank, self._num_ranks, self._streams = rank, num_ranks, streams

    def is_available(self) -> bool:
        return True

    def get_num_rdma_ranks(self) -> int:
        """Nodes."""
        return num_nodes(self._num_ranks)

    def get_rdma_rank(self) -> int:
        """This rank's node."""
        return self._rank // RANKS_PER_NODE

    def get_root_rdma_rank(self, global_: bool) -> int:
        """First rank that stands at the same place in its node, or (``global_``) its number."""
        return self._rank % RANKS_PER_NODE if global_ else 0

    def get_local_device_id(self) -> int:
        """CUDA device, -1 without."""
        return torch.cuda.current_device() if torch.cuda.is_available() else -1

    def get_comm_stream(self) -> Any:
        return self._streams.comm()
