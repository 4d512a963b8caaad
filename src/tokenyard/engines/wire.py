"""Two ways to move bytes between ranks: a private gloo mesh on the host, or the user's group with its own backend.

Both have ``swap`` (one small header to and from every rank, read on the host) and ``exchange`` (rows, one message per peer).
Each starts at once and returns the function that finishes it, so that there is work to do while bytes fly.
``GlooWire`` knows every peer by name: each message has its own deadline, so that a silent rank is named. It is private to
one ``ExpertParallel``, so the user's collectives cannot get between ours. ``GroupWire`` has the backend's own limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.engines.blame import Blame
from tokenyard.errors import PeerLost, PeerTimeout
from tokenyard.rendezvous import give_up

_HEADER_TAG, _ROWS_TAG = 1, 2


@dataclass(frozen=True, slots=True)
class Spans:
    """Where each peer's rows stand in the two buffers: starts and counts, in rows, one of each per rank."""

    send_starts: list[int]
    send_counts: list[int]
    recv_starts: list[int]
    recv_counts: list[int]

    @staticmethod
    def among(
        peers: range, num_ranks: int, send_counts: list[int], recv_counts: list[int], stride: int | None = None
    ) -> Spans:
        """Rows to and from ``peers`` only, one count of each per peer.

        Blocks follow each other without gaps, or are ``stride`` rows long, of which the first ``counts`` are in use.
        """

        def spread(values: list[int]) -> list[int]:
            everybody = [0] * num_ranks
            everybody[peers.start : peers.stop : peers.step] = values
            return everybody

        def starts(counts: list[int]) -> list[int]:
            return spread(_starts(counts if stride is None else [stride] * len(counts)))

        return Spans(starts(send_counts), spread(send_counts), starts(recv_counts), spread(recv_counts))

    def reversed(self) -> Spans:
        """The way back: what was received is sent."""
        return Spans(self.recv_starts, self.recv_counts, self.send_starts, self.send_counts)


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count)
    return starts


def _rows(buffer: Tensor, start: int, count: int) -> Tensor:
    return buffer[start : start + count]


def _nonempty(messages: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(peer, rows) for peer, rows in messages if len(rows)]


