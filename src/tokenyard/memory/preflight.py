"""Which GPUs cannot reach each other's memory, and why: found out before anything hangs.

Every rank reports what it sees (:func:`report`), the reports travel through the store, and one pure
function judges them (:func:`unreachable`), so that all ranks come to the same verdict.
"""

from __future__ import annotations

import json
import os
import socket
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from tokenyard.memory.meeting import Meeting

ALLOW_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Environment variable of torch: ranks may share a GPU, or know their GPUs by the same ordinal."""


class Report(NamedTuple):
    """What one rank sees.

    Attributes:
        rank: its number.
        host: names the running system: host name and boot id.
        gpu: unique id of its GPU; empty without one.
        ordinal: of its GPU in this process.
        visible: unique ids of the GPUs that its process sees, by ordinal.
        reaches: those of them whose memory its GPU can map.
        overlap: whether torch was told to let ranks share a device (:data:`ALLOW_OVERLAP`).
        problem: why there is no GPU to speak of.
    """

    rank: int
    host: str
    gpu: str
    ordinal: int
    visible: tuple[str, ...]
    reaches: tuple[str, ...]
    overlap: bool = False
    problem: str = ""


class Unreachable(NamedTuple):
    """A pair of ranks (``a < b``) that cannot share memory. ``a == b``: a rank without a GPU."""

    a: int
    b: int
    why: str


def unreachable_pairs(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: float
) -> list[Unreachable]:
    """Collective: all pairs of ranks whose GPUs cannot map each other's memory; the same list on
    every rank.

    Args:
        store: part of a store for this call alone.
        device: what this rank works on.

    Raises:
        PeerTimeout: a rank did not come within ``timeout`` seconds.
    """
    return unreachable(exchange_reports(store, rank, world_size, device, timeout))


def exchange_reports(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout: float
) -> list[Report]:
    """Collective: every rank's report, by rank.

    Raises:
        PeerTimeout: a rank did not come within ``timeout`` seconds.
    """
    meeting = Meeting(store, rank, world_size, timeout)
    texts = meeting.exchange("the check of GPUs", json.dumps(report(rank, device)))
    return [_from_json(text) for text in texts]


def _from_json(text: str) -> Report:
    rank, host, gpu, ordinal, visible, reaches, overlap, problem = json.loads(text)
    return Report(rank, host, gpu, ordinal, tuple(visible), tuple(reaches), overlap, problem)


def report(rank: int, device: torch.device) -> Report:
    """What this process sees, if it is ``rank`` and works on ``device`` (without an index: the
    current one).
    """
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
        visible[other]
        for other in range(count)
        if other == mine or torch.cuda.can_device_access_peer(mine, other)
    )
    return Report(
        rank,
        host_name(),
        visible[mine],
        mine,
        visible,
        reaches,
        os.environ.get(ALLOW_OVERLAP) == "1",
    )


def local_reports() -> list[Report]:
    """Reports as if there were one rank for each GPU that this process sees (for ``tokenyard
    doctor``).
    """
    return [
        report(ordinal, torch.device("cuda", ordinal))
        for ordinal in range(torch.cuda.device_count())
    ]


def host_name() -> str:
    """Tells running systems apart: containers of one machine have different names, clones of one
    image other boot ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}/{boot}"


def _unique_id(ordinal: int) -> str:
    seen: Any = cast("Any", torch.cuda.get_device_properties(ordinal))
    return str(seen.uuid)


def unreachable(reports: list[Report]) -> list[Unreachable]:
    """All pairs of ranks that cannot share memory, in order; a rank without a GPU is paired with
    itself only.
    """
    found = [Unreachable(each.rank, each.rank, each.problem) for each in reports if each.problem]
    working = [each for each in reports if not each.problem]
    for a, b in combinations(working, 2):
        why = _why_not(a, b)
        if why:
            found.append(Unreachable(a.rank, b.rank, why))
    return sorted(found)


def _why_not(a: Report, b: Report) -> str:
    """Why ranks ``a`` and ``b`` cannot share memory; empty if they can."""
    if a.host != b.host:
        return "are on different hosts"
    overlap = a.overlap and b.overlap
    if a.gpu == b.gpu:
        return (
            ""
            if overlap
            else f"share one GPU ({a.gpu}): give each rank its own, or set {ALLOW_OVERLAP}=1 (slow)"
        )
    for one, other in ((a, b), (b, a)):
        if other.gpu not in one.visible:
            return (
                f"cannot map each other's memory: rank {one.rank} does not see rank {other.rank}'s "
                f"GPU ({other.gpu}); start "
                "all ranks with the same CUDA_VISIBLE_DEVICES"
            )
        if other.gpu not in one.reaches:
            return f"have no peer-to-peer path from {one.gpu} to {other.gpu}"
    if a.ordinal == b.ordinal and not overlap:
        return (
            f"know different GPUs by one ordinal (cuda:{a.ordinal}), which torch takes for one "
            f"GPU; start all ranks with the "
            f"same CUDA_VISIBLE_DEVICES, or set {ALLOW_OVERLAP}=1"
        )
    return ""


def explain(reports: list[Report]) -> list[str]:
    """Every reason why these ranks cannot all share memory, for people; empty if they can.

    Ranks on several hosts make one line; every other pair one of its own.
    """
    lines = [f"rank {pair.a} {pair.why}" for pair in unreachable(reports) if pair.a == pair.b]
    hosts: dict[str, list[int]] = {}
    for each in reports:
        if not each.problem:
            hosts.setdefault(each.host, []).append(each.rank)
    if len(hosts) > 1:
        where = "; ".join(f"{spans(ranks)} on {host}" for host, ranks in hosts.items())
        lines.append(f"ranks are on {len(hosts)} hosts: {where}")
    by_rank = {each.rank: each for each in reports}
    for a, b, why in unreachable(reports):
        if a != b and by_rank[a].host == by_rank[b].host:
            lines.append(f"ranks {a} and {b} {why}")
    return lines


def spans(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
