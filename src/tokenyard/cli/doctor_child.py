"""The process that asks torch or the GPU driver, or runs the self-test: it may hang or crash."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from tokenyard.cli.doctor_guard import NO_NVML, reason
from tokenyard.cli.doctor_selftest import self_test
from tokenyard.memory.preflight import unreachable_here

cuda: Any = torch.cuda

# torch


def _why_not(call: Callable[..., object], *arguments: Any) -> str:
    """Why ``call`` raises; "" if it does not."""
    try:
        call(*arguments)
    except Exception as error:
        return reason(error)
    return ""


def _torch() -> dict[str, Any]:
    build: Any = torch.version
    asks = {name: f"is_{name}_available" for name in ("gloo", "nccl", "mpi")}
    return {
        "version": torch.__version__,
        "cuda": build.cuda,
        "hip": build.hip,
        "backends": [name for name, ask in asks.items() if getattr(dist, ask, bool)()],
        "error": _why_not(cuda.init) if build.cuda or build.hip else "",
    }


def _triton() -> str | None:
    try:
        triton: Any = importlib.import_module("triton")
    except ModuleNotFoundError:
        return None
    return triton.__version__


def _collect_env() -> dict[str, str]:
    env: Any = collect_env
    told: dict[str, Any] = env.get_env_info()._asdict()
    return {name: str(value) for name, value in told.items() if value not in (None, "", "N/A")}


def _nccl() -> dict[str, Any] | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    version = ".".join(map(str, cuda.nccl.version()))
    _, wanted = wanted_package("nvidia-nccl")
    return {"version": version, "wanted": wanted, "paths": mapped_files("libnccl.so")}


def _nvshmem() -> dict[str, Any]:
    """The version is that of the package; a library loaded from elsewhere may have another."""
    package, wanted = wanted_package("nvidia-nvshmem")
    try:
        version = metadata.version(package) if package else None
    except metadata.PackageNotFoundError:
        version = None
    return {"version": version, "wanted": wanted, "paths": mapped_files("libnvshmem_host.so")}


def wanted_package(prefix: str) -> tuple[str | None, str | None]:
    """Name and version of the package with this prefix that torch's own package asks for
    (``nvidia-nccl-cu13==2.28.9; platform_system == ...``); None twice if there is none.
    """
    pattern = re.compile(rf"({re.escape(prefix)}[\w-]*)\s*\(?==\s*([\d.]+)")
    found = next(filter(None, map(pattern.match, metadata.requires("torch") or [])), None)
    return (found[1], found[2]) if found else (None, None)


def mapped_files(start: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files that this process has loaded whose name begins with ``start``, each once."""
    columns = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = (parts[5].removesuffix(" (deleted)") for parts in columns if len(parts) == 6)
    return list(dict.fromkeys(path for path in paths if path.rpartition("/")[2].startswith(start)))


def _gpu(index: int) -> dict[str, Any]:
    properties = cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    try:
        free = cuda.mem_get_info(index)[0]
    except RuntimeError:  # in use by a process that keeps others out
        free = None
    return {
        "index": index,
        "name": properties.name,
        "uuid": None if uuid is None else str(uuid),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_total": properties.total_memory,
        "memory_free": free,
        "mig": None,
    }


def _peers() -> list[list[bool]]:
    gpus = range(cuda.device_count())
    return [[a == b or cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]


# The driver

P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}
"""nvidia-smi's word for each status of a pair; others are U, unknown."""

PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvidia-smi's word for the level of a pair's nearest common ancestor."""

READ, SWITCH = 0, 2
"""NVML's numbers for the capability to read a peer's memory, and for an NVLink to a switch."""


def _of_nvml(answer: Callable[[Any, list[Any]], Any]) -> Callable[[], Any]:
    """Make a question of a function of NVML, started, and its GPUs. None answers it where there is
    no driver.

    Raises:
        RuntimeError: nvidia-ml-py is not installed.
        NVMLError: the driver refuses.
    """

    def ask() -> Any:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            raise RuntimeError(NO_NVML) from None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError_LibraryNotFound:
            return None
        count = nvml.nvmlDeviceGetCount()
        return answer(nvml, [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(count)])

    return ask


@_of_nvml
def driver(nvml: Any, gpus: list[Any]) -> dict[str, Any]:
    """``Facts.driver``."""
    newest = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    return {
        "version": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{newest // 1000}.{newest % 1000 // 10}",
        "gpus": [_seen(nvml, index, gpu) for index, gpu in enumerate(gpus)],
    }


def _seen(nvml: Any, index: int, gpu: Any) -> dict[str, Any]:
    """One of ``Facts.gpus``; None for what this GPU does not tell."""

    def ask(name: str) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(gpu)
        except nvml.NVMLError:
            return None

    memory, capability, mig = ask("MemoryInfo"), ask("CudaComputeCapability"), ask("MigMode")
    return {
        "index": index,
        "name": ask("Name"),
        "uuid": ask("UUID"),
        "capability": capability and ".".join(map(str, capability)),
        "memory_total": memory and memory.total,
        "memory_free": memory and memory.free,
        "mig": mig and bool(mig[0]),
    }


def _matrix(gpus: list[Any], cell: Callable[[int, int], str]) -> list[list[str]]:
    at = range(len(gpus))
    return [["X" if a == b else cell(a, b) for b in at] for a in at]


@_of_nvml
def links(nvml: Any, gpus: list[Any]) -> list[list[str]]:
    """The path of every pair of GPUs as nvidia-smi names it, in NVML's order."""
    ends = [_nvlinks(nvml, gpu) for gpu in gpus]
    buses = [str(nvml.nvmlDeviceGetPciInfo(gpu).busId).lower() for gpu in gpus]

    def path(a: int, b: int) -> str:
        switched = min(ends[a].count(""), ends[b].count(""))
        if count := ends[a].count(buses[b]) + switched:
            return f"NV{count}"
        return PATHS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(gpus[a], gpus[b])), "SYS")

    return _matrix(gpus, path)


def _nvlinks(nvml: Any, gpu: Any) -> list[str]:
    """Where each active NVLink of a GPU leads: a PCI address, "" for a switch."""
    found: list[str] = []
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        try:
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == SWITCH
                peer = nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)
                found.append("" if switch else str(peer.busId).lower())
        except nvml.NVMLError:  # fewer links than that, or none at all
            continue
    return found


@_of_nvml
def p2p(nvml: Any, gpus: list[Any]) -> list[list[str]]:
    """What the driver says about reading a peer's memory, in nvidia-smi's words."""
    ask = nvml.nvmlDeviceGetP2PStatus
    return _matrix(gpus, lambda a, b: P2P.get(int(ask(gpus[a], gpus[b], READ)), "U"))


QUESTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {
        "triton": _triton,
        "symmetric_memory": lambda: _why_not(
            importlib.import_module, "torch.distributed._symmetric_memory"
        ),
        "nccl": _nccl,
        "nvshmem": _nvshmem,
        "torch": _torch,
        "gpus": lambda: [_gpu(index) for index in range(cuda.device_count())],
        "peers": _peers,
        "preflight": unreachable_here,
        "collect_env": _collect_env,
    },
    "nvml": {"driver": driver, "links": links, "p2p": p2p},
    "self-test": {"self-test": self_test},
}
"""By the attribute of ``Facts``; what may hang comes last, so that the rest is known."""


def main(results: str, what: str, *arguments: str) -> None:
    """Answer every question of ``what``, each as soon as it is known: a JSON line ``{"name": ...,
    "value": ...}`` or ``{"name": ..., "error": ...}`` in the file ``results``.
    """
    with open(results, "a") as out:
        for name, probe in QUESTIONS[what].items():
            try:
                line = {"name": name, "value": probe(*arguments)}
            except BaseException as error:
                line = {"name": name, "error": reason(error)}
            print(json.dumps(line), file=out, flush=True)
