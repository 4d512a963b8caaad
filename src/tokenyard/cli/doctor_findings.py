"""What is wrong with a machine, by its symptom, with the likely cause and a remedy. Pure functions
of :class:`Facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenyard.cli.consoles import bytes_text
from tokenyard.cli.doctor_engine import Need
from tokenyard.cli.doctor_facts import (
    UNLIMITED,
    Facts,
    Record,
    SelfTest,
    gpu_pairs,
    numbers,
    nvlinks,
    old_gpus,
    pairs_text,
    unreachable,
)
from tokenyard.cli.doctor_guard import NO_ANSWER, NOT_ASKED
from tokenyard.engines.known import NVLINK
from tokenyard.engines.select import TRITON, triton_fits

MIB = 1 << 20
SMALL_SHM = 128 * MIB
"""A container's /dev/shm has 64 MB unless somebody asks for more."""

FEW_FILES = 1024

P2P_REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "these GPUs do not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "the driver's registry keys disable it",
}
"""What nvidia-smi's words for a pair mean."""

ACS = (
    "on bare metal turn ACS off on the PCIe switches and boot with iommu=pt; in a virtual machine "
    "the host has to pass the GPUs through together"
)
PROBLEM, WARNING = "problem", "warning"


class Finding(NamedTuple):
    """A problem (this machine is not healthy) or a warning (it works, but less well than
    it could).
    """

    id: str
    severity: str
    symptom: str
    cause: str
    remedy: str


Rule = Callable[[Facts], Iterator[Finding]]


def _remedy(why: str, remedy: str) -> str:
    """What helps against ``why`` a process of our own has no answer; ``remedy`` if that is its own
    fault.
    """
    if why.startswith(NOT_ASKED):
        return "make room for processes (ulimit -u) and for files in a temporary directory (TMPDIR)"
    slow = "; on a slow machine wait longer: --timeout"
    return remedy + (slow if why.startswith(NO_ANSWER) else "")


def torch_itself(facts: Facts) -> Iterator[Finding]:
    """torch does not answer, or cannot start ranks, or has no CUDA beside a driver."""
    torch, driver = facts.torch, facts.driver
    if torch is None:
        why = facts.untold.get("torch", "nobody asked")
        remedy = (
            "run python -c 'import torch; torch.cuda.init()'; if that hangs or crashes, mend "
            "torch or the driver first"
        )
        symptom = "torch does not answer"
        yield Finding("torch-silent", PROBLEM, symptom, why, _remedy(why, remedy))
        return
    if "gloo" not in torch["backends"]:
        symptom = "torch cannot connect ranks over gloo"
        cause = f"torch {torch['version']} was built without torch.distributed or without gloo"
        yield Finding("no-gloo", PROBLEM, symptom, cause, "install a build of torch that has it")
    if driver and not torch["cuda"] and not torch["hip"]:
        serves = f"; this driver serves CUDA up to {driver['cuda']}" if driver["cuda"] else ""
        symptom = f"there is an NVIDIA driver ({driver['version']}), but torch sees no GPU"
        cause = f"torch {torch['version']} is a CPU-only build"
        remedy = f"install a CUDA build of torch{serves}"
        yield Finding("cpu-only-torch", PROBLEM, symptom, cause, remedy)


