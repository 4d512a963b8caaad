"""What an object has done so far, as counted by its engine."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Stats:
    """Totals since construction; one entry per rank in each list.

    Attributes:
        calls: exchanges of rows by name ("dispatch", "cached dispatch", "combine").
        rows_sent, rows_received: rows to and from each rank, this one included.
        bytes_sent, bytes_received: bytes that crossed a wire, so 0 for this rank.
        last_wait: seconds from the start of the last exchange until each rank's rows had come (nan if the backend hides it).
    """

    rank: int
    calls: dict[str, int] = field(default_factory=dict[str, int])
    rows_sent: list[int]
    rows_received: list[int]
    bytes_sent: list[int]
    bytes_received: list[int]
    last_wait: list[float]

    @classmethod
    def zeros(cls, rank: int, world_size: int) -> Stats:
        none = [0] * world_size
        return cls(
            rank=rank,
            rows_sent=none[:],
            rows_received=none[:],
            bytes_sent=none[:],
            bytes_received=none[:],
            last_wait=[0.0] * world_size,
        )

    def copy(self) -> Stats:
        """The counters as they are now."""
        return deepcopy(self)

    def record(self, op: str, sent: list[int], received: list[int], row_bytes: int, last_wait: list[float]) -> None:
        """Count one exchange of rows of ``row_bytes`` bytes."""
        self.calls[op] = self.calls.get(op, 0) + 1
        self.last_wait = list(last_wait)
        for peer, (out, into) in enumerate(zip(sent, received, strict=True)):
            self.rows_sent[peer] += out
            self.rows_received[peer] += into
            if peer != self.rank:
                self.bytes_sent[peer] += out * row_bytes
                self.bytes_received[peer] += into * row_bytes
