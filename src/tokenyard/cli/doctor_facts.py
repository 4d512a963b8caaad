"""What ``tokenyard doctor`` knows about a machine: plain values, so that every verdict can be
tested on made-up ones.

``None`` is "could not tell" (``Facts.untold`` then says why) or, where a docstring says so, "not
there". Sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from tokenyard.engines.select import CAPABILITY

UNLIMITED = -1
"""A limit that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as torch or NVML numbers it. ``mig`` is None on GPUs that cannot be partitioned."""

    index: int
    name: str
    uuid: str | None = None
    capability: str | None = None
    memory_total: int | None = None
    memory_free: int | None = None
    mig: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver; ``cuda`` is the newest CUDA it serves, ``gpus`` those that NVML sees."""

    version: str | None = None
    cuda: str | None = None
    gpus: list[Gpu] = field(default_factory=list[Gpu])


@dataclass(frozen=True, slots=True, kw_only=True)
class Torch:
    """A build of torch. ``error`` is why its GPUs do not start, or ""."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    backends: list[str] = field(default_factory=list[str])
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """As loaded beside torch: its version, that torch was made for, the files it came from."""

    version: str | None = None
    wanted: str | None = None
    paths: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Memory or a file system in memory, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Soft limits of this process: bytes of locked memory, and open files. -1 is none."""

    memlock: int
    open_files: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostName:
    """This host's name; ``error`` is why it has no address, or ""."""

    name: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciBus:
    """NVIDIA GPUs on the PCI bus, with or without a driver, and kinds of their IOMMU domains."""

    gpus: int
    iommu: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was found out.

    Attributes:
        python, engines: version of Python, names that ``ExpertParallel(engine=)`` takes.
        cpus, memory, shm, limits, hostname: of this host, or of the container it runs in.
            ``memory`` counts a cgroup's limit.
        infiniband: network devices that do RDMA.
        environment: variables that change what CUDA, NCCL, NVSHMEM, gloo or Triton do.
        pci, driver: ``driver`` is None also if there is none.
        torch, triton, nccl, nvshmem: ``triton`` is None also if it is not installed, ``nccl`` if
            torch has none.
        symmetric_memory: why torch's symmetric memory cannot be imported, or "".
        collect_env: what ``torch.utils.collect_env`` tells, for bug reports.
        gpus: those that torch sees; the matrices below are in the same order, ``[from][to]``.
        peers: whether one GPU can address the other's memory.
        preflight: why one rank per GPU could not share memory (``tokenyard.memory.preflight``).
        links: ``NV18``, ``PIX``, ``SYS`` ... as nvidia-smi names the path.
        p2p: ``OK``, or nvidia-smi's word for the driver's reason against peer access.
        untold: why a probe could not tell, by the name of the attribute.
    """

    python: str
    engines: list[str]
    cpus: int | None = None
    memory: Space | None = None
    shm: Space | None = None
    limits: Limits | None = None
    hostname: HostName | None = None
    infiniband: list[str] | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])
    pci: PciBus | None = None
    driver: Driver | None = None
    torch: Torch | None = None
    triton: str | None = None
    symmetric_memory: str | None = None
    nccl: Library | None = None
    nvshmem: Library | None = None
    collect_env: dict[str, str] | None = None
    gpus: list[Gpu] | None = None
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


def old_gpus(facts: Facts, count: int | None = None) -> list[Gpu]:
    """Those of the first ``count`` GPUs (default: all) that are too old for kernels."""
    gpus = (facts.gpus or [])[:count]
    return [gpu for gpu in gpus if gpu.capability and numbers(gpu.capability) < CAPABILITY]


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
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)
