"""The questions of ``tokenyard doctor``, answered in child processes: a probe may hang or crash.

Only the standard library is imported before a question is asked, since torch itself may hang.
``docs/how-to/doctor.md`` says what facts hold. Sizes are bytes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from itertools import dropwhile
from pathlib import Path
from typing import Any

Record = dict[str, Any]
SYMMETRIC_MEMORY = "torch.distributed._symmetric_memory"
ROOT = Path("/")
"""Where ``proc``, ``sys`` and ``dev`` are."""

# This host, or the container it is


def memory() -> Record:
    """What the host, or the cgroup of this process (version 2 or 1), has and can still give."""
    sizes, group = _sizes(ROOT / "proc/meminfo"), ROOT / "sys/fs/cgroup"
    total, free = sizes["MemTotal:"] * 1024, sizes["MemAvailable:"] * 1024
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most = int((group / limit).read_text())  # "max" is no limit
            cache = _sizes(group / stat).get("inactive_file", 0)
            left = most - int((group / used).read_text()) + cache
        except (OSError, ValueError):
            continue
        total, free = min(total, most), min(free, max(left, 0))
    return {"total": total, "free": free}


def _sizes(file: Path) -> dict[str, int]:
    """The second word of each line, by the first."""
    lines = map(str.split, file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}


def shm() -> Record:
    """``/dev/shm``, through which NCCL and processes of torch share memory; 0 where it is not."""
    folder = ROOT / "dev/shm"
    total, _, free = shutil.disk_usage(folder) if folder.is_dir() else (0, 0, 0)
    return {"total": total, "free": free}


def limits() -> Record:
    asked = {"memlock": resource.RLIMIT_MEMLOCK, "open_files": resource.RLIMIT_NOFILE}
    return {name: resource.getrlimit(limit)[0] for name, limit in asked.items()}


def pci() -> Record:
    """NVIDIA's display controllers on the bus, and kinds of their IOMMU domains ("DMA", ...)."""
    vendors = ROOT.glob("sys/bus/pci/devices/*/vendor")
    nvidia = [file.parent for file in vendors if file.read_text().strip() == "0x10de"]
    found = [device for device in nvidia if (device / "class").read_text().startswith("0x03")]
    kinds = [device / "iommu_group/type" for device in found]
    told = {file.read_text().strip() for file in kinds if file.is_file()}
    return {"gpus": len(found), "iommu": sorted(told)}


def hostname() -> Record:
    name = socket.gethostname()
    return {"name": name, "error": why_not(lambda: socket.getaddrinfo(name, None))}


def why_not(call: Callable[[], object]) -> str:
    """Why ``call`` raises; "" if it does not."""
    try:
        call()
    except Exception as error:
        return reason(error)
    return ""


# torch and what it loads


def triton() -> str | None:
    try:
        return import_module("triton").__version__
    except ModuleNotFoundError:
        return None


def build() -> Record:
    import torch
    import torch.distributed as dist

    made: Any = torch.version
    asks = {name: f"is_{name}_available" for name in ("gloo", "nccl", "mpi")}
    return {
        "version": torch.__version__,
        "cuda": made.cuda,
        "hip": made.hip,
        "backends": [name for name, ask in asks.items() if getattr(dist, ask, bool)()],
        "error": why_not(torch.cuda.init) if made.cuda or made.hip else "",
    }


def nccl() -> Record | None:
    dist = import_module("torch.distributed")
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    version = ".".join(map(str, import_module("torch.cuda.nccl").version()))
    return library("nvidia-nccl", "libnccl.so") | {"version": version}


