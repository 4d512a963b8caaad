"""What is wrong with a machine, by its symptom, with the likely cause and a remedy. Pure functions
of :class:`Facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tokenyard.cli.doctor_engine import Need
from tokenyard.cli.doctor_facts import (
    UNLIMITED,
    Facts,
    SelfTest,
    gpu_pairs,
    numbers,
    nvlinks,
    old_gpus,
    pairs_text,
    unreachable,
)
from tokenyard.cli.doctor_guard import NO_ANSWER, NOT_ASKED
from tokenyard.cli.report import bytes_text
from tokenyard.engines.select import TRITON, triton_fits

MIB = 1 << 20
SMALL_SHM = 128 * MIB
"""A container's /dev/shm has 64 MB unless somebody asks for more."""

FEW_FILES = 1024

SLOW = "; on a slow machine wait longer: --timeout"
"""The remedy besides, where time was up."""

ROOM = "make room for processes (ulimit -u) and for files in a temporary directory (TMPDIR)"
"""The remedy instead, where nothing could be asked."""

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
    "the host has to pass the "
    "GPUs through together"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem (this machine is not healthy) or a warning (it works, but less well than
    it could).
    """

    id: str
    severity: Literal["problem", "warning"]
    symptom: str
    cause: str
    remedy: str


Rule = Callable[[Facts], Iterator[Finding]]


def _problem(name: str, symptom: str, cause: str, remedy: str) -> Finding:
    return Finding(id=name, severity="problem", symptom=symptom, cause=cause, remedy=remedy)


def _warning(name: str, symptom: str, cause: str, remedy: str) -> Finding:
    return Finding(id=name, severity="warning", symptom=symptom, cause=cause, remedy=remedy)


def _remedy(why: str, remedy: str) -> str:
    """What helps against ``why`` a process of our own has no answer; ``remedy`` if that is its own
    fault.
    """
    if why.startswith(NOT_ASKED):
        return ROOM
    return remedy + SLOW if why.startswith(NO_ANSWER) else remedy


# torch and the driver


def no_torch(facts: Facts) -> Iterator[Finding]:
    """torch does not answer, or cannot start ranks."""
    if facts.torch is None:
        why = facts.untold.get("torch", "nobody asked")
        remedy = (
            "run python -c 'import torch; torch.cuda.init()'; if that hangs or crashes, mend "
            "torch or the driver first"
        )
        yield _problem("torch-silent", "torch does not answer", why, _remedy(why, remedy))
    elif "gloo" not in facts.torch.backends:
        cause = f"torch {facts.torch.version} was built without torch.distributed or without gloo"
        yield _problem(
            "no-gloo",
            "torch cannot connect ranks over gloo",
            cause,
            "install a build of torch that has it",
        )


def cpu_only_torch(facts: Facts) -> Iterator[Finding]:
    """An NVIDIA driver, but a torch that cannot use it."""
    if facts.driver and facts.torch and not facts.torch.cuda and not facts.torch.hip:
        serves = f"; this driver serves CUDA up to {facts.driver.cuda}" if facts.driver.cuda else ""
        yield _problem(
            "cpu-only-torch",
            f"there is an NVIDIA driver ({facts.driver.version}), but torch sees no GPU",
            f"torch {facts.torch.version} is a CPU-only build",
            f"install a CUDA build of torch{serves}",
        )


def gpus_do_not_start(facts: Facts) -> Iterator[Finding]:
    """A driver and a CUDA build of torch, but no GPU."""
    torch, driver = facts.torch, facts.driver
    if facts.gpus or torch is None or driver is None or not torch.cuda:
        return
    hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
    symptom = (
        f"torch {torch.version} sees no GPU, although there is an NVIDIA driver ({driver.version})"
    )
    if "too old" in torch.error or (
        driver.cuda and numbers(driver.cuda)[:1] < numbers(torch.cuda)[:1]
    ):
        serves = f"serves CUDA up to {driver.cuda}" if driver.cuda else "is older"
        remedy = (
            f"update the driver, or install a build of torch for CUDA "
            f"{driver.cuda or 'of its age'} or older"
        )
        yield _problem(
            "old-driver", symptom, f"torch needs CUDA {torch.cuda}, but the driver {serves}", remedy
        )
    elif hidden is not None:
        cause = f"CUDA_VISIBLE_DEVICES is {hidden!r}"
        yield _warning(
            "gpus-hidden", symptom, cause, "unset it, or name the GPUs that ranks may use"
        )
    else:
        cause = torch.error or facts.untold.get("gpus") or "nothing says why"
        remedy = (
            "see whether nvidia-smi works, whether /dev/nvidia* can be opened here, and what "
            "dmesg says (Xid)"
        )
        yield _problem("gpus-silent", symptom, cause, remedy)


def no_driver(facts: Facts) -> Iterator[Finding]:
    """GPUs in the machine, but no driver here."""
    if (
        facts.pci
        and facts.pci.gpus
        and facts.driver is None
        and "driver" not in facts.untold
        and not facts.gpus
    ):
        yield _warning(
            "no-driver",
            f"{facts.pci.gpus} NVIDIA GPU(s) on the PCI bus, but no driver",
            "the driver is not installed, or this container was started without the GPUs",
            "install the driver, or start the container with its GPUs (docker run --gpus all)",
        )


def silent_nvidia_smi(facts: Facts) -> Iterator[Finding]:
    """nvidia-smi is there and has no answer."""
    if "driver" in facts.untold:
        remedy = (
            "run nvidia-smi by hand and see dmesg (Xid, NVRM); a GPU that fell off the bus needs "
            "a reset of the machine"
        )
        yield _warning(
            "nvidia-smi-silent", "nvidia-smi has no answer", facts.untold["driver"], remedy
        )


# Libraries


def nccl_versions(facts: Facts) -> Iterator[Finding]:
    """Another NCCL than torch was made for, two of them, or none."""
    nccl = facts.nccl
    if len(facts.gpus or []) > 1 and facts.torch and "nccl" not in facts.torch.backends:
        cause, remedy = (
            f"torch {facts.torch.version} was built without it",
            "install a build of torch with NCCL",
        )
        yield _warning(
            "no-nccl",
            "GPUs exchange rows over gloo, through host memory: torch has no NCCL",
            cause,
            remedy,
        )
    if nccl is None:
        return
    path = "LD_LIBRARY_PATH, LD_PRELOAD or a package brought another one"
    if len(nccl.paths) > 1:
        symptom = f"{len(nccl.paths)} NCCLs are loaded: {', '.join(nccl.paths)}"
        yield _warning(
            "two-nccls", symptom, path, "leave one: unset LD_PRELOAD, or remove the other package"
        )
    if nccl.version and nccl.wanted and numbers(nccl.version) != numbers(nccl.wanted):
        symptom = (
            f"NCCL {nccl.version} is loaded{_from(nccl.paths)}, but torch was made for "
            f"{nccl.wanted}"
        )
        remedy = (
            f"unset LD_LIBRARY_PATH and LD_PRELOAD, or pip install the NCCL {nccl.wanted} that "
            f"torch asks for"
        )
        yield _warning("nccl-mismatch", symptom, path, remedy)


def _from(paths: list[str]) -> str:
    return f" from {paths[0]}" if paths else ""


def triton_version(facts: Facts) -> Iterator[Finding]:
    """Only what keeps GPUs that could run engine ``nvlink`` from it."""
    if (
        "nvlink" not in facts.engines
        or not facts.gpus
        or facts.peers is None
        or unreachable(facts)
        or old_gpus(facts)
    ):
        return
    install = "pip install 'tokenyard[cuda]'"
    if facts.triton is None:
        cause = facts.untold.get("triton", "it is not installed")
        yield _warning("no-triton", "engine nvlink is out of reach without Triton", cause, install)
    elif not triton_fits(facts.triton):
        symptom = f"Triton {facts.triton}: engine nvlink needs {TRITON}"
        yield _warning(
            "triton-version", symptom, "torch brought it, or something pinned it", install
        )
    if facts.symmetric_memory and gpu_pairs(facts):
        symptom = "engine nvlink is out of reach without torch's symmetric memory"
        yield _warning(
            "no-symmetric-memory", symptom, facts.symmetric_memory, "install torch 2.9 or later"
        )


# Links


def missing_peers(facts: Facts) -> Iterator[Finding]:
    """Pairs of GPUs that cannot reach each other's memory: all are named."""
    bad = unreachable(facts)
    if not bad:
        return
    pairs = len(gpu_pairs(facts))
    symptom = f"no peer access between GPUs {pairs_text(bad)} ({len(bad)} of {pairs} pairs)"
    reasons = sorted({facts.p2p[a][b] for a, b in bad} - {"OK", "X"}) if facts.p2p else []
    told = "; ".join(
        f"nvidia-smi says {word}: {P2P_REASONS.get(word, 'unknown')}" for word in reasons
    )
    if any(gpu.mig for gpu in facts.gpus or []):
        yield _warning("no-peer-access", symptom, "MIG is on", "turn MIG off: nvidia-smi -mig 0")
        return
    translated = [kind for kind in (facts.pci.iommu if facts.pci else []) if kind != "identity"]
    hint = f"an IOMMU translates between them ({', '.join(translated)})" if translated else ""
    cause = (
        "; ".join(filter(None, (told, hint)))
        or "the GPUs' link, or PCIe ACS, an IOMMU or a virtual machine in between"
    )
    yield _warning(
        "no-peer-access",
        symptom,
        cause,
        f"engine collective works without; for P2P over PCIe {ACS}",
    )


