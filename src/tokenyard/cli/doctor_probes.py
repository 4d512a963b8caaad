"""Finding out: this host's files and limits, and torch and the driver in processes of their own."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenyard.cli.doctor_child import QUESTIONS
from tokenyard.cli.doctor_facts import Facts, Record
from tokenyard.cli.doctor_guard import NO_NVML, Asker
from tokenyard.engines.known import ENGINES

NVIDIA, DISPLAY = "0x10de", "0x03"
"""PCI vendor, and the first digits of a display controller's class."""

SETTINGS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES")
LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH")
LIBRARIES = ("NCCL_", "NVSHMEM_", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "GLOO_", "TRITON_")
VARIABLES = (*SETTINGS, *LOADER, *LIBRARIES)
"""How the names of variables begin that change how ranks talk to each other."""

DRIVER_FILE = "proc/driver/nvidia/version"

CGROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Files of both versions: the limit, what is used, and how much of that is cache."""


def gather(
    asker: Asker, root: Path = Path("/"), say: Callable[[str], object] = lambda _: None
) -> Facts:
    """Ask everything. ``root`` is where ``proc``, ``sys`` and ``dev`` are; ``say`` is told what is
    asked just now.
    """
    say("looking at this host")
    questions: dict[str, Callable[[], Any]] = {
        "cpus": lambda: len(os.sched_getaffinity(0)),
        "memory": lambda: host_memory(root),
        "shm": lambda: shared_memory(root),
        "limits": _limits,
        "hostname": _hostname,
        "infiniband": lambda: _names(root / "sys/class/infiniband"),
        "pci": lambda: pci_bus(root),
    }
    facts = {name: asker.ask_soon(name, probe) for name, probe in questions.items()}
    say("asking torch")
    facts |= asker.ask_process(QUESTIONS["torch"], "torch")
    gpus, bus = facts.get("gpus"), facts["pci"]
    if (root / DRIVER_FILE).is_file() or gpus or (bus and bus["gpus"]):
        say("asking the driver")
        facts |= _of_driver(asker, gpus, root)
    return Facts(
        python=platform.python_version(),
        engines=list(ENGINES),
        environment=environment(dict(os.environ)),
        **facts,
        untold=dict(asker.untold),
    )


def _of_driver(asker: Asker, gpus: list[Record] | None, root: Path) -> dict[str, Any]:
    """What NVML knows about the driver and, in torch's order, about the GPUs that torch sees."""
    told, errors = asker.process(QUESTIONS["nvml"], "nvml")
    driver = told.get("driver")
    if NO_NVML in errors.get("driver", ""):
        driver = asker.ask("driver", lambda: driver_in(root))
        errors = {name: NO_NVML for name in ("links", "p2p") if driver or gpus}
    asker.untold.update(errors)
    facts: dict[str, Any] = {"driver": driver}
    if not gpus or not driver:
        return facts
    facts["gpus"], order = by_uuid(gpus, driver["gpus"])
    if order is not None and len(gpus) > 1:
        for name in ("links", "p2p"):
            matrix = told.get(name)
            facts[name] = matrix and [[matrix[a][b] for b in order] for a in order]
    return facts


def driver_in(root: Path) -> Record | None:
    """The driver as its own file tells, without NVML; None if there is no sign of one."""
    file = root / DRIVER_FILE
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return {"version": match[1], "cuda": None, "gpus": []} if match else None


def by_uuid(
    gpus: Sequence[Record], seen: Sequence[Record]
) -> tuple[list[Record], list[int] | None]:
    """Add to torch's GPUs what NVML saw of them (free memory without our own context, MIG).

    Returns:
        The GPUs, and where each stands among ``seen``; None if one is not there (a MIG instance).
    """
    places = {_bare(gpu["uuid"]): at for at, gpu in enumerate(seen) if gpu["uuid"]}
    order = [places.get(_bare(gpu["uuid"]), -1) for gpu in gpus]
    merged: list[Record] = []
    for gpu, at in zip(gpus, order, strict=True):
        known = {} if at < 0 else {"mig": seen[at]["mig"]}
        if at >= 0 and seen[at]["memory_free"]:
            known["memory_free"] = seen[at]["memory_free"]
        merged.append(gpu | known)
    return merged, (None if -1 in order else order)


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


def host_memory(root: Path) -> Record:
    """What this host, or the cgroup of this process, has in all and can still give."""
    sizes = _sizes(root / "proc/meminfo")
    total, free = sizes["MemTotal:"] * 1024, sizes["MemAvailable:"] * 1024
    for files in CGROUPS:
        limit, used, stat = (root / "sys/fs/cgroup" / file for file in files)
        try:
            most = int(limit.read_text())  # "max" is no limit
            left = most - int(used.read_text()) + _sizes(stat).get("inactive_file", 0)
        except (OSError, ValueError):
            continue
        total, free = min(total, most), min(free, max(left, 0))
    return {"total": total, "free": free}


def _sizes(file: Path) -> dict[str, int]:
    """The second word of each line, by the first."""
    lines = map(str.split, file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def shared_memory(root: Path) -> Record:
    """Size and free bytes of ``/dev/shm``, through which NCCL and processes of torch share memory;
    0 if it is not there.
    """
    folder = root / "dev/shm"
    total, _, free = shutil.disk_usage(folder) if folder.is_dir() else (0, 0, 0)
    return {"total": total, "free": free}


def _limits() -> Record:
    asked = {"memlock": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    return {name: resource.getrlimit(limit)[0] for name, limit in asked.items()}


def _hostname() -> Record:
    name, why = socket.gethostname(), ""
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        why = str(error)
    return {"name": name, "error": why}


def pci_bus(root: Path) -> Record:
    """NVIDIA's GPUs on the PCI bus, and the distinct kinds of their IOMMU domains ("identity",
    "DMA", "DMA-FQ", ...).
    """
    devices = root / "sys/bus/pci/devices"
    gpus = [devices / name for name in _names(devices) if _is_gpu(devices / name)]
    types = [gpu / "iommu_group/type" for gpu in gpus]
    kinds = {file.read_text().strip() for file in types if file.is_file()}
    return {"gpus": len(gpus), "iommu": sorted(kinds)}


def _is_gpu(device: Path) -> bool:
    vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    return vendor == NVIDIA and kind.startswith(DISPLAY)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Of ``variables`` those that change how ranks talk to each other."""
    return {name: value for name, value in sorted(variables.items()) if name.startswith(VARIABLES)}