def library(package: str, file: str) -> Record:
    """Version of the installed package whose name begins so; the version that torch's own package
    asks for (``nvidia-nccl-cu13==2.28.9; ...``); files of that name that this process has loaded.
    """
    pattern = re.compile(rf"({package}[\w-]*)\s*\(?==\s*([\d.]+)")
    found = next(filter(None, map(pattern.match, metadata.requires("torch") or [])), None)
    name, wanted = found.groups() if found else (package, None)
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    maps = (ROOT / "proc/self/maps").read_text()
    paths = re.findall(rf"(/.*/{re.escape(file)}[^/]*?)(?: \(deleted\))?$", maps, re.MULTILINE)
    return {"version": version, "wanted": wanted, "paths": list(dict.fromkeys(paths))}


def gpus() -> list[Record]:
    """Those that torch sees; matrices are in the same order."""
    cuda = import_module("torch.cuda")

    found: list[Record] = []
    for index in range(cuda.device_count()):
        known = cuda.get_device_properties(index)
        told: Record = {"index": index, "name": known.name, "uuid": str(known.uuid)}
        told |= {"capability": f"{known.major}.{known.minor}", "memory_total": known.total_memory}
        told |= {"memory_free": None, "mig": None}
        with suppress(RuntimeError):  # in use by a process that keeps others out
            told["memory_free"] = cuda.mem_get_info(index)[0]
        found.append(told)
    return found


def peers() -> list[list[bool]]:
    """Whether one GPU can address the other's memory."""
    cuda = import_module("torch.cuda")
    count = range(cuda.device_count())
    return [[a == b or cuda.can_device_access_peer(a, b) for b in count] for a in count]


def collect_env() -> dict[str, str]:
    told = import_module("torch.utils.collect_env").get_env_info()._asdict()
    return {name: str(value) for name, value in told.items() if value not in (None, "", "N/A")}


# The driver, by NVML, which nvidia-smi asks too. Words are torch's GPUs: their UUIDs, in its order.

NO_NVML = "nvidia-ml-py is not installed: pip install 'tokenyard[cli]'"

P2P = {
    "OK": "",
    "CNS": "the chipset does not support it",
    "GNS": "these GPUs do not support it",
    "TNS": "the topology does not support it",
    "DR": "the driver's registry keys disable it",
    "NS": "it is not supported",
    "U": "unknown",
}
"""nvidia-smi's word for each status of a pair, in the order of NVML's numbers, and its meaning."""

PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvidia-smi's word for the level of a pair's nearest common ancestor."""

READ, SWITCH = 0, 2
"""NVML's numbers for the capability to read a peer's memory, and for an NVLink to a switch."""


def driver(*uuids: str) -> Record | None:
    """NVIDIA's, and all GPUs that it sees."""
    nvml, found = _nvml(uuids)
    if nvml is None:
        return None

    gpus: list[Record] = []
    for uuid, gpu in found.items():
        told: Record = {"uuid": uuid, "name": nvml.nvmlDeviceGetName(gpu)}
        told |= {"memory_free": None, "mig": None}
        with suppress(nvml.NVMLError):  # it does not tell
            told["memory_free"] = nvml.nvmlDeviceGetMemoryInfo(gpu).free
        with suppress(nvml.NVMLError):  # it cannot be partitioned
            told["mig"] = bool(nvml.nvmlDeviceGetMigMode(gpu)[0])
        gpus.append(told)
    newest = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    cuda = f"{newest // 1000}.{newest % 1000 // 10}"
    return {"version": nvml.nvmlSystemGetDriverVersion(), "cuda": cuda, "gpus": gpus}


