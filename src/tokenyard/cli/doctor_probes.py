"""Finding out: this host's files and limits, and torch and the driver in processes of their own."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenyard.cli.doctor_facts import (
    Driver,
    Facts,
    Gpu,
    HostName,
    Library,
    Limits,
    PciBus,
    Space,
    Torch,
)
from tokenyard.cli.doctor_guard import NO_NVML, Asker
from tokenyard.engines.known import ENGINES

NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor, and the first digits of a display controller's class."""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "HIP_VISIBLE_DEVICES",
)
VARIABLE_PREFIXES = ("NCCL_", "NVSHMEM_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "GLOO_", "TRITON_")

TORCH_QUESTIONS = (
    "triton",
    "symmetric_memory",
    "nccl",
    "nvshmem",
    "torch",
    "gpus",
    "peers",
    "preflight",
    "collect_env",
)
NVML_QUESTIONS = ("driver", "links", "p2p")
DRIVER_FILE = "proc/driver/nvidia/version"


def gather(
    asker: Asker, root: Path = Path("/"), say: Callable[[str], object] = lambda _: None
) -> Facts:
    """Ask everything. ``root`` is where ``proc``, ``sys`` and ``dev`` are; ``say`` is told what is
    asked just now.
    """
    say("looking at this host")
    facts: dict[str, Any] = {
        "cpus": asker.ask("cpus", lambda: len(os.sched_getaffinity(0))),
        "memory": asker.ask_soon("memory", lambda: host_memory(root)),
        "shm": asker.ask_soon("shm", lambda: shared_memory(root)),
        "limits": asker.ask("limits", _limits),
        "hostname": asker.ask_soon("hostname", _hostname),
        "infiniband": asker.ask_soon("infiniband", lambda: _names(root / "sys/class/infiniband")),
        "pci": asker.ask_soon("pci", lambda: pci_bus(root)),
    }
    say("asking torch")
    facts |= _of_torch(asker)
    loaded = (root / DRIVER_FILE).is_file()
    if loaded or facts["gpus"] or (facts["pci"] and facts["pci"].gpus):
        say("asking the driver")
        facts |= _of_driver(asker, facts["gpus"], root)
    return Facts(
        python=platform.python_version(),
        engines=list(ENGINES),
        environment=environment(dict(os.environ)),
        **facts,
        untold=dict(asker.untold),
    )


def _of_torch(asker: Asker) -> dict[str, Any]:
    told = asker.ask_process(TORCH_QUESTIONS, "torch")
    kinds: dict[str, Callable[..., Any]] = {"torch": Torch, "nccl": Library, "nvshmem": Library}
    facts: dict[str, Any] = {name: told.get(name) for name in TORCH_QUESTIONS}
    for name, kind in kinds.items():
        facts[name] = None if facts[name] is None else kind(**facts[name])
    if facts["gpus"] is not None:
        facts["gpus"] = [Gpu(**gpu) for gpu in facts["gpus"]]
    return facts


def _of_driver(asker: Asker, gpus: list[Gpu] | None, root: Path) -> dict[str, Any]:
    """What NVML knows about the driver and, in torch's order, about the GPUs that torch sees."""
    told, errors = asker.process(NVML_QUESTIONS, "nvml")
    known: dict[str, Any] = told.get("driver") or {}
    seen = [Gpu(**gpu) for gpu in known.get("gpus", [])]
    driver = replace(Driver(**known), gpus=seen) if known else None
    if NO_NVML in errors.get("driver", ""):
        driver = asker.ask("driver", lambda: driver_in(root))
        errors = {name: NO_NVML for name in ("links", "p2p") if driver or gpus}
    asker.untold.update(errors)
    facts: dict[str, Any] = {"driver": driver}
    if not gpus or not driver:
        return facts
    facts["gpus"], order = by_uuid(gpus, driver.gpus)
    if order is not None and len(gpus) > 1:
        for name in ("links", "p2p"):
            matrix = told.get(name)
            facts[name] = matrix and [[matrix[a][b] for b in order] for a in order]
    return facts


def driver_in(root: Path) -> Driver | None:
    """The driver as its own file tells, without NVML; None if there is no sign of one."""
    file = root / DRIVER_FILE
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return Driver(version=match[1]) if match else None


def by_uuid(gpus: Sequence[Gpu], seen: Sequence[Gpu]) -> tuple[list[Gpu], list[int] | None]:
    """Add to torch's GPUs what NVML saw of them (free memory without our own context, MIG).

    Returns:
        The GPUs, and where each stands among ``seen``; None if one is not there (a MIG instance).
    """
    places = {_bare(gpu.uuid): at for at, gpu in enumerate(seen) if gpu.uuid}
    found = [places.get(_bare(gpu.uuid)) for gpu in gpus]
    merged = [
        gpu
        if at is None
        else replace(gpu, memory_free=seen[at].memory_free or gpu.memory_free, mig=seen[at].mig)
        for gpu, at in zip(gpus, found, strict=True)
    ]
    order = [at for at in found if at is not None]
    return merged, (order if len(order) == len(gpus) else None)


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


def host_memory(root: Path) -> Space:
    """What this host, or the cgroup of this process, has in all and can still give."""
    fields = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        group = root / "sys/fs/cgroup"
        try:
            most = int((group / limit).read_text())  # "max" is no limit
            cache = _field((group / stat).read_text(), "inactive_file")
            left = most - int((group / used).read_text()) + cache
        except (OSError, ValueError):
            continue
        total, free = min(total, most), min(free, max(left, 0))
    return Space(total=total, free=free)


def _field(text: str, name: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[0] == name), 0)


def shared_memory(root: Path) -> Space:
    """Size and free bytes of ``/dev/shm``, through which NCCL and processes of torch share memory;
    0 if it is not there.
    """
    folder = root / "dev/shm"
    if not folder.is_dir():
        return Space(total=0, free=0)
    usage = shutil.disk_usage(folder)
    return Space(total=usage.total, free=usage.free)


def _limits() -> Limits:
    asked = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    memlock, open_files = (resource.getrlimit(limit)[0] for limit in asked)
    return Limits(memlock=memlock, open_files=open_files)


def _hostname() -> HostName:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return HostName(name=name, error=str(error))
    return HostName(name=name)


def pci_bus(root: Path) -> PciBus:
    """NVIDIA's GPUs on the PCI bus, and the distinct kinds of their IOMMU domains ("identity",
    "DMA", "DMA-FQ", ...).
    """
    devices = root / "sys/bus/pci/devices"
    gpus = [devices / name for name in _names(devices) if _is_gpu(devices / name)]
    types = [gpu / "iommu_group/type" for gpu in gpus]
    return PciBus(
        gpus=len(gpus), iommu=sorted({file.read_text().strip() for file in types if file.is_file()})
    )


def _is_gpu(device: Path) -> bool:
    vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    return vendor == NVIDIA and kind.startswith(DISPLAY)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Of ``variables`` those that change how ranks talk to each other."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in VARIABLES or name.startswith(VARIABLE_PREFIXES)
    }
