"""What a kernel gave up on, as an exception: who was silent where, or what ranks disagree on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from tokenyard import header as head
from tokenyard.arguments import MOST_PICKS
from tokenyard.config import Config
from tokenyard.engines.failures import ADVICE, IN_ORDER, LOOK, FailureReports, Report
from tokenyard.engines.waits import Source
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.errors import Mismatch, PeerError, PeerTimeout, afresh, ended_from_outside
from tokenyard.header import Fingerprint
from tokenyard.kernels import sync, two_region
from tokenyard.kernels.exchange import BAD_AT, BAD_VALUE
from tokenyard.memory.aside import SLICE, Aside
from tokenyard.types import Layout, Quantize

TAG_FIELDS = {
    "op": 2, "quantize": 5, "scaled": 1, "dtype": 4, "hidden": 13, "scale_words": 12,
    "scale_dtype": 4, "layout": 3, "exact": 1, "weighted": 1, "in_place": 1, "routing": 16,
}  # fmt: skip
"""Fields of a fingerprint that every data call compares on the device, and the bits that each gets:
63 in all.

``hidden`` is 0 for the object's own, which ranks agree on as they make it. The only other payloads
are weights, with ``num_topk`` channels. ``scale_words`` and ``routing`` keep their lowest bits.
"""
_SHORTENED = ("scale_words", "routing")
LARGEST = {
    "op": len(head.OPS) - 1,
    "quantize": max(mode.value for mode in Quantize),
    "dtype": len(head.DTYPES) - 1,
    "hidden": MOST_PICKS,
    "scale_dtype": len(head.DTYPES) - 1,
    "layout": max(layout.value for layout in Layout),
}
"""Of what each field that is not a flag may hold."""


def check_room(fields: dict[str, int], largest: dict[str, int]) -> None:
    """Raise RuntimeError unless all values up to ``largest`` differ in the bits of ``fields``."""
    for name, value in largest.items():
        if value >> fields[name]:
            what = f"{name} goes up to {value}, but TAG_FIELDS gives it {fields[name]} bits"
            raise RuntimeError(what)
    if sum(fields.values()) > 63:
        raise RuntimeError(f"TAG_FIELDS has {sum(fields.values())} bits, but a tag has 63")


check_room(TAG_FIELDS, LARGEST)
_BITS = [
    (name, (1 << bits) - 1, sum(list(TAG_FIELDS.values())[:at]))
    for at, (name, bits) in enumerate(TAG_FIELDS.items())
]

REFUSED = -1
"""The tag of a rank that refuses a call."""

_ONE = sync.STATUS_WORDS - 1
"""Of the status words: the host's, in memory that the copy engine reads."""

_PHASES: dict[int, tuple[str, str]] = {
    sync.ON_PLAN.value: ("its part of the plan", "tickets"),
    sync.ON_COUNTS.value: ("its counts", "arrivals[{peer}]"),
    sync.ON_CALL_BARRIER.value: ("its barrier signal", "entered[{peer}]"),
    sync.ON_END.value: ("the end of its rows", "dones[{peer}]"),
    sync.ON_RECEIVE_BUFFER.value: ("its rows", "landed[{peer}, {counter}]"),
}

_WAITS: dict[int, str] = {
    sync.ON_PLAN.value: "plan", sync.ON_COUNTS.value: "counts",
    sync.ON_CALL_BARRIER.value: "call", sync.ON_ROOM.value: "room",
}  # fmt: skip
"""What statistics call a wait; others are for rows."""


def pack(fingerprint: Fingerprint, config: Config) -> int:
    """The fields of :data:`TAG_FIELDS` in 63 bits. ValueError: one does not fit."""
    tag = 0
    for name, mask, at in _BITS:
        value: int = getattr(fingerprint, name)
        value = 0 if name == "hidden" and value == config.hidden else value
        if value > mask and name not in _SHORTENED:
            raise ValueError(
                f"{name} ({value}) must be at most {mask}: a call tells it to other ranks"
            )
        tag |= (value & mask) << at
    return tag


def pack_routing(routing: int) -> int:
    """The routing's part of a tag; others leave it 0."""
    _, mask, at = _BITS[-1]
    return (routing & mask) << at


