"""The process that asks torch or the GPU driver, or runs the self-test: it may hang or crash.

``python -m tokenyard.cli.doctor_child RESULTS torch``, ``... RESULTS nvml`` or ``... RESULTS
self-test DEVICE RANKS ENGINE SECONDS`` writes one JSON line per answer to the file ``RESULTS``:
``{"name": ..., "value": ...}`` or ``{"name": ..., "error": ...}``.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import collect_env

from tokenyard.cli.doctor_guard import NO_NVML, reason
from tokenyard.cli.doctor_selftest import self_test
from tokenyard.memory.preflight import explain, local_reports

# torch


def _torch() -> dict[str, Any]:
    build: Any = torch.version
    backends = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    has = [name for name, ask in backends.items() if dist.is_available() and getattr(dist, ask)()]
    error = _start_error() if build.cuda or build.hip else ""
    known = {"version": torch.__version__, "cuda": build.cuda, "hip": build.hip}
    return {**known, "backends": has, "error": error}


def _start_error() -> str:
    """Why torch cannot start its GPUs, in torch's words; "" if it can."""
    try:
        torch.cuda.init()
    except Exception as error:
        return reason(error)
    return ""


def _triton() -> str | None:
    try:
        triton: Any = importlib.import_module("triton")
    except ModuleNotFoundError:
        return None
    return triton.__version__


def _symmetric_memory() -> str:
    try:
        importlib.import_module("torch.distributed._symmetric_memory")
    except Exception as error:
        return reason(error)
    return ""


def _collect_env() -> dict[str, str]:
    env: Any = collect_env
    told: dict[str, Any] = env.get_env_info()._asdict()
    return {name: str(value) for name, value in told.items() if value not in (None, "", "N/A")}


def _nccl() -> dict[str, Any] | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    cuda: Any = torch.cuda
    version = ".".join(str(part) for part in cuda.nccl.version())
    return {"version": version, "wanted": _wanted("nvidia-nccl")[1], "paths": _loaded("libnccl.so")}


def _nvshmem() -> dict[str, Any]:
    """The version is that of the package; a library loaded from elsewhere may have another."""
    package, wanted = _wanted("nvidia-nvshmem")
    try:
        version = metadata.version(package) if package else None
    except metadata.PackageNotFoundError:
        version = None
    return {"version": version, "wanted": wanted, "paths": _loaded("libnvshmem_host.so")}


def _wanted(prefix: str) -> tuple[str | None, str | None]:
    """Name and version of the package with this prefix that torch's own package asks for."""
    return wanted_package(metadata.requires("torch") or [], prefix)


def wanted_package(requirements: list[str], prefix: str) -> tuple[str | None, str | None]:
    """Of ``nvidia-nccl-cu13==2.28.9; platform_system == ...`` the name and the version; None twice
    if there is none.
    """
    for requirement in requirements:
        match = re.match(rf"({re.escape(prefix)}[\w-]*)\s*\(?==\s*([\d.]+)", requirement)
        if match:
            return match[1], match[2]
    return None, None


def _loaded(start: str) -> list[str]:
    return mapped_files(Path("/proc/self/maps").read_text(), start)


def mapped_files(maps: str, start: str) -> list[str]:
    """The files in ``/proc/PID/maps`` whose name begins with ``start``, each once."""
    columns = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = (parts[5].removesuffix(" (deleted)") for parts in columns if len(parts) == 6)
    return list(dict.fromkeys(path for path in paths if path.rpartition("/")[2].startswith(start)))


def _gpus() -> list[dict[str, Any]]:
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> dict[str, Any]:
    cuda: Any = torch.cuda
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
    }


def _peers() -> list[list[bool]]:
    gpus = range(torch.cuda.device_count())
    return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in gpus] for a in gpus]


def _preflight() -> list[str]:
    """Why one rank per GPU could not share memory, as engine ``nvlink`` itself would see it."""
    return explain(local_reports())


# The driver

P2P = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS"}
"""nvidia-smi's word for each status of a pair; others are U, unknown."""

PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvidia-smi's word for the level of a pair's nearest common ancestor."""

READ, SWITCH = 0, 2
"""NVML's numbers for the capability to read a peer's memory, and for an NVLink to a switch."""


def nvml() -> Any:
    """NVML, started; None where there is no driver.

    Raises:
        RuntimeError: nvidia-ml-py is not installed.
        NVMLError: the driver refuses.
    """
    try:
        library: Any = importlib.import_module("pynvml")
    except ModuleNotFoundError:
        raise RuntimeError(NO_NVML) from None
    try:
        library.nvmlInit()
    except library.NVMLError_LibraryNotFound:
        return None
    return library


def _handles(library: Any) -> list[Any]:
    return [library.nvmlDeviceGetHandleByIndex(at) for at in range(library.nvmlDeviceGetCount())]


def driver() -> dict[str, Any] | None:
    """The fields of ``Driver``; None where there is none."""
    library = nvml()
    if library is None:
        return None
    cuda = int(library.nvmlSystemGetCudaDriverVersion_v2())
    return {
        "version": library.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [_seen(library, at, handle) for at, handle in enumerate(_handles(library))],
    }


def _seen(library: Any, index: int, handle: Any) -> dict[str, Any]:
    """The fields of ``Gpu``; None for what this GPU does not tell."""

    def ask(name: str) -> Any:
        try:
            return getattr(library, f"nvmlDeviceGet{name}")(handle)
        except library.NVMLError:
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


def links() -> list[list[str]] | None:
    """The path of every pair of GPUs as nvidia-smi names it, in NVML's order."""
    library = nvml()
    if library is None:
        return None
    handles = _handles(library)
    ends = [_nvlinks(library, handle) for handle in handles]
    buses = [str(library.nvmlDeviceGetPciInfo(handle).busId).lower() for handle in handles]

    def path(a: int, b: int) -> str:
        if a == b:
            return "X"
        switched = min(ends[a].count(""), ends[b].count(""))
        if count := ends[a].count(buses[b]) + switched:
            return f"NV{count}"
        level = int(library.nvmlDeviceGetTopologyCommonAncestor(handles[a], handles[b]))
        return PATHS.get(level, "SYS")

    return [[path(a, b) for b in range(len(handles))] for a in range(len(handles))]


def _nvlinks(library: Any, handle: Any) -> list[str]:
    """Where each active NVLink of a GPU leads: a PCI address, "" for a switch."""
    found: list[str] = []
    for link in range(int(library.NVML_NVLINK_MAX_LINKS)):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link):
                switch = library.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == SWITCH
                peer = library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)
                found.append("" if switch else str(peer.busId).lower())
        except library.NVMLError:  # fewer links than that, or none at all
            continue
    return found


def p2p() -> list[list[str]] | None:
    """What the driver says about reading a peer's memory, in nvidia-smi's words."""
    library = nvml()
    if library is None:
        return None
    handles = _handles(library)

    def status(a: int, b: int) -> str:
        if a == b:
            return "X"
        return P2P.get(int(library.nvmlDeviceGetP2PStatus(handles[a], handles[b], READ)), "U")

    return [[status(a, b) for b in range(len(handles))] for a in range(len(handles))]


QUESTIONS: dict[str, dict[str, Callable[[], Any]]] = {
    "torch": {
        "triton": _triton,
        "symmetric_memory": _symmetric_memory,
        "nccl": _nccl,
        "nvshmem": _nvshmem,
        "torch": _torch,
        "gpus": _gpus,
        "peers": _peers,
        "preflight": _preflight,
        "collect_env": _collect_env,
    },
    "nvml": {"driver": driver, "links": links, "p2p": p2p},
}
"""By the attribute of ``Facts``; what may hang comes last, so that the rest is known."""


def main(results: str, what: str, *arguments: str) -> None:
    """Answer every question of ``what``, each as soon as it is known."""
    probes = QUESTIONS.get(what) or {"self-test": lambda: self_test(*arguments)}
    with open(results, "a") as out:
        for name, probe in probes.items():
            try:
                line = {"name": name, "value": probe()}
            except BaseException as error:
                line = {"name": name, "error": reason(error)}
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
