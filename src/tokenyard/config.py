"""What every rank of one ``ExpertParallel`` is made with."""

from __future__ import annotations

from dataclasses import dataclass

from tokenyard.routing import expert_bounds, expert_share
from tokenyard.topology import Topology

MOST_MATRIX_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of an object. ``timeout``: seconds; ``topology``: None of no grid; ``absent``: ranks
    that are gone, of which this epoch has no rows and no experts."""

    num_experts: int
    hidden: int
    num_topk: int
    max_tokens_per_rank: int
    rank: int
    world_size: int
    timeout: float
    topology: Topology | None = None
    absent: tuple[int, ...] = ()

    @property
    def members(self) -> list[int]:
        """Ranks that take part."""
        return [rank for rank in range(self.world_size) if rank not in self.absent]

    @property
    def bounds(self) -> list[int]:
        """First expert of each rank, and the end."""
        return expert_bounds(self.num_experts, self.world_size)

    @property
    def num_local_experts(self) -> int:
        # As in bounds, which calls need not make.
        share, extra = expert_share(self.num_experts, self.world_size)
        return share + (self.rank < extra)

    @property
    def most_local_experts(self) -> int:
        """Experts of the rank that holds most."""
        return -(-self.num_experts // self.world_size)

    @property
    def matrix_ranks(self) -> int:
        """R if every rank learns the rows from every rank to every rank, else 0."""
        return self.world_size if self.world_size <= MOST_MATRIX_RANKS else 0

    @property
    def padded_rows(self) -> int:
        """Rows of one expert's block in ``EXPERT_PADDED``: ``R * M``."""
        return self.world_size * self.max_tokens_per_rank
