"""Bytes between ranks over the user's group, whose backend has limits of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.engines.failures import IN_ORDER, LOOK, FailureReports, Report
from tokenyard.engines.transport import Spans
from tokenyard.errors import PeerLost, ended_from_outside
from tokenyard.memory.kernel_launch import wait_until


class GroupTransport:
    """The user's group (NCCL, RCCL, HCCL, MPI, ...). Its watchdog notices silent peers."""

    counts_on_host = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        backend: str,
        failures: FailureReports | None = None,
    ) -> None:
        self.group, self.device, self.name, self._failures = group, device, backend, failures
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.last_wait = [float("nan")] * self.world_size
        self.waits: dict[str, list[float]] = {}
        self._pinned: dict[tuple[int, ...], Tensor] = {}

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """As :meth:`Transport.swap`; finishing, the host waits for the device. What it has then is
        written again in the next swap."""
        mine = header.to(self.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        self.headers = theirs
        if theirs.device.type != "cuda":
            return theirs.cpu
        shape = tuple(theirs.shape)
        if shape not in self._pinned:
            with torch.inference_mode(False):  # kept for calls outside of it too
                self._pinned[shape] = torch.empty(shape, dtype=theirs.dtype, pin_memory=True)
        pinned = self._pinned[shape].copy_(theirs, non_blocking=True)
        come = torch.cuda.Event()
        come.record(torch.cuda.current_stream(theirs.device))

        def headers() -> Tensor:
            self._wait(come.query, what)
            return pinned

        return headers

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait on the host, where Ctrl-C or a rank that has given up can end it."""
        try:
            while not wait_until(ready, LOOK):
                report = None if self._failures is None else self._failures.heard()
                if report is not None:
                    raise report.to(self.rank, what)
        except PeerLost:
            raise
        except BaseException as error:
            raise ended_from_outside(error)  # noqa: B904 (the same one)

    def awaited(self, call: int) -> None:
        """The backend does not say who waits."""

    def interrupt(self, text: str) -> None:
        """As :meth:`Transport.interrupt`; what is on the device already stays there."""
        if self._failures is not None:
            self._failures.report(text, self.rank)

    def failure(self) -> Report | None:
        return None if self._failures is None else self._failures.first()

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """Blocks must follow each other without gaps. The device waits, not the host."""
        width = send.shape[1]
        come, go = ([n * width for n in each] for each in (spans.recv_counts, spans.send_counts))
        dist.all_to_all_single(recv.view(-1), send.view(-1), come, go, group=self.group)
        return lambda: None

    def close(self, why: str = IN_ORDER) -> None:
        if why != IN_ORDER:  # others wait in collectives, which do not end by themselves
            self.interrupt(f"rank {self.rank} {why}")
        self.group = None
