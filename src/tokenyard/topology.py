"""Ranks as a grid, which is given or read off the hosts that ranks say they are on.

``rank = node * ranks_per_node + local``. Ranks of one node reach each other fast (NVLink, or a
host's own memory); nodes reach each other over a network.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenyard.arguments import whole

HOST_VARIABLE = "TOKENYARD_HOST"
"""What this environment variable says is this rank's host: ranks that say the same share one."""
_MOST_NAMED = 8


def num_tasks(ranks: int, nodes: int) -> int:
    """Tasks of a channel in dispatch, the kernel that has most (``kernels/two_scheduler.py``); the
    last one enters the call barrier."""
    return ranks + ranks // nodes + nodes - 1


@dataclass(frozen=True, slots=True)
class Topology:
    """``num_nodes`` nodes of ``ranks_per_node`` consecutive ranks each."""

    num_nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            value = getattr(self, name)
            number = whole(value)
            if number is None or number < 1:
                raise ValueError(
                    f"{name} ({value!r}) of a topology must be a whole number of at least 1"
                )
            object.__setattr__(self, name, number)

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.ranks_per_node}"

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def has_levels(self) -> bool:
        """Whether there is both a network and something faster: several nodes of several ranks."""
        return self.num_nodes > 1 and self.ranks_per_node > 1

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def local_of(self, rank: int) -> int:
        """Index of ``rank`` inside its node."""
        return rank % self.ranks_per_node

    def rank_at(self, node: int, local: int) -> int:
        return node * self.ranks_per_node + local

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def rail_of(self, rank: int) -> range:
        """The ranks of the same local index, one per node, ``rank`` among them."""
        return range(self.local_of(rank), self.world_size, self.ranks_per_node)


def this_host() -> str:
    """A name for the host of this process: machine, boot and network namespace (a container with a
    network of its own is a host of its own), or what ``TOKENYARD_HOST`` says."""
    named = os.environ.get(HOST_VARIABLE, "")
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        network = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:  # not Linux, or /proc is hidden
        return platform.node()
    return f"{platform.node()}/{boot}/{network}"


def check_topology(given: Any, world_size: int) -> Topology | None:
    """``topology=`` as the caller gave it: None, a :class:`Topology`, or a pair (num_nodes,
    ranks_per_node). ValueError: it is none of them, or has more or fewer ranks than the group."""
    if given is None:
        return None
    grid = given if isinstance(given, Topology) else _pair(given)
    if grid.world_size != world_size:
        raise ValueError(
            f"topology ({grid}) has {grid.world_size} ranks, but the group has {world_size}: "
            "num_nodes * ranks_per_node must be the number of ranks"
        )
    return grid


def _pair(given: Any) -> Topology:
    try:
        num_nodes, ranks_per_node = given
    except (TypeError, ValueError):
        raise ValueError(
            f"topology ({given!r}) must be a pair (num_nodes, ranks_per_node), a Topology, or None"
        ) from None
    return Topology(num_nodes, ranks_per_node)


def detect(hosts: Sequence[str]) -> Topology:
    """The grid of ranks whose hosts are ``hosts``, by rank.

    >>> detect(["a", "a", "b", "b"])
    Topology(num_nodes=2, ranks_per_node=2)

    Raises:
        ValueError: ranks of a host are not consecutive, or hosts have different numbers of ranks.
            Says which host has which.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    each = len(hosts) // len(ranks)
    if all(list(range(mine[0], mine[0] + each)) == mine for mine in ranks.values()):
        return Topology(len(ranks), each)
    shown = [
        f"host {host} has {len(mine)} ({_few(mine)})"
        for host, mine in list(ranks.items())[:_MOST_NAMED]
    ]
    more = f"; and {len(ranks) - _MOST_NAMED} more hosts" if len(ranks) > _MOST_NAMED else ""
    wanted = "hosts must have equally many ranks"
    if len({len(mine) for mine in ranks.values()}) == 1:
        wanted = "ranks of one host must be consecutive"
    raise ValueError(
        f"{wanted}, but of {len(hosts)} ranks {'; '.join(shown)}{more}: launch the same number on "
        "each host, host after host (as torchrun does), or say topology=(num_nodes, "
        f"ranks_per_node), or name hosts by {HOST_VARIABLE}"
    )


def _few(ranks: list[int]) -> str:
    shown, more = ", ".join(map(str, ranks[:_MOST_NAMED])), len(ranks) > _MOST_NAMED
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{', ...' if more else ''}"


def node_numbers(topology: Topology | None, hosts: Sequence[str]) -> list[int]:
    """The node of each rank; without a grid, each host is one."""
    if topology is not None:
        return [topology.node_of(rank) for rank in range(topology.world_size)]
    order = list(dict.fromkeys(hosts))
    return [order.index(host) for host in hosts]


def settle_topology(given: Topology | None, hosts: Sequence[str]) -> tuple[Topology | None, str]:
    """The grid given, else the one detected; or None, and why there is none."""
    if given is not None:
        return given, ""
    try:
        return detect(hosts), ""
    except ValueError as error:
        return None, str(error)