def gpus_do_not_start(facts: Facts) -> Iterator[Finding]:
    """A driver and a CUDA build of torch, but no GPU."""
    torch, driver = facts.torch, facts.driver
    if facts.gpus or torch is None or driver is None or not torch["cuda"]:
        return
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    known = f"although there is an NVIDIA driver ({driver['version']})"
    symptom = f"torch {torch['version']} sees no GPU, {known}"
    older = driver["cuda"] and numbers(driver["cuda"])[:1] < numbers(torch["cuda"])[:1]
    if "too old" in torch["error"] or older:
        serves = f"serves CUDA up to {driver['cuda']}" if driver["cuda"] else "is older"
        cause = f"torch needs CUDA {torch['cuda']}, but the driver {serves}"
        build = f"install a build of torch for CUDA {driver['cuda'] or 'of its age'} or older"
        yield Finding("old-driver", PROBLEM, symptom, cause, f"update the driver, or {build}")
    elif hidden is not None:
        remedy = "unset it, or name the GPUs that ranks may use"
        cause = f"CUDA_VISIBLE_DEVICES is {hidden!r}"
        yield Finding("gpus-hidden", WARNING, symptom, cause, remedy)
    else:
        cause = torch["error"] or facts.untold.get("gpus") or "nothing says why"
        remedy = (
            "see whether nvidia-smi works, whether /dev/nvidia* can be opened here, and what "
            "dmesg says (Xid)"
        )
        yield Finding("gpus-silent", PROBLEM, symptom, cause, remedy)


def no_driver(facts: Facts) -> Iterator[Finding]:
    """GPUs in the machine, but no driver here, or one that does not answer."""
    if "driver" in facts.untold:
        remedy = (
            "run nvidia-smi by hand and see dmesg (Xid, NVRM); a GPU that fell off the bus needs "
            "a reset of the machine"
        )
        symptom = "the driver does not answer NVML, through which nvidia-smi asks too"
        yield Finding("nvidia-smi-silent", WARNING, symptom, facts.untold["driver"], remedy)
    elif facts.pci and facts.pci["gpus"] and facts.driver is None and not facts.gpus:
        symptom = f"{facts.pci['gpus']} NVIDIA GPU(s) on the PCI bus, but no driver"
        cause = "the driver is not installed, or this container was started without the GPUs"
        remedy = "install the driver, or start the container with its GPUs (docker run --gpus all)"
        yield Finding("no-driver", WARNING, symptom, cause, remedy)


def nccl_versions(facts: Facts) -> Iterator[Finding]:
    """Another NCCL than torch was made for, two of them, or none."""
    nccl, torch = facts.nccl, facts.torch
    if len(facts.gpus or []) > 1 and torch and "nccl" not in torch["backends"]:
        symptom = "GPUs exchange rows over gloo, through host memory: torch has no NCCL"
        cause = f"torch {torch['version']} was built without it"
        yield Finding("no-nccl", WARNING, symptom, cause, "install a build of torch with NCCL")
    if nccl is None:
        return
    cause = "LD_LIBRARY_PATH, LD_PRELOAD or a package brought another one"
    if len(nccl["paths"]) > 1:
        symptom = f"{len(nccl['paths'])} NCCLs are loaded: {', '.join(nccl['paths'])}"
        remedy = "leave one: unset LD_PRELOAD, or remove the other package"
        yield Finding("two-nccls", WARNING, symptom, cause, remedy)
    if nccl["version"] and nccl["wanted"] and numbers(nccl["version"]) != numbers(nccl["wanted"]):
        where = f" from {nccl['paths'][0]}" if nccl["paths"] else ""
        symptom = (
            f"NCCL {nccl['version']} is loaded{where}, but torch was made for {nccl['wanted']}"
        )
        package = f"pip install the NCCL {nccl['wanted']} that torch asks for"
        remedy = f"unset LD_LIBRARY_PATH and LD_PRELOAD, or {package}"
        yield Finding("nccl-mismatch", WARNING, symptom, cause, remedy)


