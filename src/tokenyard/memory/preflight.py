"""Which GPUs cannot reach each other's memory, and why: found out before anything hangs. Every rank
reports what it sees, and one pure function judges the reports, so that all come to one verdict."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from tokenyard.memory.kernel_launch import properties_of
from tokenyard.memory.meeting import Meeting

ALLOW_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable of torch: ranks may share a GPU, or know their GPUs by the same ordinal."""


class Report(NamedTuple):
    """What one rank sees."""

    rank: int
    host: str  # names the running system: host name and boot id
    gpu: str  # unique id; empty without one
    ordinal: int  # of its GPU in this process
    visible: Sequence[str]  # unique ids of the GPUs that its process sees, by ordinal
    reaches: Sequence[str]  # those of them whose memory its GPU can map
    overlap: bool = False  # whether torch was told to let ranks share a device (ALLOW_OVERLAP)
    problem: str = ""  # why there is no GPU to speak of


class Unreachable(NamedTuple):
    """A pair of ranks (``a < b``) that cannot share memory. ``a == b``: a rank without a GPU."""

    a: int
    b: int
    why: str

    def __str__(self) -> str:
        who = f"rank {self.a}" if self.a == self.b else f"ranks {self.a} and {self.b}"
        return f"{who} {self.why}"


def unreachable_pairs(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: float
) -> list[Unreachable]:
    """Collective: all pairs of ranks whose GPUs cannot map each other's memory; the same list on
    every rank. ``store``: part of one for this call alone. PeerTimeout: a rank did not come."""
    meeting = Meeting(store, rank, world_size, timeout)
    texts = meeting.exchange("the check of GPUs", json.dumps(report(rank, device)))
    return unreachable([Report(*json.loads(text)) for text in texts])


def report(rank: int, device: torch.device) -> Report:
    """What this process sees, if it is ``rank`` on ``device`` (without an index: the current)."""
    nothing = Report(rank, host_name(), "", -1, (), ())
    if device.type != "cuda":
        return nothing._replace(problem=f"works on {device}")
    if not torch.cuda.is_available():
        return nothing._replace(problem="sees no GPU")
    mine = device.index if ":" in str(device) else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if mine >= count:
        return nothing._replace(problem=f"works on {device}, but sees {count} GPU(s)")
    visible = tuple(_unique_id(ordinal) for ordinal in range(count))
    reaches = tuple(
        gpu
        for other, gpu in enumerate(visible)
        if other == mine or torch.cuda.can_device_access_peer(mine, other)
    )
    overlap = os.environ.get(ALLOW_OVERLAP) == "1"
    return Report(rank, nothing.host, visible[mine], mine, visible, reaches, overlap)


def unreachable_here() -> list[str]:
    """Why ranks could not share memory if there were one for each GPU that this process sees."""
    gpus = range(torch.cuda.device_count())
    return list(map(str, unreachable([report(gpu, torch.device("cuda", gpu)) for gpu in gpus])))


def host_name() -> str:
    """Tells systems apart: containers of a machine differ in names, clones of an image in boots."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def _unique_id(ordinal: int) -> str:
    return str(properties_of(ordinal).uuid)


def unreachable(reports: list[Report]) -> list[Unreachable]:
    """All pairs of ranks that cannot share memory, in order; a rank without a GPU with itself."""
    found = [Unreachable(each.rank, each.rank, each.problem) for each in reports if each.problem]
    working = [each for each in reports if not each.problem]
    pairs = [(a, b, _why_not(a, b)) for a, b in combinations(working, 2)]
    return sorted([*found, *(Unreachable(a.rank, b.rank, why) for a, b, why in pairs if why)])


def _why_not(a: Report, b: Report) -> str:
    """Why ranks ``a`` and ``b`` cannot share memory; empty if they can."""
    if a.host != b.host:
        return "are on different hosts"
    overlap = a.overlap and b.overlap
    if a.gpu == b.gpu:
        why = f"share one GPU ({a.gpu}): give each rank its own, or set {ALLOW_OVERLAP}=1 (slow)"
        return "" if overlap else why
    for one, other in ((a, b), (b, a)):
        if other.gpu not in one.visible:
            return (
                f"cannot map each other's memory: rank {one.rank} does not see rank {other.rank}'s "
                f"GPU ({other.gpu}); start all ranks with the same CUDA_VISIBLE_DEVICES"
            )
        if other.gpu not in one.reaches:
            return f"have no peer-to-peer path from {one.gpu} to {other.gpu}"
    if a.ordinal == b.ordinal and not overlap:
        return (
            f"know different GPUs by one ordinal (cuda:{a.ordinal}), which torch takes for one "
            f"GPU; start all ranks with the same CUDA_VISIBLE_DEVICES, or set {ALLOW_OVERLAP}=1"
        )
    return ""
