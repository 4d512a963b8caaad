"""Functions of any group or buffer: DeepEP V2.5's ``deep_ep.comm``."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tokenyard.deep_ep.elastic_facts import Domains, domains_of
from tokenyard.deep_ep.inputs import check_group, flag
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.topology import Topology, settle_topology, this_host


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """``buffer.barrier(...)``. A buffer has one context, so ``context_idx`` is None or 0."""
    if context_idx not in (None, 0):
        raise ValueError(f"context_idx ({context_idx!r}) must be None or 0: a buffer has one group")
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> Any:
    return buffer.get_comm_stream()


_KNOWN: WeakKeyDictionary[Any, Topology | None] = WeakKeyDictionary()


def _domains(group: Any, hybrid: bool) -> tuple[Domains, Domains]:
    check_group(group)
    if isinstance(group, MemoryGroup):
        return domains_of(Topology(1, group.size()), group.size(), hybrid)
    if group not in _KNOWN:
        hosts = [""] * group.size()
        dist.all_gather_object(hosts, this_host(), group)
        _KNOWN[group] = settle_topology(None, hosts)[0]
    return domains_of(_KNOWN[group], group.size(), hybrid)


def get_physical_domain_size(group_or_buffer: Any) -> tuple[int, int]:
    """Hosts, and ranks of each; ``(R, 1)`` where hosts are uneven. Collective the first time for a
    group; a buffer knows. ValueError: no group of this process."""
    if hasattr(group_or_buffer, "get_physical_domain_size"):
        return group_or_buffer.get_physical_domain_size()
    return _domains(group_or_buffer, True)[0]


def get_logical_domain_size(
    group_or_buffer: Any, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """The same with hybrid mode (default; a buffer has its own) on even hosts, else ``(1, R)``."""
    if hasattr(group_or_buffer, "get_logical_domain_size"):
        return group_or_buffer.get_logical_domain_size()
    hybrid = allow_hybrid_mode is None or flag("allow_hybrid_mode", allow_hybrid_mode)
    return _domains(group_or_buffer, hybrid)[1]
