"""Finding out: this host's files and limits, nvidia-smi, and torch (in a process of its own)."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable
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
from tokenyard.cli.doctor_guard import Asker
from tokenyard.cli.doctor_nvidia import NVIDIA_SMI, ask_driver, ask_matrix, by_uuid
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
)


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
    say("asking nvidia-smi")
    facts["driver"] = asker.ask("driver", lambda: ask_driver(asker.timeout, root))
    say("asking torch")
    facts |= _of_torch(asker)
    if facts["gpus"] and facts["driver"]:
        facts |= _with_nvidia_smi(asker, facts["gpus"], facts["driver"])
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


def _with_nvidia_smi(asker: Asker, gpus: list[Gpu], driver: Driver) -> dict[str, Any]:
    """What nvidia-smi knows about the GPUs that torch sees, in torch's order."""
    merged, order = by_uuid(gpus, driver.gpus)
    if order is None or len(gpus) < 2 or not shutil.which(NVIDIA_SMI):
        return {"gpus": merged}
    links = asker.ask("links", lambda: ask_matrix(["topo", "-m"], order, asker.timeout))
    p2p = asker.ask("p2p", lambda: ask_matrix(["topo", "-p2p", "r"], order, asker.timeout))
    return {"gpus": merged, "links": links, "p2p": p2p}


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
    memlock, open_files = (
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
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