def triton_version(facts: Facts) -> Iterator[Finding]:
    """Only what keeps GPUs that could run engine ``nvlink`` from it."""
    if NVLINK not in facts.engines or not facts.gpus or facts.peers is None:
        return
    if unreachable(facts) or old_gpus(facts):
        return
    install = "pip install 'tokenyard[cuda]'"
    if facts.triton is None:
        symptom = "engine nvlink is out of reach without Triton"
        cause = facts.untold.get("triton", "it is not installed")
        yield Finding("no-triton", WARNING, symptom, cause, install)
    elif not triton_fits(facts.triton):
        symptom = f"Triton {facts.triton}: engine nvlink needs {TRITON}"
        cause = "torch brought it, or something pinned it"
        yield Finding("triton-version", WARNING, symptom, cause, install)
    if facts.symmetric_memory and gpu_pairs(facts):
        symptom = "engine nvlink is out of reach without torch's symmetric memory"
        remedy = "install torch 2.9 or later"
        yield Finding("no-symmetric-memory", WARNING, symptom, facts.symmetric_memory, remedy)


def links(facts: Facts) -> Iterator[Finding]:
    """Pairs of GPUs that cannot reach each other's memory (all are named), or may do so badly."""
    bad, pairs = unreachable(facts), gpu_pairs(facts)
    domains: list[str] = facts.pci["iommu"] if facts.pci else []
    kinds = ", ".join(kind for kind in domains if kind != "identity")
    if bad:
        of = f"{len(bad)} of {len(pairs)} pairs"
        symptom = f"no peer access between GPUs {pairs_text(bad)} ({of})"
        words = sorted({facts.p2p[a][b] for a, b in bad} - {"OK", "X"}) if facts.p2p else []
        told = [f"the driver says {word}: {P2P_REASONS.get(word, 'unknown')}" for word in words]
        told += [f"an IOMMU translates between them ({kinds})"] if kinds else []
        unknown = "the GPUs' link, or PCIe ACS, an IOMMU or a virtual machine in between"
        cause = "; ".join(told) or unknown
        remedy = f"engine collective works without; for P2P over PCIe {ACS}"
        if any(gpu["mig"] for gpu in facts.gpus or []):
            cause, remedy = "MIG is on", "turn MIG off: nvidia-smi -mig 0"
        yield Finding("no-peer-access", WARNING, symptom, cause, remedy)
    over_pcie = [pair for pair in pairs if pair not in bad and nvlinks(facts, *pair) == 0]
    if kinds and over_pcie and facts.peers is not None:
        who = f"GPUs {pairs_text(over_pcie)}"
        symptom = f"{who} reach each other over PCIe behind an IOMMU ({kinds})"
        cause = (
            "ACS may send their traffic through the root complex: slow, and on some machines "
            "hanging or wrong"
        )
        remedy = f"{ACS}; if NCCL hangs, set NCCL_P2P_DISABLE=1"
        yield Finding("iommu", WARNING, symptom, cause, remedy)


def uneven_links(facts: Facts) -> Iterator[Finding]:
    """Pairs with fewer NVLinks than others, and MIG, which keeps instances apart."""
    known = {pair: nvlinks(facts, *pair) for pair in gpu_pairs(facts)}
    counts = {pair: links for pair, links in known.items() if links is not None}
    most = max(counts.values(), default=0)
    fewer = [pair for pair, links in counts.items() if links < most]
    if fewer:
        symptom = f"GPUs {pairs_text(fewer)} have fewer NVLinks than the {most} of others"
        cause = "this board's wiring, or links that are down"
        remedy = "see nvidia-smi topo -m and nvidia-smi nvlink -s"
        yield Finding("uneven-links", WARNING, symptom, cause, remedy)
    seen: list[Record] = [*(facts.gpus or []), *(facts.driver["gpus"] if facts.driver else [])]
    if any(gpu["mig"] or " MIG " in str(gpu["name"]) for gpu in seen):
        cause = "MIG instances cannot reach each other's memory, and NCCL takes one per GPU"
        remedy = "turn it off for ranks that work together: nvidia-smi -mig 0"
        yield Finding("mig", WARNING, "MIG is on", cause, remedy)


