"""Rows on their way over a transport: counted, and in host memory that is kept between calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard.engines.transport import Spans, Transport
from tokenyard.rows import RowFormat
from tokenyard.stats import Stats


class RowTransport:
    """Moves rows of one object."""

    def __init__(self, transport: Transport, stats: Stats) -> None:
        self._transport, self._stats = transport, stats
        self._staging: dict[str, Tensor] = {}

    @property
    def counts_on_host(self) -> bool:
        """Whether the transport knows numbers of rows when it moves them, whatever the shapes."""
        return self._transport.counts_on_host

    @property
    def num_bytes(self) -> int:
        """Host memory kept between calls."""
        return sum(buffer.numel() for buffer in self._staging.values())

    def buffer(self, name: str, form: RowFormat, num_rows: int, device: torch.device) -> Tensor:
        """Room for rows. Host memory is kept for the next call: fresh pages cost more than the copy
        into them.
        """
        if device.type != "cpu":
            return form.buffer(num_rows, device)
        need = num_rows * form.row_bytes
        held = self._staging.get(name)
        if held is None or held.numel() < need:
            self._staging.pop(name, None)
            with torch.inference_mode(False):  # kept for calls outside of it too
                held = self._staging[name] = torch.empty(need, dtype=torch.uint8, device="cpu")
        return held[:need].view(num_rows, form.row_bytes)

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
