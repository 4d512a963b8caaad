"""Which engine an object works with, on which device, and why, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from textwrap import shorten
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tokenyard.config import Config
from tokenyard.engines.base import Choice, Request
from tokenyard.engines.collective import CollectiveEngine
from tokenyard.engines.failures import FailureReports
from tokenyard.engines.gloo_transport import GlooTransport
from tokenyard.engines.group_transport import GroupTransport
from tokenyard.engines.known import (
    AUTO,
    BETWEEN_NODES,
    COLLECTIVE,
    LOW_LATENCY,
    NVLINK,
    ON_KERNELS,
    TWOLEVEL,
)
from tokenyard.engines.obstacles import obstacle_of
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.engines.transport import Transport
from tokenyard.engines.tuning import MOST_DESTINATIONS, MOST_NODES, limit_of
from tokenyard.errors import Mismatch, NotSupported
from tokenyard.memory import cuda, nvshmem
from tokenyard.memory.kernel_launch import multiprocessors
from tokenyard.memory.meeting import Meeting
from tokenyard.memory.preflight import report, unreachable_pairs
from tokenyard.memory.symmetric import MemoryGroup, SymmetricMemory
from tokenyard.topology import Topology

Again: TypeAlias = "Callable[[Request, Config, dist.Store], Choice]"


def choose(
    group: dist.ProcessGroup | MemoryGroup | None,
    store: dist.Store | None,
    config: Config,
    request: Request,
) -> Choice:
    """Pick an engine for ``group`` (None: this process is alone). Collective.

    Raises:
        ValueError: the group has no backend for the device.
        NotSupported: the engine asked for cannot work here.
        Mismatch: ranks work on different kinds of device.
        PeerTimeout: a rank did not come.
    """
    if request.engine == TWOLEVEL:
        _grid(config, request)
    if isinstance(group, MemoryGroup):
        if request.engine == COLLECTIVE:
            raise NotSupported(
                "engine 'collective' needs a torch.distributed group; ranks of one process have "
                "engines 'nvlink', 'twolevel' and 'low_latency'"
            )
        return _in_one_process(group, request, config, store)
    gpu = _gpu(group, request.device)
    obstacle, most_sms, apart = "not asked for", 0, False
    if request.engine != COLLECTIVE:
        grid = config.topology if request.engine in BETWEEN_NODES else None
        obstacle, most_sms, apart = _common_obstacle(store, config, gpu, obstacle_of(gpu), grid)
    if request.engine in ON_KERNELS and obstacle:
        raise NotSupported(
            f"engine {request.engine!r} cannot work here: {obstacle}; engine 'collective' can"
        )
    if request.engine != COLLECTIVE and not obstacle and gpu is not None:
        return _on_gpus(group, gpu, most_sms, apart, request, config, store)
    found = _collective(group, store, config, request)
    if request.engine == AUTO and gpu is not None:
        return found._replace(why=f"{found.why}; not nvlink: {shorten(obstacle, 600)}")
    return found


# Engines with one-sided kernels


def _in_one_process(
    group: MemoryGroup, request: Request, config: Config, store: dist.Store | None
) -> Choice:
    memory = group.open_memory(config.timeout, config.members)
    why = f"{_number_of(config)} ranks in one process, on {memory.device}"
    again = partial(_in_one_process, group)
    return _on_kernels(memory, store, memory.num_sms, config, request, why, again)


def _on_gpus(
    group: dist.ProcessGroup | None, gpu: torch.device, most_sms: int, apart: bool,
    request: Request, config: Config, store: dist.Store | None,
) -> Choice:  # fmt: skip
    memory, why = _cuda_memory(group, store, config, gpu, request, apart)
    # another epoch may have ranks that the group has not: NVSHMEM's has all of it
    again = partial(_on_gpus, group if memory.ranks_per_node else None, gpu, most_sms, apart)
    return _on_kernels(memory, store, most_sms, config, request, why, again)


def _number_of(config: Config) -> str:
    """How many of the ranks there are, of how many."""
    left = f"{len(config.members)} of " if config.absent else ""
    return f"{left}{config.world_size}"


def _with_others(
    again: Again, request: Request, memory: SymmetricMemory, config: Config, store: dist.Store
) -> Choice:
    """What an engine with rings on ``memory`` becomes in another epoch."""
    if config.absent and memory.ranks_per_node:
        found = over_gloo(memory.device, request.no_grid, config, store)
        return found._replace(why=f"{found.why}; not twolevel: NVSHMEM cannot lose a rank")
    if config.absent:
        request = request._replace(engine=NVLINK)
    return again(request, config, store)


def enter(
    group: MemoryGroup | None,
    device: torch.device | None,
    terms: dict[str, Any],
    config: Config,
    store: dist.Store,
) -> Choice:
    """What members on these ``Choice.terms`` have chosen again with this process, for it."""
    request, most_sms = Request(**terms["request"]), int(terms["most_sms"])
    if request.engine == COLLECTIVE:
        return over_gloo(device, request.no_grid, config, store)
    if group is not None:
        return _in_one_process(group, request, config, store)
    gpu = _gpu(None, device)
    assert gpu is not None  # see report_of
    return _on_gpus(None, gpu, most_sms, False, request, config, store)


def report_of(
    group: dist.ProcessGroup | MemoryGroup | None,
    device: torch.device | None,
    rank: int,
    terms: dict[str, Any],
) -> str:
    """What this process sees of GPUs, if it and others are to map each other's memory on these
    ``Choice.terms``: a ``Report``, or nothing."""
    if terms["request"]["engine"] == COLLECTIVE or isinstance(group, MemoryGroup):
        return ""
    gpu = _gpu(None, device)
    seen, problem = report(rank, gpu or torch.device("cpu")), obstacle_of(gpu)
    if gpu is not None and not problem and multiprocessors(gpu) < terms["most_sms"]:
        problem = f"has {multiprocessors(gpu)} multiprocessors, others count on {terms['most_sms']}"
    return json.dumps(seen._replace(problem=problem) if problem else seen)


def _on_kernels(
    memory: SymmetricMemory, store: dist.Store | None, most_sms: int, config: Config,
    request: Request, why: str, again: Again,
) -> Choice:  # fmt: skip
    """``again``: the same in another epoch."""
    num_sms, all_sms = request.sms(most_sms)
    if request.engine == LOW_LATENCY:
        from tokenyard.engines.low_latency import LowLatencyEngine
        from tokenyard.engines.low_latency_workspace import tuned_for

        tuned, crossing = tuned_for(config, num_sms, request.once_per_node, memory)
        options = {"tuning": tuned, "buffer_bytes": request.buffer_bytes}
        make = partial(LowLatencyEngine, config, memory, **options)
        return Choice(make, memory.device, f"low_latency: {why}{crossing}")
    from tokenyard.engines.ring_engine import choose_peer

    nodes = request.engine == TWOLEVEL
    if nodes:
        why = f"{_grid(config, request)} nodes and ranks; {why}"
    num_bytes = request.buffer_bytes or DEFAULT_BUFFER_BYTES
    chosen = choose_peer(config, num_sms, num_bytes, all_sms=all_sms, nodes=nodes)
    failures = FailureReports(store or dist.HashStore(), config.rank, config.timeout)
    make = partial(
        chosen.engine, chosen.config, memory, tuning=chosen.tuning, buffer_bytes=num_bytes,
        receive_bytes=chosen.receive_bytes, heap_bytes=chosen.heap_bytes, failures=failures,
    )  # fmt: skip
    others, why = partial(_with_others, again, request, memory), f"{chosen.engine.name}: {why}"
    return Choice(make, memory.device, why, others, request, most_sms)


def _grid(config: Config, request: Request) -> Topology:
    """The grid of engine twolevel."""
    grid = config.topology
    if grid is None:
        why = f"{request.no_grid}; engine 'collective' does not"
        raise NotSupported(f"engine 'twolevel' needs ranks that form a grid: {why}")
    if limit_of(grid):
        raise NotSupported(
            f"engine 'twolevel' takes at most {MOST_NODES} nodes, and {MOST_DESTINATIONS} ranks "
            f"and nodes together, but {grid} are {grid.num_nodes} and "
            f"{grid.world_size + grid.num_nodes}: use smaller expert-parallel groups, or engine "
            f"'collective'"
        )
    return grid


def _gpu(group: dist.ProcessGroup | None, device: torch.device | None) -> torch.device | None:
    """The GPU that nvlink would work on."""
    if device is not None:
        return device if device.type == "cuda" else None
    if not torch.cuda.is_available():
        return None
    if group is not None and _accelerator(backends_of(group)) is None:
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _cuda_memory(
    group: dist.ProcessGroup | None, store: dist.Store | None, config: Config, gpu: torch.device,
    request: Request, apart: bool,
) -> tuple[SymmetricMemory, str]:  # fmt: skip
    """Memory of GPUs, and why it is that kind. ``apart``: see :func:`_common_obstacle`."""
    part = None if store is None else dist.PrefixStore("memory", store)
    place = (group, config.rank, config.world_size, gpu, config.timeout)
    grid = config.topology
    several = grid is not None and grid.num_nodes > 1
    # stores are faster than puts, so low_latency puts only where it must
    puts = request.engine == TWOLEVEL or (
        request.engine == LOW_LATENCY and (apart or nvshmem.puts_are_forced())
    )
    if puts and several and grid is not None and nvshmem.is_available():
        memory = nvshmem.NvshmemMemory(*place, store=part, ranks_per_node=grid.ranks_per_node)
        return memory, f"NVSHMEM between nodes of {grid.ranks_per_node} GPUs"
    memory = cuda.CudaMemory(*place, store=part, members=config.members)
    return memory, f"{_number_of(config)} GPUs that map each other's memory"


def _common_obstacle(
    store: dist.Store | None, config: Config, gpu: torch.device | None, obstacle: str,
    grid: Topology | None = None,
) -> tuple[str, int, bool]:  # fmt: skip
    """The first obstacle of any rank, or GPUs that cannot reach each other; the fewest
    multiprocessors of a GPU; and whether GPUs of different nodes do not map each other's memory:
    the same on every rank. ``grid``: they need not if there is NVSHMEM."""
    sms = 0 if gpu is None else multiprocessors(gpu)
    if store is None:
        return obstacle, sms, False
    size = config.world_size
    meeting = Meeting(dist.PrefixStore("engine", store), config.rank, size, config.timeout)
    puts = grid is not None and nvshmem.puts_are_forced()
    mine = json.dumps(["cpu" if gpu is None else "cuda", obstacle, sms, puts])
    texts = meeting.exchange("the choice of an engine", mine)
    everybody: list[tuple[str, str, int, bool]] = [json.loads(text) for text in texts]
    first = everybody[0]
    for peer, each in enumerate(everybody):
        if each[0] != first[0]:
            both = f"rank 0 works on {first[0]}, rank {peer} on {each[0]}"
            raise Mismatch(f"ranks disagree on device: {both}")
        if each[3] != first[3]:
            both = f"it is set on rank {peer if each[3] else 0} and not on {0 if each[3] else peer}"
            name, remedy = nvshmem.PUTS_VARIABLE, "set it on all, or on none"
            raise Mismatch(f"ranks disagree on {name}: {both}; {remedy}")
    found = [f"{each[1]} (rank {peer})" for peer, each in enumerate(everybody) if each[1]]
    if found or gpu is None:
        return (found or [""])[0], 0, False
    part = dist.PrefixStore("gpus", store)
    pairs, missing = unreachable_pairs(part, config.rank, size, gpu, config.timeout), ""
    apart = False
    if grid is not None:
        near = [pair for pair in pairs if grid.node_of(pair.a) == grid.node_of(pair.b)]
        if nvshmem.is_available() or len(near) == len(pairs):
            pairs, apart = near, len(near) < len(pairs)
        else:
            missing = "between nodes it needs NVSHMEM, which this torch cannot use: "
    why = "; ".join(f"ranks {pair.a} and {pair.b} {pair.why}" for pair in pairs)
    return missing + why if pairs else "", min(each[2] for each in everybody), apart


# collective


def _collective(
    group: dist.ProcessGroup | None, store: dist.Store | None, config: Config, request: Request
) -> Choice:
    device = request.device
    if group is None or store is None:
        alone = GlooTransport(None, 0, 1, config.timeout)
        return _over(alone, config, device, "one rank: rows only change places")
    backends = backends_of(group)
    if device is None:
        device = _accelerator(backends)
    backend = backends.get("cpu" if device is None else device.type, "")
    if backend not in ("", "gloo") and device is not None:
        why = f"{config.world_size} ranks over the group's {backend} backend on {device.type}"
        failures = FailureReports(store, config.rank, config.timeout)
        transport = GroupTransport(group, device, backend, failures)
        return _over(transport, config, device, why + _hops(config, request.no_grid))
    if "gloo" not in backends.values():
        wanted = "CPU tensors" if device is None else f"device {device}"
        raise ValueError(
            f"the group's backends are {backends}, none of them for {wanted}: pass device=, or a "
            f"group with gloo"
        )
    return over_gloo(device, request.no_grid, config, store)


def over_gloo(
    device: torch.device | None, no_grid: str, config: Config, store: dist.Store
) -> Choice:
    """Engine collective over a mesh of its own, of the members of ``config``."""
    transport = GlooTransport(store, config.rank, config.world_size, config.timeout, config.members)
    why = f"{_number_of(config)} ranks over a gloo mesh of their own, through host memory"
    again, request = partial(over_gloo, device, no_grid), Request(COLLECTIVE, no_grid=no_grid)
    choice = _over(transport, config, device, why + _hops(config, no_grid))
    return choice._replace(again=again, request=request)


def _over(transport: Transport, config: Config, device: torch.device | None, why: str) -> Choice:
    make = partial(CollectiveEngine, config, transport)
    return Choice(make, device, f"collective: {why}")


def _hops(config: Config, no_grid: str) -> str:
    """What there is to say about nodes, if there are several."""
    grid = config.topology
    if config.absent or (grid is not None and not grid.has_levels):
        return ""
    if grid is None:
        return f"; rows cross the network once per rank, not per node: {no_grid}"
    return f"; {grid} nodes and ranks: rows cross the network once per node"


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, e.g. ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))


def _accelerator(backends: dict[str, str]) -> torch.device | None:
    """The current accelerator, if the group has a backend of its own for it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None or backends.get(device.type, "gloo") == "gloo":
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())