def host_limits(facts: Facts) -> Iterator[Finding]:
    """/dev/shm, locked memory, open files."""
    shm, limits = facts.shm, facts.limits
    if shm and (shm["total"] < SMALL_SHM or shm["free"] < SMALL_SHM // 2):
        symptom = f"/dev/shm has {bytes_text(shm['total'])}, {bytes_text(shm['free'])} of it free"
        cause = (
            "a container gets 64 MB unless told otherwise; NCCL and torch's processes share "
            "memory there"
        )
        remedy = "start it with --ipc=host or --shm-size=8g, or remount /dev/shm larger"
        yield Finding("small-shm", WARNING, symptom, cause, remedy)
    if limits and facts.infiniband and limits["memlock"] != UNLIMITED:
        devices = ", ".join(facts.infiniband)
        most = bytes_text(limits["memlock"])
        symptom = f"only {most} can be locked, but there is InfiniBand ({devices})"
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield Finding("memlock", WARNING, symptom, "RDMA locks what it sends from", remedy)
    if limits and limits["open_files"] != UNLIMITED and limits["open_files"] < FEW_FILES:
        symptom = f"only {limits['open_files']} files can be open"
        cause = "every pair of ranks takes sockets"
        yield Finding("open-files", WARNING, symptom, cause, "ulimit -n 65536")


def host_settings(facts: Facts) -> Iterator[Finding]:
    """The host's own name, which gloo looks up; variables that somebody set once."""
    known = facts.hostname
    why = known["error"] if known else facts.untold.get("hostname", "")
    if why:
        name = f", {known['name']}," if known else ""
        symptom = f"this host's name{name} has no address ({why})"
        cause = "gloo looks it up when a group is made, and hangs or fails"
        remedy = (
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that ranks use (lo "
            "on one host)"
        )
        yield Finding("hostname", WARNING, symptom, cause, remedy)
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if facts.environment.get(name, "0") not in ("", "0") and len(facts.gpus or []) > 1:
            cause = "NCCL then takes a slower way between GPUs"
            remedy = "unset it unless NCCL hangs without"
            yield Finding("nccl-variable", WARNING, f"{name} is set", cause, remedy)


RULES: tuple[Rule, ...] = (
    torch_itself,
    gpus_do_not_start,
    no_driver,
    nccl_versions,
    triton_version,
    links,
    uneven_links,
    host_limits,
    host_settings,
)


def of_memory(need: Need, asked: bool) -> Iterator[Finding]:
    """A workload that does not fit is a problem if somebody ``asked`` about it, a warning if it is
    the default one.
    """
    if need.free is None or need.even.total <= need.free:
        return
    free = f"{bytes_text(need.free)} of {need.where} memory are free"
    symptom = f"a rank needs {bytes_text(need.even.total)}, but {free}"
    cause = "the workload is too large for this machine, or other processes hold its memory"
    fewer = "fewer --tokens or --ranks" if need.where == "host" else "fewer --tokens"
    severity, remedy = PROBLEM if asked else WARNING, f"take {fewer}, or end what else runs here"
    yield Finding("memory", severity, symptom, cause, remedy)


def of_self_test(test: SelfTest, facts: Facts) -> Iterator[Finding]:
    """Dispatch and combine failed, hung, or gave other bits than the oracle."""
    if not test.error:
        return
    kind = "GPU" if test.device == "cuda" else "CPU"
    symptom = f"the self-test on {test.ranks} {kind} rank(s), engine {test.engine} failed"
    remedy = (
        "see that 127.0.0.1 and interface lo work, that nothing filters them, and that "
        "GLOO_SOCKET_IFNAME is not set"
    )
    if test.device == "cuda":
        remedy = (
            "run again with NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1; if it hangs, with "
            "NCCL_P2P_DISABLE=1"
        )
        if any(nvlinks(facts, a, b) == 0 for a, b in gpu_pairs(facts)):
            remedy += f"; for P2P over PCIe {ACS}"
    name, remedy = f"self-test-{test.device}", _remedy(test.error, remedy)
    yield Finding(name, PROBLEM, symptom, test.error, remedy)
