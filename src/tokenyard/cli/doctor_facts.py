"""What ``tokenyard doctor`` knows about a machine: plain values, those of its JSON document, so
that every verdict can be tested on made-up ones.

``None`` is "could not tell" (``Facts.untold`` then says why) or, where a docstring says so, "not
there". Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, takewhile
from typing import Any

from tokenyard.engines.select import CAPABILITY

UNLIMITED = -1
"""A limit that is none."""

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was found out. Keys of records are in brackets.

    Attributes:
        python, engines: version of Python, names that ``ExpertParallel(engine=)`` takes.
        cpus, memory, shm, limits, hostname: of this host, or of the container it runs in.
            ``memory`` (total, free) counts a cgroup's limit; so has ``shm``, of ``/dev/shm``.
            ``limits`` are soft: memlock in bytes, open_files; -1 is none. ``hostname`` (name,
            error): why it has no address, or "".
        infiniband: network devices that do RDMA.
        environment: variables that change what CUDA, NCCL, NVSHMEM, gloo or Triton do.
        pci: number of NVIDIA ``gpus`` on the bus, driver or not; kinds of their ``iommu`` domains.
        driver: NVIDIA's (version, cuda: the newest it serves, gpus: those that NVML sees); None
            also if there is none.
        torch: version, cuda, hip, backends, error: why its GPUs do not start, or "".
        triton: version; None also if it is not installed.
        nccl, nvshmem: as loaded beside torch (version, wanted: that torch was made for, paths);
            ``nccl`` is None also if torch has none.
        symmetric_memory: why torch's symmetric memory cannot be imported, or "".
        collect_env: what ``torch.utils.collect_env`` tells, for bug reports.
        gpus: those that torch sees (index, name, uuid, capability, memory_total, memory_free, mig:
            None if it cannot be partitioned); the matrices below are in the same order,
            ``[from][to]``.
        peers: whether one GPU can address the other's memory.
        preflight: why one rank per GPU could not share memory (``tokenyard.memory.preflight``).
        links: ``NV18``, ``PIX``, ``SYS`` ... as nvidia-smi names the path.
        p2p: ``OK``, or nvidia-smi's word for the driver's reason against peer access.
        untold: why a probe could not tell, by the name of the attribute.
    """

    python: str
    engines: list[str]
    cpus: int | None = None
    memory: Record | None = None
    shm: Record | None = None
    limits: Record | None = None
    hostname: Record | None = None
    infiniband: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    pci: Record | None = None
    driver: Record | None = None
    torch: Record | None = None
    triton: str | None = None
    symmetric_memory: str | None = None
    nccl: Record | None = None
    nvshmem: Record | None = None
    collect_env: dict[str, str] | None = None
    gpus: list[Record] | None = None
    peers: list[list[bool]] | None = None
    preflight: list[str] | None = None
    links: list[list[str]] | None = None
    p2p: list[list[str]] | None = None
    untold: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """One run of dispatch and combine; ``error`` is "" if every bit was the oracle's."""

    device: str
    ranks: int
    engine: str
    why: str = ""
    seconds: float | None = None
    error: str = ""


def gpu_pairs(facts: Facts, count: int | None = None) -> list[tuple[int, int]]:
    """Every pair among the first ``count`` GPUs that torch sees (default: all)."""
    return list(combinations(range(len((facts.gpus or [])[:count])), 2))


def unreachable(facts: Facts, count: int | None = None) -> list[tuple[int, int]]:
    """The pairs of which one GPU cannot address the other's memory; none without ``peers``."""
    peers = facts.peers
    if peers is None:
        return []
    return [(a, b) for a, b in gpu_pairs(facts, count) if not (peers[a][b] and peers[b][a])]


def old_gpus(facts: Facts, count: int | None = None) -> list[Record]:
    """Those of the first ``count`` GPUs (default: all) that are too old for kernels."""
    gpus = (facts.gpus or [])[:count]
    return [gpu for gpu in gpus if gpu["capability"] and numbers(gpu["capability"]) < CAPABILITY]


def nvlinks(facts: Facts, a: int, b: int) -> int | None:
    """NVLinks between two GPUs; 0 if their path is PCIe, None if nobody told."""
    if facts.links is None:
        return None
    link = facts.links[a][b]
    return int(link[2:]) if link.startswith("NV") and link[2:].isdecimal() else 0


def pairs_text(pairs: list[tuple[int, int]]) -> str:
    """``0-1, 0-3``."""
    return ", ".join(f"{a}-{b}" for a, b in pairs)


def numbers(version: str) -> tuple[int, ...]:
    """``"12.8"`` to ``(12, 8)``, up to the first part that is no number."""
    return tuple(map(int, takewhile(str.isdecimal, version.split("+")[0].split("."))))
