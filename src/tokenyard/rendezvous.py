"""How the ranks of one ``ExpertParallel`` find each other, and make sure that they were made with the same arguments.

Through the group's store, not through a collective: a rank that stays away is named within the timeout, whatever the
backend, and a rank that refuses its arguments tells the others why.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tokenyard.errors import Mismatch, PeerError, PeerTimeout


def open_store(group: dist.ProcessGroup, rank: int) -> dist.Store:
    """A part of the default store that belongs to this construction: the n-th one on this group, on every rank."""
    base: dist.Store = c10d._get_default_store()  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]
    name = f"tokenyard/{group.group_name}"
    number = base.add(f"{name}/count/{rank}", 1)
    return dist.PrefixStore(f"{name}/{number}", base)


def agree(
    store: dist.Store,
    rank: int,
    world_size: int,
    arguments: dict[str, Any],
    refusal: str,
    timeout: float,
    host: str = "",
) -> list[str]:
    """Publish this rank's arguments (or why it refuses them), read everybody's, and raise unless all agree.

    Returns everybody's ``host`` by rank (nothing if this rank refuses).

    Raises:
        PeerTimeout: a rank did not come within ``timeout`` seconds.
        PeerError: another rank refused its arguments.
        Mismatch: ranks disagree; names the argument, two ranks and their values.
    """
    store.set(f"arguments/{rank}", json.dumps({"refusal": refusal, "host": host, **arguments}, default=repr))
    if refusal:
        return []
    everybody = [json.loads(text) for text in _read_all(store, rank, world_size, timeout)]
    for peer, theirs in enumerate(everybody):
        if theirs["refusal"]:
            raise PeerError(f"rank {peer} could not make its ExpertParallel: {theirs['refusal']}")
    first = everybody[0]
    for name in arguments:
        for peer, theirs in enumerate(everybody):
            if theirs.get(name) != first.get(name):
                raise Mismatch(
                    f"ranks disagree on {name}: rank 0 says {first.get(name)}, rank {peer} says {theirs.get(name)}"
                )
    return [theirs["host"] for theirs in everybody]


def give_up(store: dist.Store, rank: int) -> None:
    """Let a rank that comes too late know at once."""
    store.set("gave up", str(rank))


def _read_all(store: dist.Store, rank: int, world_size: int, timeout: float) -> list[str]:
    keys = [f"arguments/{peer}" for peer in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        give_up(store, rank)
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        names = ", ".join(map(str, missing))
        raise PeerTimeout(
            f"rank {rank} waited {timeout} s in ExpertParallel(...) for rank(s) {names}: every rank of the group must make it "
            "(is one of them slow, dead, or making a different number of objects?)",
            missing[0] if missing else -1,
        ) from error
    if store.check(["gave up"]):
        earlier = int(store.get("gave up"))
        raise PeerTimeout(
            f"rank {rank} came to ExpertParallel(...) after rank {earlier} had given up waiting for it", earlier
        )
    return [store.get(key).decode() for key in keys]