def iommu(facts: Facts) -> Iterator[Finding]:
    """Peer access over PCIe that an IOMMU may redirect, which shows as hangs or wrong data."""
    translated = [kind for kind in (facts.pci.iommu if facts.pci else []) if kind != "identity"]
    over_pcie = [
        (a, b)
        for a, b in gpu_pairs(facts)
        if (a, b) not in unreachable(facts) and nvlinks(facts, a, b) == 0
    ]
    if translated and over_pcie and facts.peers is not None:
        symptom = (
            f"GPUs {pairs_text(over_pcie)} reach each other over PCIe behind an IOMMU "
            f"({', '.join(translated)})"
        )
        cause = (
            "ACS may send their traffic through the root complex: slow, and on some machines "
            "hanging or wrong"
        )
        yield _warning("iommu", symptom, cause, f"{ACS}; if NCCL hangs, set NCCL_P2P_DISABLE=1")


def uneven_links(facts: Facts) -> Iterator[Finding]:
    """Pairs with fewer NVLinks than others."""
    counts = {
        pair: links for pair in gpu_pairs(facts) if (links := nvlinks(facts, *pair)) is not None
    }
    most = max(counts.values(), default=0)
    fewer = [pair for pair, links in counts.items() if links < most]
    if fewer:
        symptom = f"GPUs {pairs_text(fewer)} have fewer NVLinks than the {most} of others"
        cause = "this board's wiring, or links that are down"
        yield _warning(
            "uneven-links", symptom, cause, "see nvidia-smi topo -m and nvidia-smi nvlink -s"
        )


