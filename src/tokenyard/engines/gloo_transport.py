"""Bytes between ranks through a private gloo mesh on the host.

It knows every peer by name: each message has its own deadline, so that a silent rank is named. The
mesh is private to one ``ExpertParallel``, so the user's collectives cannot get between ours.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.engines.failures import ADVICE, GRACE, IN_ORDER, FailureReports, Report
from tokenyard.engines.transport import Spans
from tokenyard.errors import PeerLost, PeerTimeout, ended_from_outside
from tokenyard.memory.aside import SLICE, Aside, Begun
from tokenyard.memory.store import base_of, leave

_HEADER_TAG, _ROWS_TAG, _CUT_TAG, _END_TAG = 1, 2, 3, 4
_LONG = 1 << 16
"""Bytes of a message that is followed by one of a single byte. Gloo never ends a wait for a message
that it has read in part when the sender dies; it does end that for the next one."""
_MAKING = "ExpertParallel(...)"
_idle: dict[tuple[int, str, int], list[Any]] = {}
"""Connections that nobody uses, by process and server."""
_Messages = list[tuple[int, Tensor]]  # by peer
_Works = list[tuple[int, Any]]


def _blocks(buffer: Tensor, starts: list[int], counts: list[int]) -> list[Tensor]:
    """Rows of each rank."""
    return [buffer[start : start + n] for start, n in zip(starts, counts, strict=True)]


def _ends(messages: _Messages) -> _Messages:
    """What follows the long ones."""
    long = [peer for peer, rows in messages if rows.nbytes >= _LONG]
    return [(peer, torch.zeros(1, dtype=torch.uint8, device="cpu")) for peer in long]


class GlooTransport:
    """A full mesh of our own between the hosts. CUDA tensors are staged through host memory.

    ``members``: the ranks in it, ascending (default: all); others send nothing, and zeros as
    headers.
    """

    counts_on_host = True
    name = "gloo"

    def __init__(
        self,
        store: dist.Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        members: list[int] | None = None,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.last_wait = [0.0] * world_size
        self.waits: dict[str, list[float]] = {}
        members = list(range(world_size)) if members is None else members
        self._place = {member: place for place, member in enumerate(members)}
        mine = self._place[rank]
        self._peers = [*members[mine + 1 :], *members[:mine]]
        """Every other rank, nearest first, so that not all send to the first at once."""
        self._mesh: Any = None
        self._meeting: Any = None
        """Part of the store of all processes, where those of the mesh find each other."""
        self._aside = Aside()
        self._interrupted = ""
        self._heard: Report | None = None
        if store is not None:
            self._failures = FailureReports(store, rank, timeout)
            if self._peers:
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
            missing = [peer for peer in self._peers if not store.check([f"here/{peer}"])]
            missing = missing or [p for p in self._peers if not store.check([f"connected/{p}"])]
            names = ", ".join(map(str, sorted(missing))) or "unknown"
            raise PeerTimeout(
                f"rank {self.rank} waited {self.timeout} s in {_MAKING} to connect with rank(s) "
                f"{names} [{_gist(error)}]. {ADVICE}{_lack_of_files(len(self._peers))}",
                missing[0] if missing else -1,
            ) from error
        except BaseException as error:
            why = f"was interrupted in {_MAKING} ({type(error).__name__})"
            self.interrupt(f"rank {self.rank} {why}")
            raise

    def _meet(self, store: dist.Store) -> Any:
        """On another thread, over a connection of its own: both are busy while gloo waits."""
        wait = timedelta(seconds=self.timeout)
        base = base_of(store)
        number = store.compare_set("mesh", "", str(base.add("tokenyard/meshes", 1)))
        with _connection(base) as apart:
            place = dist.PrefixStore(f"tokenyard/mesh/{number.decode()}", apart)
            mesh = dist.ProcessGroupGloo(
                dist.PrefixStore("mesh", place), self._place[self.rank], len(self._place), wait
            )
            if self._interrupted or self._heard is not None:
                raise RuntimeError("this rank has given up meanwhile")
            store.set(f"connected/{self.rank}", "")
            place.set(f"connected/{self.rank}", "")
            place.wait([f"connected/{peer}" for peer in self._peers], wait)
        self._meeting = dist.PrefixStore(f"tokenyard/mesh/{number.decode()}", base)
        return mesh

    def swap(self, header: Tensor, what: str) -> Callable[[], Tensor]:
        mine = header.cpu()
        theirs = torch.zeros_like(mine)
        theirs[self.rank] = mine[self.rank]
        recvs = [(peer, theirs[peer]) for peer in self._peers]
        sends = [(peer, mine[peer]) for peer in self._peers]
        finish = self._move(recvs, sends, _HEADER_TAG, f"{what}, counts")
        self.headers = theirs

        def headers() -> Tensor:
            finish()
            return theirs

        return headers

    def exchange(self, send: Tensor, recv: Tensor, spans: Spans, what: str) -> Callable[[], None]:
        staged = recv.is_cuda and bool(self._peers)  # else rows stay on their device
        here, there = send.cpu() if staged else send, recv
        if staged:
            there = torch.empty(recv.shape, dtype=recv.dtype, device="cpu", pin_memory=True)
        leaving = _blocks(here, spans.send_starts, spans.send_counts)
        coming = _blocks(there, spans.recv_starts, spans.recv_counts)
        recvs = [(peer, coming[peer]) for peer in self._peers]
        sends = [(peer, leaving[peer]) for peer in self._peers]
        finish = self._move(recvs, sends, _ROWS_TAG, f"{what}, rows")
        coming[self.rank].copy_(leaving[self.rank])

        def arrived() -> None:
            finish()
            if staged:
                final = _blocks(recv, spans.recv_starts, spans.recv_counts)
                for block, come in zip(final, coming, strict=True):
                    block.copy_(come, non_blocking=True)

        return arrived

    def _move(self, recvs: _Messages, sends: _Messages, tag: int, what: str) -> Callable[[], None]:
        """Post messages; the function returned waits for each, ``timeout`` seconds from now. Nobody
        sends empty ones."""
        recvs, sends = ([(p, rows) for p, rows in each if len(rows)] for each in (recvs, sends))
        begin, ends = time.monotonic(), (_ends(recvs), _ends(sends))
        rows = self._post("recv", recvs, tag, what)
        incoming = self._post("recv", ends[0], _END_TAG, what) + rows
        outgoing = self._post("send", sends, tag, what)
        outgoing += self._post("send", ends[1], _END_TAG, what)
        if not (incoming or outgoing):
            return lambda: None
        begun = self._aside.start(partial(self._await, incoming, outgoing, begin, what))

        def finish() -> None:
            self._until(begun, what)
            for messages in (recvs, sends, *ends):
                messages.clear()  # until here they needed their memory

        return finish

    def _post(self, verb: str, messages: _Messages, tag: int, what: str) -> _Works:
        works: _Works = []
        for peer, tensor in messages:
            try:
                post = getattr(self._mesh, verb)
                works.append((peer, post([tensor.view(-1)], self._place[peer], tag)))
            except RuntimeError as error:
                raise self._lost(peer, what, error) from error
        return works

    def _until(self, begun: Begun, what: str) -> Any:
        """Wait for what is under way on the other thread, and return what comes of it. Ctrl-C ends
        the wait, and so does a rank that has given up: this one waits in vain."""
        told = False
        try:
            try:
                while not begun.wait(SLICE):
                    if not told:
                        told = True
                        self._failures.waits_in(what)
                    self._hear(what)
            except PeerTimeout:
                raise
            except BaseException as error:
                raise ended_from_outside(error)  # noqa: B904 (the same one)
            made = begun.result()
        except BaseException:
            self._failures.stops_waiting()
            raise
        self._failures.waits_in("")
        return made

    def _hear(self, what: str) -> None:
        """Whether a rank has given up meanwhile: then connections are cut."""
        if self._heard is None:
            self._heard = self._failures.heard()
            if self._heard is not None:
                self._cut()
                if self._mesh is None:
                    raise self._told(self._heard, what)

    def _await(self, incoming: _Works, outgoing: _Works, begin: float, what: str) -> None:
        """On another thread: wait for all messages."""
        held_up = self.waits.setdefault(re.sub(r" #\d+", "", what), [0.0] * self.world_size)
        come = 0.0
        for at, (peer, work) in enumerate(incoming):
            self._wait(work, peer, begin, what, incoming, at)
            self.last_wait[peer] = time.monotonic() - begin
            held_up[peer] += self.last_wait[peer] - come
            come = self.last_wait[peer]
        for peer, work in outgoing:
            self._wait(work, peer, begin, what, [], 0)

    def _wait(
        self, work: Any, peer: int, begin: float, what: str, incoming: _Works, at: int
    ) -> None:
        left = max(self.timeout - (time.monotonic() - begin), 0.001)
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            silent = "Timed out" in str(error)
            if not silent and (self._interrupted or self._heard is None):
                raise self._lost(peer, what, error) from error
            if silent:  # first: gloo has cut every connection
                self._failures.report(f"rank {peer} sent nothing to rank {self.rank}", peer)
            answered = {p for p, _ in incoming[:at]}
            answered |= {p for p, late in incoming[at + 1 :] if _has_come(late)} - {peer}
            others = f"; ranks {', '.join(map(str, sorted(answered)))} answered" if answered else ""
            if not silent and self._heard is not None:
                raise self._told(self._heard, f"{what}, waiting for rank {peer}{others}") from None
            raise self._silent(peer, what, others) from error

    def _silent(self, peer: int, what: str, others: str) -> PeerTimeout:
        elsewhere = self._failures.elsewhere(peer)  # now, as it may give up there meanwhile
        report, failed_rank = self._failures.behind(peer)
        silent = f"rank {peer} sent nothing to rank {self.rank} within {self.timeout} s"
        text = f"{silent} ({what}){others}"
        told = bool(report) and not (elsewhere and failed_rank == peer)
        if told:
            text = f"{text}; it had reported: {report}"
        elif elsewhere:
            text = f"{text}; it waits in {elsewhere}, of another ExpertParallel"
        self._failures.report(text, failed_rank)
        return PeerTimeout(text if told else f"{text}. {ADVICE}", failed_rank)

    def _told(self, report: Report, what: str) -> PeerLost:
        """Another rank has given up, be it on one that this one does not wait for."""
        error = report.to(self.rank, what)
        self._failures.report(str(error), error.rank)
        return error

    def _lost(self, peer: int, what: str, error: RuntimeError) -> RuntimeError:
        if self._interrupted:
            return RuntimeError(self._interrupted)
        if self._heard is not None:  # this rank has cut its connections for it
            return self._told(self._heard, what)
        report, failed_rank = self._failures.behind(peer)
        because = "it exited, crashed or lost its object unclosed; look at its own output"
        because = f"it had reported: {report}" if report else because
        text = f"rank {self.rank} lost its connection to rank {peer} ({what}): {because}"
        self._failures.report(text, failed_rank)
        return PeerLost(text if report else f"{text} [{_gist(error)}]", failed_rank)

    def awaited(self, call: int) -> int | None:
        for peer in self._peers:
            if f"#{call}, counts" in self._failures.elsewhere(peer, here=True):
                return peer
        return None

    def interrupt(self, text: str) -> None:
        self._interrupted = text
        if self._peers:
            try:
                self._failures.report(text, self.rank)
            finally:
                self._cut()

    def _cut(self) -> None:
        """Close all connections, as gloo does when a wait for one of them times out."""
        if self._mesh is None:
            return
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer in self._peers:
            try:
                wait = timedelta(milliseconds=1)
                self._mesh.recv([nothing], self._place[peer], _CUT_TAG).wait(wait)
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return

    def failure(self) -> Report | None:
        return self._failures.first() if self._peers else None

    def close(self, why: str = IN_ORDER) -> None:
        if self._mesh is not None:
            self._failures.close(why)  # first: whoever loses the connection asks why
            begun = self._aside.start(partial(leave, self._meeting, len(self._place)))
            begun.wait(GRACE)
        self._mesh = self._meeting = None
        self._aside.close()


@contextmanager
def _connection(store: Any) -> Generator[Any]:
    """The same store over another connection, which is kept for the next to ask: torch's server
    looks up the name of whoever connects, and answers nobody until DNS has (5 s at times)."""
    of_server: Any = dist.TCPStore
    if not isinstance(store, of_server):
        yield store.clone()
        return
    idle = _idle.setdefault((os.getpid(), store.host, store.port), [])
    apart: Any = None
    while apart is None and idle:
        with suppress(RuntimeError):  # another server has the port by now
            (known := idle.pop()).check(["tokenyard/meshes"])
            apart = known
    apart = store.clone() if apart is None else apart
    yield apart
    idle.append(apart)


def _lack_of_files(num_peers: int) -> str:
    """What to do besides if this process has few file descriptors left; empty: it has enough."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = most
    if most < 0 or most - used > min(16 + 4 * num_peers, most // 4):
        return ""
    return (
        f". This process has {used} of its {most} file descriptors open: raise `ulimit -n`, or "
        f"close objects that are not used any more"
    )


def _gist(error: RuntimeError) -> str:
    """The first sentence of what gloo or a store says, without the place in its source."""
    return shorten(re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0], 120, placeholder=" ...")


def _has_come(work: Any) -> bool:
    try:
        return bool(work.wait(timedelta(milliseconds=1)))
    except RuntimeError:
        return False
