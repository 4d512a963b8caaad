"""The process that asks torch and the GPU driver, or runs the self-test, for ``tokenyard doctor``:
it may hang or crash.

``python -m tokenyard.cli.doctor_child RESULTS torch`` or ``... RESULTS self-test DEVICE RANKS
ENGINE SECONDS`` writes one JSON line per answer to the file ``RESULTS``: ``{"name": ..., "value":
...}`` or ``{"name": ..., "error": ...}``.
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

from tokenyard.cli.doctor_guard import reason
from tokenyard.cli.doctor_selftest import self_test
from tokenyard.memory.preflight import explain, local_reports


def _torch() -> dict[str, Any]:
    build: Any = torch.version
    backends = {"gloo": "is_gloo_available", "nccl": "is_nccl_available", "mpi": "is_mpi_available"}
    return {
        "version": torch.__version__,
        "cuda": build.cuda,
        "hip": build.hip,
        "backends": [
            name for name, asks in backends.items() if dist.is_available() and getattr(dist, asks)()
        ],
        "error": _start_error() if build.cuda or build.hip else "",
    }


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


def _nccl() -> dict[str, Any] | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    cuda: Any = torch.cuda
    version = ".".join(str(part) for part in cuda.nccl.version())
    return {"version": version, "wanted": _wanted("nvidia-nccl")[1], "paths": _loaded("libnccl.so")}


def _nvshmem() -> dict[str, Any]:
    """The version is that of the installed package, and so may differ from a library loaded from
    elsewhere.
    """
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


TORCH: dict[str, Callable[[], Any]] = {
    "triton": _triton,
    "symmetric_memory": _symmetric_memory,
    "nccl": _nccl,
    "nvshmem": _nvshmem,
    "torch": _torch,
    "gpus": _gpus,
    "peers": _peers,
    "preflight": _preflight,
}
"""By the attribute of ``Facts``; what may hang comes last, so that the rest is known."""


def main(results: str, what: str, *arguments: str) -> None:
    """Answer every question of ``what``, each as soon as it is known."""
    probes = TORCH if what == "torch" else {"self-test": lambda: self_test(*arguments)}
    with open(results, "a") as out:
        for name, probe in probes.items():
            try:
                line = {"name": name, "value": probe()}
            except BaseException as error:
                line = {"name": name, "error": reason(error)}
            print(json.dumps(line), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
