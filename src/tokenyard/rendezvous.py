"""How the ranks of one ``ExpertParallel`` find each other, and make sure that they were made with
the same arguments. Through the group's store, not through a collective: a rank that stays away is
named within the timeout, whatever the backend, and one that refuses its arguments says why.

Constructions on a group are rounds, numbered by what the store says and not by what a rank
remembers:

- ``round`` in the store is the number of the open round, 1 at first. A rank that constructs reads
  it and comes to that round (one :class:`Round`): it leaves its arguments there and waits for the
  verdict.
- The verdict is written once, atomically: "all here" by the rank that completes the round, or
  "given up" by one that has waited for its timeout or is interrupted.
- Before a rank leaves a round, however it does, there is a verdict, and it has moved ``round`` on
  by one (compare and set, so that a round is closed once).

So: (1) A rank is in a round at most once, since the number that it reads next is larger. A rank
that was killed in the middle of leaving (a second Ctrl-C) finds its own mark when it comes again,
gives that round up and goes on to the next. (2) Hence "all here" means that every rank is in this
very round: a rank of an old round never meets one of a new round, and what is made in a round has a
part of the store that no other round has. (3) Every rank of a round gets the same verdict; if it is
"given up", all of them raise. (4) Nothing that ranks do alone moves others: whatever they tried,
the next attempt that all of them make finds one open round, is completed by the last one that
comes, and works. (5) Nobody waits for longer than its timeout. A rank that comes after its peers
have given up opens the next round: it meets them there if they try again, and gives up after its
own timeout if they do not. It cannot know which, since to it an attempt that failed before looks
the same as one that its peers made alone. (6) A fast rank may be in round n + 1 while a slow one
still reads round n: round n is forgotten only once everybody has come to a later one.

A rank that refuses its arguments comes too, with the reason, and waits for the others (at most
:data:`REFUSAL_WAIT` seconds): all fail in the same round.

Example: rank 0 tries alone and gives up (round 1). Rank 1 tries alone and gives up (round 2). Both
try: rank 1 is first, reads 3 and waits; rank 0 reads 3 and completes the round: both work on in
round 3.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh
from torch.distributed import distributed_c10d as c10d

from tokenyard import forks
from tokenyard.errors import Mismatch, PeerError, PeerTimeout
from tokenyard.memory.meeting import Round
from tokenyard.memory.symmetric import MemoryGroup

REFUSAL_WAIT = 10.0
"""Most seconds that a rank which refuses its arguments waits, for the others to learn why."""
_ROUND, _OLDEST = "round", "oldest round"
_WHAT = "ExpertParallel(...)"


def check_group(
    group: dist.ProcessGroup | DeviceMesh | MemoryGroup | None,
) -> dist.ProcessGroup | MemoryGroup | None:
    """The group to work in; None if this process is alone."""
    if isinstance(group, MemoryGroup):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError(
                "group was given, but torch.distributed is not initialised: call "
                "init_process_group() first"
            )
        return None
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        group = _group_of(group)
    given: Any = group
    outside = given is None or given == dist.GroupMember.NON_GROUP_MEMBER
    if not (outside or isinstance(given, dist.ProcessGroup)):
        raise ValueError(
            f"group ({group!r}) must be a torch.distributed.ProcessGroup, a DeviceMesh or None"
        )
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(
            "this process is not a member of the group: make ExpertParallel on its members only"
        )
    if forks.is_inherited(group):
        raise RuntimeError(
            f"the group belongs to process {os.getppid()}, of which this one is a fork: start "
            "processes by 'spawn' or 'forkserver' and call init_process_group() in them"
        )
    return group


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of a mesh with one dimension; None if this process is in no such."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        known = ", ".join(map(repr, names)) if names else f"without names, {list(mesh.shape)}"
        example = f"mesh[{names[-1]!r}]" if names else "mesh.get_group(1)"
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions ({known}), but must have one: pass "
            f"that of the experts, such as {example}"
        )
    return mesh.get_group() if mesh.get_coordinate() is not None else None


def place_in(group: dist.ProcessGroup | MemoryGroup | None) -> tuple[int, int]:
    """This rank and the number of ranks."""
    if group is None:
        return 0, 1
    rank = group.rank() if isinstance(group, MemoryGroup) else dist.get_rank(group)
    return rank, group.size()


def group_store(group: dist.ProcessGroup | MemoryGroup | None) -> dist.Store | None:
    """The part of the store in which constructions on ``group`` meet; None of a rank alone."""
    if group is None:
        return None
    if isinstance(group, MemoryGroup):
        return group.open_store()
    base: dist.Store = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]
    return dist.PrefixStore(f"tokenyard/{group.group_name}", base)


def agree(
    store: dist.Store,
    rank: int,
    world_size: int,
    arguments: dict[str, Any],
    refusal: str,
    timeout: Any,
    host: str = "",
) -> tuple[dist.Store, list[str]]:
    """Publish this rank's arguments (or why it refuses them), read everybody's, and raise unless
    all agree: a part of ``store`` for what these ranks make now, and everybody's ``host`` by rank
    (nothing if this rank refuses). ``store``: of the group, the same for every construction on it.
    ``timeout``: seconds; whatever was given, if it is what this rank refuses.

    Raises:
        PeerTimeout: a rank did not come in time, or one gave up before all had come.
        PeerError: another rank refused its arguments.
        Mismatch: ranks disagree; names the argument, two ranks and their values.
    """
    if refusal:
        given = timeout if isinstance(timeout, (int, float)) and timeout > 0 else REFUSAL_WAIT
        timeout = min(given, REFUSAL_WAIT)
    number = _come(store, rank, world_size)
    here = _round(store, rank, world_size, number)
    mine = json.dumps({"refusal": refusal, "host": host, **arguments}, default=repr)
    lost: PeerTimeout | None = None
    try:
        texts = dict(enumerate(here.come(_WHAT, mine, timeout)))
    except PeerTimeout as error:
        texts, lost = here.heard(), error
    finally:
        _close(store, number)
    part = dist.PrefixStore(f"made/{number}", store)
    if refusal:
        return part, []
    everybody = {peer: json.loads(text) for peer, text in texts.items()}
    for peer, theirs in everybody.items():
        if theirs["refusal"]:
            raise PeerError(f"rank {peer} could not make its ExpertParallel: {theirs['refusal']}")
    if lost is not None:
        hint = "; every rank of the group makes every object, in the same order"
        earlier = _earlier(store, rank, world_size, number)
        raise PeerTimeout(f"{lost}{hint}{earlier}", lost.rank) from None
    if rank == 0:
        _forget(store, world_size, number)
    first = everybody[0]
    for name in arguments:
        for peer, theirs in everybody.items():
            if theirs.get(name) != first.get(name):
                raise Mismatch(
                    f"ranks disagree on {name}: rank 0 says {first.get(name)}, rank {peer} says "
                    f"{theirs.get(name)}"
                )
    return part, [theirs["host"] for theirs in everybody.values()]


def _come(store: dist.Store, rank: int, world_size: int) -> int:
    """The number of the open round. One that a rank was stopped in is closed first."""
    while True:
        number = int(store.compare_set(_ROUND, "", "1"))
        here = _round(store, rank, world_size, number)
        if here.has_come(rank):
            here.give_up()
        if not here.is_over():
            return number
        _close(store, number)


def _round(store: dist.Store, rank: int, world_size: int, number: int) -> Round:
    return Round(dist.PrefixStore(f"round/{number}", store), rank, world_size)


def _close(store: dist.Store, number: int) -> None:
    """Let whoever comes from now on open the next round. This one has a verdict."""
    store.compare_set(_ROUND, str(number), str(number + 1))


def _earlier(store: dist.Store, rank: int, world_size: int, number: int) -> str:
    """What there is to say of the round before, if it was given up."""
    before = _round(store, rank, world_size, number - 1)
    first = before.given_up_by()
    if first is None:
        return ""
    refusal = json.loads(before.heard().get(first, '{"refusal": ""}'))["refusal"]
    why = f": {refusal}" if refusal else ""
    return f" (rank {first} had given up an attempt before this one{why})"


def _forget(store: dist.Store, world_size: int, number: int) -> None:
    """Delete the rounds before this one: every rank has come here, so nobody reads them."""
    for earlier in range(int(store.compare_set(_OLDEST, "", "1")), number):
        _round(store, 0, world_size, earlier).forget()
    store.set(_OLDEST, str(number))


def ranks_sharing(
    group: dist.ProcessGroup | MemoryGroup | None,
    device: torch.device | None,
    hosts: list[str],
    rank: int,
) -> int:
    """Ranks whose rows lie in the memory of this one's device."""
    if isinstance(group, MemoryGroup):  # ranks of one process, on one GPU
        return group.size()
    return 1 if device is not None and device.type == "cuda" else hosts.count(hosts[rank])
