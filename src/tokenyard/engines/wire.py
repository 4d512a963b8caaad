"""Two ways to move bytes between ranks: a private gloo mesh on the host, or the user's group with
its own backend.

Both have ``swap`` (one small header to and from every rank, read on the host) and ``exchange``
(rows, one message per peer). Each starts at once and returns the function that finishes it, so that
there is work to do while bytes fly. ``GlooWire`` knows every peer by name: each message has its own
deadline, so that a silent rank is named. It is private to one ``ExpertParallel``, so the user's
collectives cannot get between ours. ``GroupWire`` has the backend's own limits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from textwrap import shorten
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.engines.blame import ADVICE, LOOK, Blame, Report
from tokenyard.errors import PeerLost, PeerTimeout, ended_from_outside
from tokenyard.memory.aside import SLICE, Aside, Begun
from tokenyard.memory.launch import wait_until

_HEADER_TAG, _ROWS_TAG, _CUT_TAG = 1, 2, 3
_MAKING = "ExpertParallel(...)"


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


def _rows(buffer: Tensor, start: int, count: int) -> Tensor:
    return buffer[start : start + count]


def _nonempty(messages: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(peer, rows) for peer, rows in messages if len(rows)]


class GlooWire:
    """A full mesh of our own, between the hosts of the group. CUDA tensors are staged through host
    memory.
    """

    counts_on_host = True
    name = "gloo"

    def __init__(
        self, store: dist.Store | None, rank: int, world_size: int, timeout: float
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.last_wait = [0.0] * world_size
        self._mesh: Any = None
        self._aside = Aside()
        self._interrupted = ""
        self._heard: Report | None = None
        if store is not None:
            self._blame = Blame(store, rank, timeout)
            self._mesh = self._connect(store)

    def _connect(self, store: dist.Store) -> Any:
        """The mesh, once every rank has it: whoever is lost later is lost in a call, by name."""
        store.set(f"here/{self.rank}", "")
        begun = self._aside.start(partial(self._meet, store))
        try:
            return self._until(begun, _MAKING)
        except PeerTimeout:
            raise
        except RuntimeError as error:
            absent = [peer for peer in self._peers if not store.check([f"here/{peer}"])]
            missing = absent or [
                peer for peer in self._peers if not store.check([f"connected/{peer}"])
            ]
            names = ", ".join(map(str, sorted(missing))) or "unknown"
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout} s in {_MAKING} to connect with rank(s) "
                f"{names} [{_gist(error)}]. {ADVICE}",
                missing[0] if missing else -1,
            ) from error
        except BaseException as error:
            self.interrupt(
                f"rank {self.rank} was interrupted in {_MAKING} ({type(error).__name__})"
            )
            raise

    def _meet(self, store: dist.Store) -> Any:
        """On another thread, and through a store of its own: both are busy as long as gloo
        waits.
        """
        wait, apart = timedelta(seconds=self.timeout), cast("Any", store).clone()
        mesh = dist.ProcessGroupGloo(
            dist.PrefixStore("mesh", apart), self.rank, self.world_size, wait
        )
        if self._interrupted or self._heard is not None:
            raise RuntimeError("this rank has given up meanwhile")
        apart.set(f"connected/{self.rank}", "")
        apart.wait([f"connected/{peer}" for peer in self._peers], wait)
        return mesh

    @property
    def _peers(self) -> list[int]:
        """Every other rank, nearest first, so that not all send to rank 0 at once."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """Send ``header[d]`` to each rank d; finishes with what each sent here: int64 ``[R,
        words]`` on the CPU.
        """
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
        """Move rows: block d of ``send`` to rank d, into its block for this rank of ``recv`` (uint8
        ``[rows, bytes]``).
        """
        here = send.cpu() if send.is_cuda else send
        there = (
            torch.empty(recv.shape, dtype=recv.dtype, device="cpu", pin_memory=True)
            if recv.is_cuda
            else recv
        )
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
        """Post messages; the function returned waits for them, each until ``timeout`` seconds from
        now.
        """
        begin = time.monotonic()
        incoming, outgoing = (
            self._post("recv", recvs, tag, what),
            self._post("send", sends, tag, what),
        )
        if not (incoming or outgoing):
            return lambda: None
        begun = self._aside.start(partial(self._await, incoming, outgoing, begin, what))

        def finish() -> None:
            self._until(begun, what)
            recvs.clear()  # until here the messages needed their memory
            sends.clear()

        return finish

    def _post(
        self, verb: str, messages: list[tuple[int, Tensor]], tag: int, what: str
    ) -> list[tuple[int, Any]]:
        works: list[tuple[int, Any]] = []
        for peer, tensor in messages:
            try:
                works.append((peer, getattr(self._mesh, verb)([tensor.view(-1)], peer, tag)))
            except RuntimeError as error:
                raise self._lost(peer, what, error) from error
        return works

    def _until(self, begun: Begun, what: str) -> Any:
        """Wait for what is under way on the other thread, and return what comes of it.

        Ctrl-C ends the wait, and so does a rank that has given up: this one waits in vain, if for
        another.
        """
        told = False
        try:
            while not begun.wait(SLICE):
                if not told:
                    told = True
                    self._blame.waits_in(what)
                if self._heard is None:
                    self._heard = self._blame.heard()
                    if self._heard is not None:
                        self._cut()
                        if self._mesh is None:
                            raise self._told(self._heard, what)
        except PeerTimeout:
            raise
        except BaseException as error:
            raise ended_from_outside(error)  # noqa: B904 (the same one)
        made = begun.result()
        if told:
            self._blame.waits_in("")
        return made

    def _await(
        self,
        incoming: list[tuple[int, Any]],
        outgoing: list[tuple[int, Any]],
        begin: float,
        what: str,
    ) -> None:
        """On another thread: wait for all messages."""
        for at, (peer, work) in enumerate(incoming):
            self._wait(work, peer, begin, what, incoming, at)
            self.last_wait[peer] = time.monotonic() - begin
        for peer, work in outgoing:
            self._wait(work, peer, begin, what, [], 0)

    def _wait(
        self,
        work: Any,
        peer: int,
        begin: float,
        what: str,
        incoming: list[tuple[int, Any]],
        at: int,
    ) -> None:
        left = max(self.timeout - (time.monotonic() - begin), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            silent = "Timed out" in str(error)
            if not silent and (self._interrupted or self._heard is None):
                raise self._lost(peer, what, error) from error
            if silent:  # first: gloo has cut every connection
                self._blame.report(f"rank {peer} sent nothing to rank {self.rank}", peer)
            answered = [p for p, _ in incoming[:at]] + [
                p for p, late in incoming[at + 1 :] if _has_come(late)
            ]
            others = f"; ranks {', '.join(map(str, sorted(answered)))} answered" if answered else ""
            if not silent and self._heard is not None:
                raise self._told(self._heard, f"{what}, waiting for rank {peer}{others}") from None
            raise self._silent(peer, what, others) from error

    def _silent(self, peer: int, what: str, others: str) -> PeerTimeout:
        report, culprit = self._blame.behind(peer)
        text = (
            f"rank {peer} sent nothing to rank {self.rank} within {self.timeout} s ({what}){others}"
        )
        elsewhere = "" if report else self._blame.elsewhere(peer)
        if report:
            text = f"{text}; it had reported: {report}"
        elif elsewhere:
            text = f"{text}; it waits in {elsewhere}, of another ExpertParallel"
        self._blame.report(text, culprit)
        return PeerTimeout(text if report else f"{text}. {ADVICE}", culprit)

    def _told(self, report: Report, what: str) -> PeerLost:
        """Another rank has given up, be it on one that this one does not wait for."""
        error = report.to(self.rank, what)
        self._blame.report(str(error), error.rank)
        return error

    def _lost(self, peer: int, what: str, error: RuntimeError) -> RuntimeError:
        if self._interrupted:
            return RuntimeError(self._interrupted)
        if self._heard is not None:  # this rank has cut its connections for it
            return self._told(self._heard, what)
        report, culprit = self._blame.behind(peer)
        because = (
            f"it had reported: {report}"
            if report
            else "it exited or crashed; look at its own output"
        )
        text = f"rank {self.rank} lost its connection to rank {peer} ({what}): {because}"
        self._blame.report(text, culprit)
        return PeerLost(text if report else f"{text} [{_gist(error)}]", culprit)

    def awaited(self, call: int) -> int | None:
        """A rank that waits for this one in a ``call`` of this number, which this one has still to
        make.
        """
        return next(
            (
                peer
                for peer in self._peers
                if f"#{call}, counts" in self._blame.elsewhere(peer, here=True)
            ),
            None,
        )

    def interrupt(self, text: str) -> None:
        """This rank's call was ended from outside: tell the others why, and end what they and its
        other thread wait for.
        """
        self._interrupted = text
        if self.world_size > 1:
            try:
                self._blame.report(text, self.rank)
            finally:
                self._cut()

    def _cut(self) -> None:
        """Close all connections, as gloo does when a wait for one of them times out."""
        for peer in [] if self._mesh is None else self._peers:
            try:
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                cast("Any", self._mesh).recv([nothing], peer, _CUT_TAG).wait(
                    timedelta(milliseconds=1)
                )
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def close(self) -> None:
        if self._mesh is not None:
            self._blame.close()  # first: whoever loses the connection asks why
        self._mesh = None
        self._aside.close()


def _gist(error: RuntimeError) -> str:
    """The first sentence of what gloo or a store says, without the place in its source."""
    return shorten(re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0], 120, placeholder=" ...")


def _has_come(work: Any) -> bool:
    try:
        return bool(work.wait(timedelta(milliseconds=1)))
    except RuntimeError:
        return False


class GroupWire:
    """The user's group and its backend (NCCL, RCCL, HCCL, MPI, ...). A peer that stays away is the
    backend's watchdog's case.
    """

    counts_on_host = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        backend: str,
        blame: Blame | None = None,
    ) -> None:
        self.group, self.device, self.name, self._blame = group, device, backend, blame
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.last_wait = [float("nan")] * self.world_size

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        """As :meth:`GlooWire.swap`; finishing, the host waits for the device."""
        mine = header.to(self.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        if theirs.device.type != "cuda":
            return theirs.cpu
        come = torch.cuda.Event()
        come.record(torch.cuda.current_stream(theirs.device))

        def headers() -> Tensor:
            self._wait(come.query, what)
            return theirs.cpu()

        return headers

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait on the host, where Ctrl-C or a rank that has given up can end it."""
        try:
            while not wait_until(ready, LOOK):
                report = None if self._blame is None else self._blame.heard()
                if report is not None:
                    raise report.to(self.rank, what)
        except PeerLost:
            raise
        except BaseException as error:
            raise ended_from_outside(error)  # noqa: B904 (the same one)

    def interrupt(self, text: str) -> None:
        """As :meth:`GlooWire.interrupt`; what is on the device already stays there."""
        if self._blame is not None:
            self._blame.report(text, self.rank)

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        """As :meth:`GlooWire.exchange`; blocks must follow each other without gaps. The device
        waits, not the host.
        """
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
