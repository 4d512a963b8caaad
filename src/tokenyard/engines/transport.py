"""What moves bytes between ranks, and where the rows of each peer stand in a buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each peer's rows stand in the two buffers: starts and counts, in rows, one of each per
    rank.
    """

    send_starts: list[int]
    send_counts: list[int]
    recv_starts: list[int]
    recv_counts: list[int]

    @staticmethod
    def among(
        peers: range,
        num_ranks: int,
        send_counts: list[int],
        recv_counts: list[int],
        stride: int | None = None,
    ) -> Spans:
        """Rows to and from ``peers`` only, one count of each per peer.

        Blocks follow each other without gaps, or are ``stride`` rows long, of which the first
        ``counts`` are in use.
        """

        def spread(values: list[int]) -> list[int]:
            everybody = [0] * num_ranks
            everybody[peers.start : peers.stop : peers.step] = values
            return everybody

        def starts(counts: list[int]) -> list[int]:
            return spread(_starts(counts if stride is None else [stride] * len(counts)))

        return Spans(
            starts(send_counts), spread(send_counts), starts(recv_counts), spread(recv_counts)
        )

    def reversed(self) -> Spans:
        """The way back: what was received is sent."""
        return Spans(self.recv_starts, self.recv_counts, self.send_starts, self.send_counts)


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


class Transport(Protocol):
    """Moves bytes between ranks. ``swap`` and ``exchange`` start at once and return the function
    that finishes, so that there is work to do while bytes fly.

    Attributes:
        counts_on_host: whether headers are cheap, so that the host knows counts before rows move.
        last_wait: seconds from the start of the last exchange until each rank's rows had come.
    """

    counts_on_host: bool
    last_wait: list[float]

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """Send ``header[d]`` to each rank d; finishes with what each sent here: int64 ``[R,
        words]`` on the CPU.
        """
        ...

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """Move rows: block d of ``send`` to rank d, into its block for this rank of ``recv`` (uint8
        ``[rows, bytes]``).
        """
        ...

    def awaited(self, call: int) -> int | None:
        """A rank that waits for this one in a ``call`` of this number, which this one has still to
        make.
        """
        ...

    def interrupt(self, text: str) -> None:
        """This rank's call was ended from outside: tell the others why, and end what they wait for
        in vain.
        """
        ...

    def close(self) -> None: ...
