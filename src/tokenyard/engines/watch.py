"""What a kernel gave up on, as an exception: who was silent, in which phase, at which counter; or what ranks disagree on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.blame import Blame
from tokenyard.engines.rings import Ground
from tokenyard.errors import Mismatch, PeerError, PeerTimeout, afresh
from tokenyard.header import Fingerprint
from tokenyard.kernels import sync
from tokenyard.kernels.plan import BAD_AT, BAD_VALUE

TAG_FIELDS = {
    "op": 2, "quantize": 2, "scaled": 1, "dtype": 3, "hidden": 20, "scale_words": 11, "scale_dtype": 3, "layout": 2,
    "exact": 1, "weighted": 1, "in_place": 1, "routing": 16,
}  # fmt: skip
"""Fields of a fingerprint that every data call compares on the device, and the bits that each gets."""
_BITS = [
    (name, (1 << bits) - 1, sum(list(TAG_FIELDS.values())[:at])) for at, (name, bits) in enumerate(TAG_FIELDS.items())
]

REFUSED = -1
"""The tag of a rank that refuses a call."""

_PHASES: dict[int, tuple[str, str]] = {
    sync.ON_PLAN.value: ("its part of the plan", "tickets"),
    sync.ON_COUNTS.value: ("its counts", "arrivals[{peer}]"),
    sync.ON_GREETING.value: ("its greeting", "hellos[{peer}]"),
    sync.ON_ROWS.value: ("its rows", "tails[{peer}, {counter}]"),
    sync.ON_ROOM.value: ("room for rows", "heads[{peer}, {counter}]"),
    sync.ON_END.value: ("the end of its rows", "dones[{peer}]"),
    sync.ON_LANDING.value: ("its rows", "landed[{peer}, {counter}]"),
}


def pack(fingerprint: Fingerprint) -> int:
    """The fields of :data:`TAG_FIELDS` in one number of 63 bits."""
    tag = 0
    for name, mask, at in _BITS:
        tag |= (getattr(fingerprint, name) & mask) << at
    return tag


def pack_routing(routing: int) -> int:
    """The routing's part of a tag; others leave it 0."""
    _, mask, at = _BITS[-1]
    return (routing & mask) << at


def _unrouted(tag: int) -> int:
    """A tag without the routing's part."""
    return tag if tag == REFUSED else tag & ((1 << _BITS[-1][2]) - 1)


def unpack(tag: int) -> dict[str, int]:
    """The fields of a packed fingerprint."""
    values: dict[str, int] = {}
    for name, bits in TAG_FIELDS.items():
        values[name] = tag & ((1 << bits) - 1)
        tag >>= bits
    return values


class Begun(NamedTuple):
    """A call that the host has begun. ``at``: how often this rank has said hello before."""

    op: int
    number: int
    tag: int
    at: int