def mig(facts: Facts) -> Iterator[Finding]:
    """MIG keeps instances apart."""
    seen = [*(facts.gpus or []), *(facts.driver.gpus if facts.driver else [])]
    if any(gpu.mig or " MIG " in gpu.name for gpu in seen):
        cause = "MIG instances cannot reach each other's memory, and NCCL takes one per GPU"
        yield _warning(
            "mig", "MIG is on", cause, "turn it off for ranks that work together: nvidia-smi -mig 0"
        )


# The host


def host_limits(facts: Facts) -> Iterator[Finding]:
    """/dev/shm, locked memory, open files."""
    if facts.shm and (facts.shm.total < SMALL_SHM or facts.shm.free < SMALL_SHM // 2):
        symptom = (
            f"/dev/shm has {bytes_text(facts.shm.total)}, {bytes_text(facts.shm.free)} of it free"
        )
        cause = (
            "a container gets 64 MB unless told otherwise; NCCL and torch's processes share "
            "memory there"
        )
        yield _warning(
            "small-shm",
            symptom,
            cause,
            "start it with --ipc=host or --shm-size=8g, or remount /dev/shm larger",
        )
    limits = facts.limits
    if limits and facts.infiniband and limits.memlock != UNLIMITED:
        symptom = (
            f"only {bytes_text(limits.memlock)} can be locked, but there is InfiniBand "
            f"({', '.join(facts.infiniband)})"
        )
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        yield _warning("memlock", symptom, "RDMA locks what it sends from", remedy)
    if limits and limits.open_files != UNLIMITED and limits.open_files < FEW_FILES:
        symptom, cause = (
            f"only {limits.open_files} files can be open",
            "every pair of ranks takes sockets",
        )
        yield _warning("open-files", symptom, cause, "ulimit -n 65536")


def hostname(facts: Facts) -> Iterator[Finding]:
    """gloo looks up the host's own name."""
    known = facts.hostname
    why = known.error if known else facts.untold.get("hostname", "")
    if why:
        symptom = f"this host's name{f', {known.name},' if known else ''} has no address ({why})"
        cause = "gloo looks it up when a group is made, and hangs or fails"
        remedy = (
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that ranks use (lo "
            "on one host)"
        )
        yield _warning("hostname", symptom, cause, remedy)


def switched_off(facts: Facts) -> Iterator[Finding]:
    """Variables that somebody set once, and that cost speed."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if facts.environment.get(name, "0") not in ("", "0") and len(facts.gpus or []) > 1:
            cause = "NCCL then takes a slower way between GPUs"
            yield _warning(
                "nccl-variable", f"{name} is set", cause, "unset it unless NCCL hangs without"
            )


RULES: tuple[Rule, ...] = (
    no_torch,
    cpu_only_torch,
    gpus_do_not_start,
    no_driver,
    silent_nvidia_smi,
    nccl_versions,
    triton_version,
    missing_peers,
    iommu,
    uneven_links,
    mig,
    host_limits,
    hostname,
    switched_off,
)


def of_memory(need: Need, asked: bool) -> Iterator[Finding]:
    """A workload that does not fit is a problem if somebody ``asked`` about it, a warning if it is
    the default one.
    """
    if need.free is None or need.even.total <= need.free:
        return
    kind = _problem if asked else _warning
    symptom = (
        f"a rank needs {bytes_text(need.even.total)}, but {bytes_text(need.free)} of {need.where} "
        f"memory are free"
    )
    cause = "the workload is too large for this machine, or other processes hold its memory"
    fewer = "fewer --tokens or --ranks" if need.where == "host" else "fewer --tokens"
    yield kind("memory", symptom, cause, f"take {fewer}, or end what else runs here")


def of_self_test(test: SelfTest, facts: Facts) -> Iterator[Finding]:
    """Dispatch and combine failed, hung, or gave other bits than the oracle."""
    if not test.error:
        return
    where = (
        f"{test.ranks} {'GPU' if test.device == 'cuda' else 'CPU'} rank(s), engine {test.engine}"
    )
    if test.device == "cpu":
        remedy = (
            "see that 127.0.0.1 and interface lo work, that nothing filters them, and that "
            "GLOO_SOCKET_IFNAME is not set"
        )
    else:
        remedy = (
            "run again with NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1; if it hangs, with "
            "NCCL_P2P_DISABLE=1"
        )
        if any(nvlinks(facts, a, b) == 0 for a, b in gpu_pairs(facts)):
            remedy += f"; for P2P over PCIe {ACS}"
    symptom = f"the self-test on {where} failed"
    yield _problem(f"self-test-{test.device}", symptom, test.error, _remedy(test.error, remedy))
