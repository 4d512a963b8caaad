"""How DeepEP V2 counts ranks: hosts and the ranks of each (physical), and the domains that a
dispatch is made of (logical).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tokenyard.deep_ep.inputs import check_group
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.topology import detect, this_host

_KNOWN: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()


def _group_of(group_or_buffer: Any) -> Any:
    group = getattr(group_or_buffer, "group", group_or_buffer)
    check_group(group)
    return group


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Hosts, and ranks of each. Collective the first time for a group.

    Raises:
        ValueError: no group; hosts have different numbers of its ranks, or not consecutive ones.
    """
    group = _group_of(group_or_buffer)
    if isinstance(group, MemoryGroup):
        return 1, group.size()
    known = _KNOWN.get(group)
    if known is None:
        hosts = [""] * group.size()
        dist.all_gather_object(hosts, this_host(), group)
        grid = detect(hosts)
        known = _KNOWN[group] = grid.num_nodes, grid.ranks_per_node
    return known


def get_logical_domain_size(
    group_or_buffer: Any, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """``(1, R)``: here a dispatch is one step among all R ranks to its caller, whatever the engine
    does between hosts, so ``allow_hybrid_mode`` changes nothing.
    """
    return 1, _group_of(group_or_buffer).size()