class Watch:
    """Reads the status words of one rank. A failure stays: the object is of no more use then."""

    def __init__(self, config: Config, ground: Ground, blame: Blame) -> None:
        self._config, self._ground, self._blame = config, ground, blame
        self._failure: Exception | None = None
        self._status: Any = ground.status.numpy()
        self._begun: deque[Begun] = deque(maxlen=1024)
        self._hellos = 0

    def begin(self, fingerprint: Fingerprint, tag: int) -> None:
        """A call begins. ``tag``: what it tells the others, without the routing's part."""
        self._begun.append(Begun(fingerprint.op, fingerprint.call, tag, self._hellos))
        self._hellos += 1

    def stop_short(self) -> None:
        """The call that began last has ended before any rank said hello in it."""
        self._hellos -= 1

    def meets(self) -> None:
        """The call that began last says hello once more than others do."""
        self._begun.append(self._begun[-1]._replace(at=self._hellos))
        self._hellos += 1

    @property
    def _now(self) -> Begun:
        """The call in which a kernel gave up, behind which others may be queued; the last one, while none has.

        Of a replay of a CUDA graph: the last call of that kind that the host made.
        """
        code, phase, own, tag, hellos = (
            int(self._status[at]) for at in (sync.CODE, sync.PHASE, sync.EXPECTED, sync.TAG, sync.CALL)
        )
        if not code:
            return self._begun[-1]
        if code == sync.DISAGREED.value and phase == sync.ON_GREETING.value:
            tag = own
        of_plan = phase in (sync.ON_PLAN.value, sync.ON_COUNTS.value)
        if of_plan or (tag == own and unpack(own)["op"] == head.DISPATCH):  # judged before anybody says hello
            at, alike = hellos, [begun for begun in self._begun if begun.op == head.DISPATCH]
        else:
            at, alike = hellos - 1, [begun for begun in self._begun if begun.tag == _unrouted(tag)]
        exact = [begun for begun in alike if begun.at == at]
        return (exact or alike or self._begun)[-1]

    @property
    def _call(self) -> str:
        return f"{head.OPS[self._now.op]} #{self._now.number}"

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait on the host until ``ready()`` or until a kernel gives up, and raise then.

        Kernels bound every wait themselves; how long the device is busy before is the caller's affair.
        """
        memory, status = self._ground.memory, self._status
        while not memory.wait_until(lambda: bool(ready()) or bool(status[sync.CODE]), self._config.timeout + 1):
            if memory.device.type != "cuda" or torch.cuda.current_stream(memory.device).query():
                break
        self.raise_if_failed()
        if not ready():
            raise PeerTimeout(
                f"rank {self._config.rank} did not learn the counts of {self._call} within {self._config.timeout} s"
            )

    def raise_if_failed(self) -> None:
        """Raise what a kernel of this rank has given up on, if any.

        Raises:
            PeerTimeout: a rank was silent. Mismatch: ranks are in different calls. PeerError: a rank announced too much.
        """
        if not self._status[sync.CODE]:
            return
        if self._failure is None:
            self._failure = self._explained()
        raise afresh(self._failure)

    def _explained(self) -> Exception:
        code = int(self._status[sync.CODE])
        phase, peer, counter, expected, seen = (
            int(self._status[at]) for at in (sync.PHASE, sync.PEER, sync.COUNTER, sync.EXPECTED, sync.SEEN)
        )
        if code == sync.TIMED_OUT.value:
            return self._silent(phase, peer, counter, expected, seen)
        if phase == sync.ON_COUNTS.value:
            return PeerError(f"rank {peer} announced {seen} rows in {self._call}, but static shapes hold {expected}")
        if seen == REFUSED:
            return PeerError(f"rank {peer} refused its side of {self._call}: its own error says why")
        if expected == REFUSED:
            return PeerError(
                f"this rank refused {self._call} while rank {peer} was in it: make a new ExpertParallel on all ranks"
            )
        return self._disagreement(peer, unpack(expected), unpack(seen))

    def raise_if_bad_index(self) -> None:
        """Raise if a static dispatch was given ids out of range, and forget it."""
        at, value = int(self._status[BAD_AT]), int(self._status[BAD_VALUE])
        if at:
            self._status[BAD_AT] = 0
            raise ValueError(head.bad_index_text(at - 1, value, self._config.num_topk, self._config.num_experts))

    def _silent(self, phase: int, peer: int, counter: int, expected: int, seen: int) -> PeerTimeout:
        peer, what, name = self._named(phase, peer, counter)
        text = (
            f"rank {peer} did not send {what} to rank {self._config.rank} within {self._config.timeout} s "
            f"({self._call}, waiting for {name} to reach {expected}, it is {seen})"
        )
        return self.blamed(PeerTimeout(text, peer))

    def blamed(self, lost: PeerTimeout) -> PeerTimeout:
        """``lost``, told to the others, and with what the rank it names had reported: then its culprit is that one's."""
        self._blame.report(str(lost), lost.rank)
        report, culprit = self._blame.behind(lost.rank)
        return PeerTimeout(f"{lost}; it had reported: {report}" if report else str(lost), culprit)

    def _named(self, phase: int, peer: int, counter: int) -> tuple[int, str, str]:
        """Who was waited for, for what, and what the counter is called."""
        what, name = _PHASES[phase]
        return peer, what, name.format(peer=peer, counter=counter)

    def _disagreement(self, peer: int, mine: dict[str, int], theirs: dict[str, int]) -> Mismatch:
        me = self._config.rank
        for name in TAG_FIELDS:
            if mine[name] != theirs[name]:
                return Mismatch(
                    f"ranks disagree on {head.name_of(name)} ({self._call}): rank {me} says {head.shown(name, mine[name])}, "
                    f"rank {peer} says {head.shown(name, theirs[name])}"
                )
        return Mismatch(f"ranks {me} and {peer} are in different calls ({self._call})")