def _nvml(uuids: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """NVML and its GPUs by bare UUID; None and none where there is no driver.
    ModuleNotFoundError: there are GPUs, but no nvidia-ml-py. NVMLError: the driver refuses."""
    try:
        nvml: Any = import_module("pynvml")
    except ModuleNotFoundError:
        if not uuids:
            return None, {}
        raise ModuleNotFoundError(NO_NVML) from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return None, {}
    found = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
    return nvml, {bare(nvml.nvmlDeviceGetUUID(gpu)): gpu for gpu in found}


def bare(uuid: str) -> str:
    """A UUID without what only NVML writes."""
    return uuid.removeprefix("GPU-").lower()


def matrix(cell: Callable[[Any, Any, Any], str], uuids: tuple[str, ...]) -> Any:
    """``cell(nvml, a, b)`` of each pair; None where NVML does not know a GPU (a MIG instance)."""
    nvml, found = _nvml(uuids)
    order = [found.get(bare(uuid)) for uuid in uuids]
    if nvml is None or None in order or len(order) < 2:
        return None
    return [["X" if a is b else cell(nvml, a, b) for b in order] for a in order]


def path(nvml: Any, a: Any, b: Any) -> str:
    """The path of a pair as nvidia-smi names it."""
    ends, others = _nvlinks(nvml, a), _nvlinks(nvml, b)
    direct = ends.count(nvml.nvmlDeviceGetPciInfo(b).busId.lower())
    if count := direct + min(ends.count(SWITCH), others.count(SWITCH)):
        return f"NV{count}"
    return PATHS.get(int(nvml.nvmlDeviceGetTopologyCommonAncestor(a, b)), "SYS")


def _nvlinks(nvml: Any, gpu: Any) -> list[Any]:
    """Where each active NVLink of a GPU leads: a PCI address or ``SWITCH``."""
    found: list[Any] = []
    for link in range(int(nvml.NVML_NVLINK_MAX_LINKS)):
        with suppress(nvml.NVMLError):  # fewer links than that, or none at all
            if nvml.nvmlDeviceGetNvLinkState(gpu, link):
                switch = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == SWITCH
                peer = nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)
                found.append(SWITCH if switch else peer.busId.lower())
    return found


def peer_access(nvml: Any, a: Any, b: Any) -> str:
    """What the driver says about reading a peer's memory, in nvidia-smi's words."""
    return list(P2P)[min(int(nvml.nvmlDeviceGetP2PStatus(a, b, READ)), len(P2P) - 1)]


# The process

QUESTIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "host": {
        "cpus": lambda: len(os.sched_getaffinity(0)),
        "memory": memory,
        "shm": shm,
        "limits": limits,
        "infiniband": lambda: sorted(each.name for each in ROOT.glob("sys/class/infiniband/*")),
        "pci": pci,
        "hostname": hostname,
    },
    "torch": {
        "triton": triton,
        "symmetric_memory": lambda: why_not(lambda: import_module(SYMMETRIC_MEMORY)),
        "nccl": nccl,
        "nvshmem": lambda: library("nvidia-nvshmem", "libnvshmem_host.so"),
        "torch": build,
        "gpus": gpus,
        "peers": peers,
        "preflight": lambda: import_module("tokenyard.memory.preflight").unreachable_here(),
        "collect_env": collect_env,
    },
    "nvml": {
        "driver": driver,
        "links": lambda *uuids: matrix(path, uuids),
        "p2p": lambda *uuids: matrix(peer_access, uuids),
    },
    "self-test": {
        "self-test": lambda *words: import_module("tokenyard.cli.doctor").self_test(*words)
    },
}
"""By the process that answers and the name of the fact. What may hang comes last."""


def main(group: str, *words: str) -> None:
    """Answer ``group`` on stdout: at once, a JSON line with ``name`` and ``value`` or ``error``."""
    for name, ask in QUESTIONS[group].items():
        try:
            line = json.dumps({"name": name, "value": ask(*words)})
        except BaseException as error:
            line = json.dumps({"name": name, "error": reason(error)})
        print(f"\n{line}", flush=True)  # at the start of a line, whatever a library printed


def reason(error: BaseException) -> str:
    """An exception as a line of at most 500 characters; of a rank's traceback only the end."""
    head, *traces = str(error).split("\nTraceback (")
    if not traces:
        head = ": ".join(filter(None, (type(error).__name__, head)))
    frames = traces[-1].splitlines()[1:] if traces else []
    end = dropwhile(lambda line: not line or line[0].isspace(), frames)
    return " ".join(" ".join([head, *end]).split())[:500]