class GlooWire:
    """A full mesh of our own, between the hosts of the group. CUDA tensors are staged through host memory."""

    counts_on_host = True
    name = "gloo"

    def __init__(self, store: dist.Store | None, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.last_wait = [0.0] * world_size
        self._mesh: Any = None
        if store is not None:
            self._blame = Blame(store, rank, timeout)
            self._mesh = self._connect(store)

    def _connect(self, store: dist.Store) -> Any:
        """The mesh, once every rank has it: whoever is lost later is lost in a call, by name."""
        wait = timedelta(seconds=self.timeout)
        store.set(f"here/{self.rank}", "")
        try:
            mesh = dist.ProcessGroupGloo(dist.PrefixStore("mesh", store), self.rank, self.world_size, wait)
            store.set(f"connected/{self.rank}", "")
            store.wait([f"connected/{peer}" for peer in self._peers], wait)
            return mesh
        except RuntimeError as error:
            give_up(store, self.rank)
            absent = [peer for peer in self._peers if not store.check([f"here/{peer}"])]
            missing = absent or [peer for peer in self._peers if not store.check([f"connected/{peer}"])]
            names = ", ".join(map(str, sorted(missing))) or "unknown"
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout} s in ExpertParallel(...) to connect with rank(s) {names} "
                f"[{str(error)[:80]}]",
                missing[0] if missing else -1,
            ) from error

    @property
    def _peers(self) -> list[int]:
        """Every other rank, nearest first, so that not all send to rank 0 at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """Send ``header[d]`` to each rank d; finishes with what each sent here: int64 ``[R, words]`` on the CPU."""
        mine = header.cpu()
        theirs = torch.empty_like(mine)
        theirs[self.rank] = mine[self.rank]
        recvs = [(peer, theirs[peer]) for peer in self._peers]
        sends = [(peer, mine[peer]) for peer in self._peers]
        finish = self._move(recvs, sends, _HEADER_TAG, f"{what}, counts")

        def headers() -> Tensor:
            finish()
            return theirs

        return headers

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """Move rows: block d of ``send`` to rank d, into its block for this rank of ``recv`` (uint8 ``[rows, bytes]``)."""
        here = send.cpu() if send.is_cuda else send
        there = torch.empty(recv.shape, dtype=recv.dtype, device="cpu", pin_memory=True) if recv.is_cuda else recv
        recvs = [(p, _rows(there, spans.recv_starts[p], spans.recv_counts[p])) for p in self._peers]
        sends = [(p, _rows(here, spans.send_starts[p], spans.send_counts[p])) for p in self._peers]
        finish = self._move(_nonempty(recvs), _nonempty(sends), _ROWS_TAG, f"{what}, rows")
        own = _rows(here, spans.send_starts[self.rank], spans.send_counts[self.rank])
        _rows(there, spans.recv_starts[self.rank], spans.recv_counts[self.rank]).copy_(own)

        def arrived() -> None:
            finish()
            if recv.is_cuda:
                for start, count in zip(spans.recv_starts, spans.recv_counts, strict=True):
                    _rows(recv, start, count).copy_(_rows(there, start, count), non_blocking=True)

        return arrived

    def _move(
        self, recvs: list[tuple[int, Tensor]], sends: list[tuple[int, Tensor]], tag: int, what: str
    ) -> Callable[[], None]:
        """Post messages; the function returned waits for them, each until ``timeout`` seconds from now."""
        begin = time.monotonic()
        incoming, outgoing = self._post("recv", recvs, tag, what), self._post("send", sends, tag, what)

        def finish() -> None:
            for at, (peer, work) in enumerate(incoming):
                self._wait(work, peer, begin, what, incoming, at)
                self.last_wait[peer] = time.monotonic() - begin
            for peer, work in outgoing:
                self._wait(work, peer, begin, what, [], 0)
            recvs.clear()  # until here the messages needed their memory
            sends.clear()

        return finish

    def _post(self, verb: str, messages: list[tuple[int, Tensor]], tag: int, what: str) -> list[tuple[int, Any]]:
        works: list[tuple[int, Any]] = []
        for peer, tensor in messages:
            try:
                works.append((peer, getattr(self._mesh, verb)([tensor.view(-1)], peer, tag)))
            except RuntimeError as error:
                raise self._lost(peer, what, error) from error
        return works

    def _wait(self, work: Any, peer: int, begin: float, what: str, incoming: list[tuple[int, Any]], at: int) -> None:
        left = max(self.timeout - (time.monotonic() - begin), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            if "Timed out" not in str(error):
                raise self._lost(peer, what, error) from error
            self._blame.report(
                f"rank {peer} sent nothing to rank {self.rank}", peer
            )  # first: gloo has cut every connection
            answered = [p for p, _ in incoming[:at]] + [p for p, late in incoming[at + 1 :] if _has_come(late)]
            raise self._silent(peer, what, answered) from error

    def _silent(self, peer: int, what: str, answered: list[int]) -> PeerTimeout:
        others = f"; ranks {', '.join(map(str, sorted(answered)))} answered" if answered else ""
        report, culprit = self._blame.behind(peer)
        because = f"; it had reported: {report}" if report else ""
        text = f"rank {peer} sent nothing to rank {self.rank} within {self.timeout} s ({what}){others}{because}"
        self._blame.report(text, culprit)
        return PeerTimeout(text, culprit)

    def _lost(self, peer: int, what: str, error: RuntimeError) -> PeerLost:
        report, culprit = self._blame.behind(peer)
        because = f"it had reported: {report}" if report else "it exited or crashed; look at its own output"
        text = f"rank {self.rank} lost its connection to rank {peer} ({what}): {because} [{str(error)[:80]}]"
        self._blame.report(text, culprit)
        return PeerLost(text, culprit)

    def close(self) -> None:
        self._mesh = None


def _has_come(work: Any) -> bool:
    try:
        return bool(work.wait(timedelta(milliseconds=1)))
    except RuntimeError:
        return False


class GroupWire:
    """The user's group and its backend (NCCL, RCCL, HCCL, MPI, ...). A peer that stays away is the backend's watchdog's case."""

    counts_on_host = False

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, backend: str) -> None:
        self.group, self.device, self.name = group, device, backend
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.last_wait = [float("nan")] * self.world_size

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """As :meth:`GlooWire.swap`; finishing, the host waits for the device."""
        mine = header.to(self.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.cpu

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """As :meth:`GlooWire.exchange`; blocks must follow each other without gaps. The device waits, not the host."""
        width = send.shape[1]
        dist.all_to_all_single(
            recv.view(-1),
            send.view(-1),
            [count * width for count in spans.recv_counts],
            [count * width for count in spans.send_counts],
            group=self.group,
        )
        return lambda: None

    def close(self) -> None:
        self.group = None


Wire = GlooWire | GroupWire
