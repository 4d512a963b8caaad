"""How a process takes the place of a rank that is gone: it meets the members of an object through
their store, and all begin the next epoch together.

Members agree on a new part of the plain store (``seat`` in the epoch's part names it, by a number
that the store gives out once), and publish an *invitation* to it under a name that the caller
chose. In that part the newcomer claims the seat (compare and set, so that two processes never both
get it), and members and newcomer meet in one :class:`Round`. If it is given up, or shows that GPUs
do not reach each other, the members stay in their epoch, and the next attempt has another seat.
Else a member writes the epoch's verdict (``survivors.py``), and the object goes on in the new part.
So nobody can leave an epoch in two ways: a member that was stopped in between finds itself left
behind when it votes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tokenyard.arguments import check_sizes, check_timeout, check_whole
from tokenyard.config import Config
from tokenyard.errors import NotSupported, PeerTimeout
from tokenyard.memory.meeting import POLL, Round
from tokenyard.memory.preflight import Report, unreachable
from tokenyard.memory.store import base_of, clock_of
from tokenyard.survivors import admitted

_WHAT = "admit()"
_SIZES = ("num_experts", "hidden", "num_topk", "max_tokens_per_rank", "world_size")


def check_name(at: Any) -> str:
    """A name under which ranks meet in the store."""
    if not isinstance(at, str) or not 0 < len(at) <= 200:
        raise ValueError(f"at ({at!r}) must be a word of 1 to 200 letters, a name of this object")
    return at


def invite(
    store: dist.Store, config: Config, rank: int, at: str, facts: dict[str, Any], report: str
) -> dist.Store:
    """Of a member: let a newcomer be ``rank``; the part of the store in which the object goes on.
    ``store``: of this epoch. ``facts``: what the newcomer has to know besides sizes; the same on
    all members. ``report``: a :class:`Report` of GPUs, or nothing.

    Raises, and nothing has changed:
        Mismatch: the members invite different ranks, or under different names.
        PeerTimeout: the newcomer, or a member, did not come. NotSupported: GPUs do not fit.
    """
    base, place = base_of(store), _seat(store, config, rank, at)
    here = _round(place, config.rank, config.members, rank)
    if config.rank == config.members[0]:
        known = {each: getattr(config, each) for each in _SIZES}
        known |= {"timeout": config.timeout, "members": config.members, "rank": rank, **facts}
        seat = store.get("seat").decode().split(" ", 1)[0]
        base.set(f"tokenyard/invitation/{at}", json.dumps({**known, "seat": int(seat)}))
    _check_reports(rank, here.come(_WHAT, report, config.timeout))
    left = admitted(sorted((*config.members, rank)))
    if store.compare_set("verdict", "", left).decode() != left:
        raise PeerTimeout(f"rank {config.rank} came to admit(), but the others recover()")
    return place


def _seat(store: dist.Store, config: Config, rank: int, at: str) -> dist.Store:
    """Where the open attempt meets. One that was given up is followed by another."""
    base, before = base_of(store), ""
    while True:
        mine = f"{base.add('tokenyard/seats', 1)} {rank} {at}"
        before = store.compare_set("seat", before, mine).decode()
        number, theirs, name = before.split(" ", 2)
        place = dist.PrefixStore(f"tokenyard/seat/{number}", base)
        here = _round(place, config.rank, config.members, int(theirs))
        if here.has_come(config.rank):  # stopped in the middle of leaving it
            here.give_up()
        if here.is_over():
            continue
        if (int(theirs), name) == (rank, at):
            return place
        raise here.disagree(
            f"ranks disagree on whom to admit(): rank {config.rank} says rank {rank} at {at!r}, "
            f"another says rank {theirs} at {name!r}"
        )


def _check_reports(newcomer: int, reports: list[str]) -> None:
    found = unreachable([Report(*json.loads(text)) for text in reports if text])
    if found:
        why = "; ".join(map(str, found))
        raise NotSupported(f"rank {newcomer} cannot be admitted, as GPUs do not fit: {why}")


def accept(
    store: dist.Store, rank: int, at: str, timeout: float, report: Callable[[dict[str, Any]], str]
) -> tuple[dist.Store, Config, dict[str, Any]]:
    """Of a newcomer: take the place of ``rank``; the object's part of the store, its sizes in the
    next epoch, and what :func:`invite` was told, of which ``report`` makes this rank's.

    Raises:
        ValueError: the seat that is free is another. RuntimeError: another process has taken it.
        PeerTimeout: no invitation, or a member did not come. NotSupported: GPUs do not fit.
    """
    place, facts = _invitation(base_of(store), rank, at, timeout)
    if facts["rank"] != rank:
        raise ValueError(f"rank ({rank}) is not the one invited at {at!r}: that is {facts['rank']}")
    mine = secrets.token_hex(8)
    if place.compare_set("claimed", "", mine).decode() != mine:
        raise RuntimeError(f"another process has taken the place of rank {rank} at {at!r}")
    sizes: dict[str, Any] = check_sizes({each: facts[each] for each in _SIZES})
    last = sizes["world_size"] - 1
    members = [check_whole("a member", each, 0, last) for each in facts["members"]]
    wait = check_timeout(facts["timeout"])
    _check_reports(rank, _round(place, rank, members, rank).come(_WHAT, report(facts), wait))
    absent = tuple(each for each in range(last + 1) if each not in (*members, rank))
    return place, Config(**sizes, rank=rank, timeout=wait, absent=absent), facts


def _invitation(base: Any, rank: int, at: str, timeout: float) -> tuple[dist.Store, dict[str, Any]]:
    """What members have published whose attempt is open, and where they meet."""
    clock, sleep, _ = clock_of(base)
    key, deadline = f"tokenyard/invitation/{at}", clock() + timeout
    while True:
        if base.check([key]):
            facts = json.loads(base.get(key))
            place = dist.PrefixStore(f"tokenyard/seat/{int(facts['seat'])}", base)
            if not Round(place, rank, 0).is_over():  # else one of before
                return place, facts
        if clock() > deadline:
            raise PeerTimeout(
                f"rank {rank} waited {timeout} s for an invitation at {at!r}: the members call "
                f"admit({rank}, {at!r}), and store is theirs"
            )
        sleep(POLL)


def _round(place: dist.Store, rank: int, members: list[int], newcomer: int) -> Round:
    return Round(place, rank, sorted((*members, newcomer)))