def unpack(tag: int) -> dict[str, int]:
    """The fields of a packed fingerprint."""
    return {name: tag >> at & mask for name, mask, at in _BITS}


class Begun(NamedTuple):
    """A call that the host has begun. ``at``: how often this rank has announced a call before."""

    op: int
    number: int
    tag: int
    at: int


class StatusMonitor:
    """Reads the status words of one rank. A failure stays: the object is of no more use then."""

    def __init__(self, config: Config, workspace: PeerWorkspace, failures: FailureReports) -> None:
        self._config, self._workspace, self._failures = config, workspace, failures
        self._failure: Exception | None = None
        self._status: Any = workspace.status.numpy()
        self._begun: deque[Begun] = deque(maxlen=1024)
        self._entered = 0
        self._on_gpu = workspace.memory.device.type == "cuda"
        if self._on_gpu:  # a stream that is first used beside a kernel may wait for it
            self._beside = torch.cuda.Stream(workspace.memory.device)
            self._give_up(0)

    def begin(self, fingerprint: Fingerprint, tag: int) -> None:
        """A call begins. ``tag``: what it tells the others, without the routing's part."""
        self._begun.append(Begun(fingerprint.op, fingerprint.call, tag, self._entered))
        self._entered += 1

    def stop_short(self) -> None:
        """The call that began last has ended before any rank announced it."""
        self._entered -= 1

    def meets(self) -> None:
        """The call that began last announces the call once more than others do."""
        self._begun.append(self._begun[-1]._replace(at=self._entered))
        self._entered += 1

    @property
    def _now(self) -> Begun:
        """The call in which a kernel gave up, behind which others may be queued; the last one,
        while none has. Of a replay of a CUDA graph: the last call of that kind by the host."""
        code, phase, own, tag, entered = (
            int(self._status[at])
            for at in (sync.CODE, sync.PHASE, sync.EXPECTED, sync.TAG, sync.CALL)
        )
        if not code:
            return self._begun[-1]
        if code == sync.DISAGREED.value and phase == sync.ON_CALL_BARRIER.value:
            tag = own
        of_plan = phase in (sync.ON_PLAN.value, sync.ON_COUNTS.value)
        # judged before anybody announces the call
        if of_plan or (tag == own and unpack(own)["op"] == head.DISPATCH):
            at, alike = entered, [begun for begun in self._begun if begun.op == head.DISPATCH]
        else:
            plain = tag if tag == REFUSED else tag & ((1 << _BITS[-1][2]) - 1)  # no routing
            at, alike = entered - 1, [begun for begun in self._begun if begun.tag == plain]
        exact = [begun for begun in alike if begun.at == at]
        return (exact or alike or self._begun)[-1]

    @property
    def _call(self) -> str:
        return f"{head.OPS[self._now.op]} #{self._now.number}"

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait on the host until ``ready()`` or until a kernel gives up, and raise then. Kernels
        bound every wait themselves; how long the device is busy before is the caller's affair."""
        memory, status, begin = self._workspace.memory, self._status, time.monotonic()
        limit = self._config.timeout + 1
        look = min(LOOK, limit) if self._on_gpu else limit
        try:
            while not memory.wait_until(lambda: bool(ready()) or bool(status[sync.CODE]), look):
                late = time.monotonic() - begin >= limit
                if not self._on_gpu or (late and torch.cuda.current_stream(memory.device).query()):
                    break
                self._raise_if_told()
        except PeerTimeout:
            raise
        except BaseException as error:
            raise ended_from_outside(error)  # noqa: B904 (the same one)
        self.raise_if_failed()
        if not ready():
            raise PeerTimeout(
                f"rank {self._config.rank} did not learn the counts of {self._call} within "
                f"{self._config.timeout} s. {ADVICE}"
            )

    def finish(self) -> None:
        """Wait for the device, or until another rank gives up, and raise then."""
        if not self._on_gpu:
            return
        memory = self._workspace.memory
        if memory.shared_gpu:  # who waits in CUDA may keep other ranks' threads from launching
            ended = torch.cuda.Event()
            ended.record(torch.cuda.current_stream(memory.device))
            while not memory.wait_until(ended.query, SLICE):
                self._raise_if_told()
            return
        self._until_idle(self._raise_if_told)

    def drain(self) -> None:
        """End the waits of this rank's kernels, and wait for the device."""
        self._stop()
        self._workspace.memory.settle()
        if self._on_gpu:
            self._until_idle(partial(self._check_deadline, time.monotonic() + self._config.timeout))

    def _until_idle(self, look: Callable[[], object]) -> None:
        """Wait for the device; ``look()`` is called all the while."""
        aside = Aside()
        begun = aside.start(partial(torch.cuda.synchronize, self._workspace.memory.device))
        aside.close()  # it ends behind the call
        while not begun.wait(SLICE):
            look()
        begun.result()

    def _check_deadline(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise PeerTimeout(
                f"rank {self._config.rank} waited {self._config.timeout} s in recover() for its "
                f"GPU, which kernels of another object or library keep: if they wait for the rank "
                f"that is gone, abort them (torch.distributed: abort the process group), and call "
                f"recover() again"
            )

    def failure(self) -> Report | None:
        """As of :class:`Engine`. Raises if a kernel of this rank has given up."""
        self.raise_if_failed()
        return self._failures.first()

    def _raise_if_told(self) -> None:
        """Raise if another rank has given up: it will not come, and kernels would wait in vain."""
        report = self._failures.heard()
        if report is not None:
            self._stop()
            raise report.to(self._config.rank, self._call)

    def interrupt(self, text: str) -> None:
        """This rank has left a call in the middle: tell others, and end its own kernels' waits."""
        try:
            self._failures.report(text, self._config.rank)
        finally:
            self._stop()

    def close(self, why: str = IN_ORDER) -> None:
        """This rank closes its object: the others are told ``why``."""
        self._failures.close(why)

    def _stop(self) -> None:
        """Tell kernels of this rank that one of them has given up, so that nobody waits for their
        timeout. The copy engine writes the word, beside kernels that fill the device."""
        if self._on_gpu and not torch.cuda.is_current_stream_capturing():
            self._give_up(1)

    def _give_up(self, word: int) -> None:
        at, value = cast("int", sync.GIVEN_UP.value), self._workspace.status[_ONE:]
        value.fill_(word)
        with torch.cuda.stream(self._beside):
            self._workspace.state[at : at + 1].copy_(value, non_blocking=True)

    def raise_if_failed(self) -> None:
        """Raise what a kernel of this rank has given up on, if any: PeerTimeout (a rank was
        silent), Mismatch (different calls) or PeerError (a rank announced too much)."""
        if not self._status[sync.CODE]:
            return
        if self._failure is None:
            self._failure = self._explained()
        raise afresh(self._failure)

    def _explained(self) -> Exception:
        code = int(self._status[sync.CODE])
        phase, peer, counter, expected, seen = (
            int(self._status[at])
            for at in (sync.PHASE, sync.PEER, sync.COUNTER, sync.EXPECTED, sync.SEEN)
        )
        if code == sync.TIMED_OUT.value:
            return self._silent(phase, peer, counter, expected, seen)
        call, text = self._call, ""
        exact = unpack(self._now.tag)["exact"]
        if phase == sync.ON_ROWS.value or (phase == sync.ON_COUNTS.value and exact):
            text = f"rank {peer} announced a block in {call} that is not inside of its heap of "
            text += f"{expected} bytes: it would end at {seen}"
        elif phase == sync.ON_COUNTS.value:
            text = f"rank {peer} announced {seen} rows in {call}, but static shapes hold {expected}"
        elif seen == REFUSED:
            text = f"rank {peer} refused its side of {call}: its own error says why"
        elif expected == REFUSED:
            text = f"this rank refused {call} while rank {peer} was in it: make a new "
            text += "ExpertParallel on all ranks"
        if text:
            return PeerError(text)
        return self._disagreement(peer, unpack(expected), unpack(seen))

    def raise_if_bad_index(self) -> None:
        """Raise if a static dispatch was given ids out of range, and forget it."""
        at, value = int(self._status[BAD_AT]), int(self._status[BAD_VALUE])
        if at:
            self._status[BAD_AT] = 0
            raise ValueError(
                head.bad_index_text(at - 1, value, self._config.num_topk, self._config.num_experts)
            )

    def _silent(self, phase: int, peer: int, counter: int, expected: int, seen: int) -> PeerTimeout:
        peer, what, name = self._named(phase, peer, counter)
        me, timeout = self._config.rank, self._config.timeout
        text = (
            f"rank {peer} did not send {what} to rank {me} within {timeout} s "
            f"({self._call}, waiting for {name} to reach {expected}, it is {seen})"
        )
        lost = self.attributed(PeerTimeout(text, peer))
        return PeerTimeout(f"{text}. {ADVICE}", lost.rank) if str(lost) == text else lost

    def attributed(self, lost: PeerTimeout) -> PeerTimeout:
        """``lost``, told to the others, with what the rank it names had reported, and the failed
        rank."""
        self._failures.report(str(lost), lost.rank)
        report, failed_rank = self._failures.behind(lost.rank)
        return PeerTimeout(
            f"{lost}; it had reported: {report}" if report else str(lost), failed_rank
        )

    def source_of(self, phase: int, peer: int) -> Source:
        """Who was waited for, for what, and by how many programs at once: of a number that
        ``note_wait`` adds to."""
        tuning: Any = self._workspace.tuning
        what, programs = _WAITS.get(phase, "rows"), tuning.channels
        if what in ("counts", "call") or phase == sync.ON_END.value:
            programs = 1
        elif phase == sync.ON_RECEIVE_BUFFER.value:
            programs = tuning.gatherers
        return Source(what, self._named(phase, peer, 0)[0], programs)

    def _named(self, phase: int, peer: int, counter: int) -> tuple[int, str, str]:
        """Who was waited for, for what, and what the counter is called: rings inside are named
        after the source or owner of their rows (``docs/reference/twolevel.md``), network rings
        after the node."""
        grid, me = self._workspace.grid, self._config.rank
        home, local, channels = grid.node_of(me), grid.local_of(me), self._workspace.tuning.channels
        tails, heads = f"tails[{peer}, {counter}]", f"heads[{peer}, {counter}]"
        if phase == two_region.ON_BOTH.value:  # a reducer: ranks of its node, then nodes
            if peer < grid.world_size:
                return peer, "its rows", f"{tails} (reducer)"
            node = peer - grid.world_size
            name = f"network tails[{node}, {counter}] (reducer)"
            return grid.rank_at(node, local), "its node's sums", name
        if phase == two_region.ON_NET_ROWS.value:
            return grid.rank_at(peer, local), "its rows", f"network {tails} (forwarder)"
        if phase == two_region.ON_NET_ROOM.value:
            role = "combiner" if self._now.op == head.COMBINE else "network sender"
            return grid.rank_at(peer, local), "room for rows", f"network {heads} ({role})"
        rooms, parts = cast("list[int]", [two_region.ON_ROOMS.value, two_region.ON_PARTS.value])
        if phase in (rooms, parts):  # peer: of my node; counter: which node's ring
            node, channel = divmod(counter, channels)
            ring, other = grid.rank_at(node, peer), grid.rank_at(home, peer)
            if phase == rooms:
                return other, "room for rows", f"heads[{ring}, {channel}] (forwarder)"
            return other, "its rows", f"tails[{ring}, {channel}] (combiner)"
        # An inner ring: who is at its other end, and whose rows it takes if they are another's.
        other = grid.rank_at(home, grid.local_of(peer))
        whose = "" if other == peer else f" of rank {peer}"
        if phase == sync.ON_ROWS.value:
            return other, f"rows{whose}" if whose else "its rows", f"{tails} (receiver)"
        if phase == sync.ON_ROOM.value:
            return other, f"room for rows{whose}", f"{heads} (sender)"
        what, name = _PHASES[phase]
        return peer, what, name.format(peer=peer, counter=counter)

    def _disagreement(self, peer: int, mine: dict[str, int], theirs: dict[str, int]) -> Mismatch:
        me = self._config.rank
        for name in TAG_FIELDS:
            if mine[name] != theirs[name]:
                own, other = (self._shown(name, each[name]) for each in (mine, theirs))
                both = f"rank {me} says {own}, rank {peer} says {other}"
                return Mismatch(f"ranks disagree on {head.name_of(name)} ({self._call}): {both}")
        return Mismatch(f"ranks {me} and {peer} are in different calls ({self._call})")

    def _shown(self, name: str, value: int) -> object:
        return head.shown(name, value or self._config.hidden if name == "hidden" else value)
