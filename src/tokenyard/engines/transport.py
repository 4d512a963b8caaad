"""What moves bytes and rows between ranks, and where each peer's rows stand in a buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tokenyard.engines.failures import IN_ORDER, Report
from tokenyard.rows import RowFormat
from tokenyard.stats import Stats


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each peer's rows stand in two buffers: starts and counts in rows, one per rank."""

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
        """Rows to and from ``peers`` only, one count of each per peer. Blocks follow each other
        without gaps, or are ``stride`` rows long, of which the first ``counts`` are in use."""

        def spread(values: list[int]) -> list[int]:
            everybody = [0] * num_ranks
            everybody[peers.start : peers.stop : peers.step] = values
            return everybody

        def starts(counts: list[int]) -> list[int]:
            blocks = counts if stride is None else [stride] * len(counts)
            return spread([*accumulate(blocks[:-1], initial=0)])

        return Spans(
            starts(send_counts), spread(send_counts), starts(recv_counts), spread(recv_counts)
        )

    def reversed(self) -> Spans:
        """The way back: what was received is sent."""
        return Spans(self.recv_starts, self.recv_counts, self.send_starts, self.send_counts)


class Transport(Protocol):
    """Moves bytes between ranks. ``swap`` and ``exchange`` start at once and return the function
    that finishes, so that there is work to do while bytes fly.

    Attributes:
        counts_on_host: whether headers are cheap, so that the host knows counts before rows move.
        last_wait: seconds from the start of the last exchange until each rank's rows had come.
        waits: as :class:`Stats`; totals are added there.
        headers: what the last swap brings, on the device that it comes to.
    """

    counts_on_host: bool
    last_wait: list[float]
    waits: dict[str, list[float]]
    headers: Tensor

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """Send ``header[d]`` to each rank d; finishes with what each sent here: int64 ``[R,
        words]`` on the CPU."""
        ...

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """Move rows: block d of ``send`` to rank d, into its block for this rank of ``recv`` (uint8
        ``[rows, bytes]``)."""
        ...

    def awaited(self, call: int) -> int | None:
        """A rank that waits for this one in ``call``, a number that this one has still to make."""
        ...

    def interrupt(self, text: str) -> None:
        """This rank was ended from outside: tell the others why, and end what they wait for."""
        ...

    def failure(self) -> Report | None:
        """The report of the first rank that gave up, if any did; asks the store."""
        ...

    def close(self, why: str = IN_ORDER) -> None: ...


class RowTransport:
    """Moves rows of one object: they are counted, and lie in host memory kept between calls."""

    def __init__(self, transport: Transport, stats: Stats) -> None:
        self._transport, self._stats = transport, stats
        transport.waits = stats.waits
        self._staging: dict[str, Tensor] = {}

    @property
    def counts_on_host(self) -> bool:
        """Whether the transport knows numbers of rows when it moves them, whatever the shapes."""
        return self._transport.counts_on_host

    @property
    def num_bytes(self) -> int:
        """Host memory kept between calls."""
        return sum(buffer.numel() for buffer in self._staging.values())

    def buffer(self, name: str, row: RowFormat, num_rows: int, device: torch.device) -> Tensor:
        """Room for rows. Host memory is kept: fresh pages cost more than the copy into them."""
        if device.type != "cpu":
            return row.buffer(num_rows, device)
        need = num_rows * row.row_bytes
        held = self._staging.get(name)
        if held is None or held.numel() < need:
            self._staging.pop(name, None)
            with torch.inference_mode(False):  # kept for calls outside of it too
                held = self._staging[name] = torch.empty(need, dtype=torch.uint8, device="cpu")
        return held[:need].view(num_rows, row.row_bytes)

    def move(
        self, send: Tensor, recv: Tensor, spans: Spans, op: str, call: int
    ) -> Callable[[], None]:
        """Start to move rows; the function returned waits for them."""
        arrived = self._transport.exchange(send, recv, spans, f"{op} #{call}")

        def finish() -> None:
            arrived()
            self._stats.record(
                op, spans.send_counts, spans.recv_counts, send.shape[1], self._transport.last_wait
            )

        return finish

    def close(self) -> None:
        self._staging.clear()
