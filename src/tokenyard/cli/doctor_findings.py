"""What can be wrong with a machine. Every finding is three lines of text: its id, severity and
symptom; the likely cause; a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tokenyard.cli.consoles import bytes_text
from tokenyard.cli.doctor_ask import NO_ANSWER, NOT_ASKED
from tokenyard.cli.doctor_machine import Machine, numbers, pairs_text
from tokenyard.cli.doctor_probes import P2P, reason
from tokenyard.engines.obstacles import CAPABILITY, TRITON, triton_fits

PROBLEM, WARNING = "problem", "warning"
"""A problem: this machine is not healthy. A warning: it works, but less well than it could."""

UNLIMITED = -1
KEYS = ("id", "severity", "symptom", "cause", "remedy")
SMALL_SHM, FEW_FILES = 128 << 20, 1024

ACS = (
    "on bare metal turn ACS off on the PCIe switches and boot with iommu=pt; in a virtual machine "
    "the host has to pass the GPUs through together"
)


def findings(m: Machine) -> list[dict[str, str]]:
    """All that is wrong. A rule that raises becomes something that could not be told."""
    found: list[dict[str, str]] = []
    for rule in RULES:
        try:
            for words in rule(m):
                head, cause, remedy = map(str.strip, words.split("\n"))
                title, symptom = head.split(": ", 1)
                told = (*title.split(), symptom, cause, remedy)
                found.append(dict(zip(KEYS, told, strict=True)))
        except Exception as error:
            m.untold[f"rule {rule.__name__}"] = reason(error)
    return found


def torch_itself(m: Machine) -> Iterator[str]:
    if not m.torch:
        why = m.untold.get("torch", "nobody asked")
        call = "run python -c 'import torch; torch.cuda.init()'"
        yield f"""torch-silent problem: torch does not answer
            {why}
            {with_patience(why, f"{call}; if that hangs or crashes, mend torch or the driver")}"""
        return
    version, backends, driver = m.torch["version"], m.torch["backends"], m.driver
    if "gloo" not in backends:
        yield f"""no-gloo problem: torch cannot connect ranks over gloo
            torch {version} was built without torch.distributed or without gloo
            install a build of torch that has it"""
    if m.count > 1 and "nccl" not in backends:
        yield f"""no-nccl warning: torch has no NCCL: GPUs exchange rows through host memory (gloo)
            torch {version} was built without it
            install a build of torch with NCCL"""
    if driver and not m.torch["cuda"] and not m.torch["hip"]:
        most = f"; this driver serves CUDA up to {driver['cuda']}" if driver["cuda"] else ""
        yield f"""cpu-only-torch problem: torch sees no GPU beside NVIDIA driver {driver["version"]}
            torch {version} is a CPU-only build
            install a CUDA build of torch{most}"""


def gpus_that_do_not_start(m: Machine) -> Iterator[str]:
    """A driver and a CUDA build of torch, but no GPU."""
    if m.gpus or not m.torch or not m.driver or not m.torch["cuda"]:
        return
    cuda, most, error = m.torch["cuda"], m.driver["cuda"], m.torch["error"]
    hidden = m.environment.get("CUDA_VISIBLE_DEVICES")
    symptom = f"torch {m.torch['version']} sees no GPU beside NVIDIA driver {m.driver['version']}"
    if "too old" in error or (most and numbers(most)[:1] < numbers(cuda)[:1]):
        serves, build = (f"serves CUDA up to {most}", most) if most else ("is older", "of its age")
        yield f"""old-driver problem: {symptom}
            torch needs CUDA {cuda}, but the driver {serves}
            update the driver, or install a build of torch for CUDA {build} or older"""
    elif hidden is not None:
        yield f"""gpus-hidden warning: {symptom}
            CUDA_VISIBLE_DEVICES is {hidden!r}
            unset it, or name the GPUs that ranks may use"""
    else:
        yield f"""gpus-silent problem: {symptom}
            {error or m.untold.get("gpus") or "nothing says why"}
            see whether nvidia-smi works, /dev/nvidia* can be opened here, and what dmesg \
says (Xid)"""


def no_driver(m: Machine) -> Iterator[str]:
    """GPUs in the machine, but no driver here, or one that does not answer."""
    if why := m.untold.get("driver"):
        yield f"""nvidia-smi-silent warning: the driver does not answer NVML, as nvidia-smi asks it
            {why}
            run nvidia-smi by hand and see dmesg (Xid, NVRM); a GPU that fell off the bus needs \
a reset of the machine"""
    elif m.pci and m.pci["gpus"] and not m.driver and not m.gpus:
        yield f"""no-driver warning: {m.pci["gpus"]} NVIDIA GPU(s) on the PCI bus, but no driver
            the driver is not installed, or this container was started without the GPUs
            install the driver, or start the container with its GPUs (docker run --gpus all)"""


def nccl_versions(m: Machine) -> Iterator[str]:
    """Another NCCL than torch was made for, or two of them."""
    if not m.nccl:
        return
    version, wanted, paths = m.nccl["version"], m.nccl["wanted"], m.nccl["paths"]
    if len(paths) > 1:
        yield f"""two-nccls warning: {len(paths)} NCCLs are loaded: {", ".join(paths)}
            LD_LIBRARY_PATH, LD_PRELOAD or a package brought another one
            leave one: unset LD_PRELOAD, or remove the other package"""
    if version and wanted and numbers(version) != numbers(wanted):
        where = f" from {paths[0]}" if paths else ""
        yield f"""nccl-mismatch warning: NCCL {version} is loaded{where}, \
but torch was made for {wanted}
            LD_LIBRARY_PATH, LD_PRELOAD or a package brought another one
            unset them, or pip install the NCCL {wanted} that torch asks for"""


def software_for_nvlink(m: Machine) -> Iterator[str]:
    """What alone keeps GPUs that could run engine nvlink from it."""
    fit = all(numbers(gpu["capability"]) >= CAPABILITY for gpu in m.gpus or ())
    if not (m.gpus and fit and m.peers) or m.unreachable:
        return
    if m.triton is None:
        yield f"""no-triton warning: engine nvlink is out of reach without Triton
            {m.untold.get("triton", "it is not installed")}
            pip install 'tokenyard[cuda]'"""
    elif not triton_fits(m.triton):
        yield f"""triton-version warning: Triton {m.triton}: engine nvlink needs {TRITON}
            torch brought it, or something pinned it
            pip install 'tokenyard[cuda]'"""
    if m.symmetric_memory and m.pairs:
        yield f"""no-symmetric-memory warning: engine nvlink needs torch's symmetric memory
            {m.symmetric_memory}
            install torch 2.9 or later"""


def links(m: Machine) -> Iterator[str]:
    """Pairs of GPUs that cannot reach each other's memory (all are named), or may do so badly."""
    bad, mig = m.unreachable, any(gpu["mig"] for gpu in m.gpus or ())
    domains: list[str] = m.pci["iommu"] if m.pci else []
    kinds = ", ".join(kind for kind in domains if kind != "identity")
    if bad:
        words = sorted({m.p2p[a][b] for a, b in bad} - {"OK", "X"}) if m.p2p else []
        told = [f"the driver says {word}: {P2P.get(word, 'unknown')}" for word in words]
        told += [f"an IOMMU translates between them ({kinds})"] if kinds else []
        unknown = "their link, or PCIe ACS, an IOMMU or a virtual machine in between"
        away = f"engine collective works without; for P2P over PCIe {ACS}"
        yield f"""no-peer-access warning: {m.apart(m.count)}
            {"MIG is on" if mig else "; ".join(told) or unknown}
            {"turn MIG off: nvidia-smi -mig 0" if mig else away}"""
    over_pcie = [pair for pair, count in m.nvlinks.items() if not count and pair not in bad]
    if kinds and over_pcie and m.peers is not None:
        yield f"""iommu warning: GPUs {pairs_text(over_pcie)} reach each other over PCIe behind \
an IOMMU ({kinds})
            ACS may lead it through the root complex: slow, on some machines hanging or wrong
            {ACS}; if NCCL hangs, set NCCL_P2P_DISABLE=1"""
    most = max(m.nvlinks.values(), default=0)
    if fewer := [pair for pair, count in m.nvlinks.items() if count < most]:
        yield f"""uneven-links warning: GPUs {pairs_text(fewer)} have fewer NVLinks than \
the {most} of others
            this board's wiring, or links that are down
            see nvidia-smi topo -m and nvidia-smi nvlink -s"""
    if any(gpu["mig"] or " MIG " in str(gpu["name"]) for gpu in m.devices):
        yield """mig warning: MIG is on
            MIG instances cannot reach each other's memory, and NCCL takes one per GPU
            turn it off for ranks that work together: nvidia-smi -mig 0"""


def host(m: Machine) -> Iterator[str]:
    """Limits; its own name, which gloo looks up; variables that somebody set once."""
    shm, most = m.shm, m.limits or {"memlock": UNLIMITED, "open_files": UNLIMITED}
    if shm and (shm["total"] < SMALL_SHM or shm["free"] < SMALL_SHM // 2):
        sizes = f"{bytes_text(shm['total'])}, {bytes_text(shm['free'])} of it free"
        yield f"""small-shm warning: /dev/shm has {sizes}
            a container gets 64 MB by default; NCCL and torch's processes share memory there
            start it with --ipc=host or --shm-size=8g, or remount /dev/shm larger"""
    if m.infiniband and most["memlock"] != UNLIMITED:
        only, devices = bytes_text(most["memlock"]), ", ".join(m.infiniband)
        yield f"""memlock warning: only {only} can be locked, but there is InfiniBand ({devices})
            RDMA locks what it sends from
            ulimit -l unlimited (docker run --ulimit memlock=-1)"""
    if UNLIMITED != most["open_files"] < FEW_FILES:
        yield f"""open-files warning: only {most["open_files"]} files can be open
            every pair of ranks takes sockets
            ulimit -n 65536"""
    known = m.hostname or {"name": "(unknown)", "error": m.untold.get("hostname")}
    if known["error"]:
        yield f"""hostname warning: this host's name {known["name"]} has no address \
({known["error"]})
            gloo looks it up when a group is made, and hangs or fails
            add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that ranks \
use (lo on one host)"""
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
        if m.environment.get(name, "0") not in ("", "0") and m.pairs:
            yield f"""nccl-variable warning: {name} is set
                NCCL then takes a slower way between GPUs
                unset it unless NCCL hangs without"""


def memory(m: Machine) -> Iterator[str]:
    """A workload that does not fit is a problem if somebody asked about it."""
    need = m.need
    if need["free"] is not None and need["even"]["total"] > need["free"]:
        total, free = bytes_text(need["even"]["total"]), bytes_text(need["free"])
        where, fewer = need["where"], " or --ranks" if need["where"] == "host" else ""
        yield f"""memory {PROBLEM if m.asked else WARNING}: a rank needs {total}, but {free} of \
{where} memory are free
            the workload is too large for this machine, or other processes hold its memory
            take fewer --tokens{fewer}, or end what else runs here"""


def self_tests(m: Machine) -> Iterator[str]:
    """Dispatch and combine failed, hung, or gave other bits than the oracle."""
    for test in m.self_tests:
        remedy = "see that 127.0.0.1 and lo work unfiltered, and that GLOO_SOCKET_IFNAME is not set"
        if test["device"] == "cuda":
            remedy = "run again with NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1; if it hangs, with "
            remedy += "NCCL_P2P_DISABLE=1"
            remedy += f"; for P2P over PCIe {ACS}" if 0 in m.nvlinks.values() else ""
        if not test["ok"]:
            ranks = f"{test['ranks']} {test['device']} rank(s), engine {test['engine']}"
            yield f"""self-test-{test["device"]} problem: the self-test on {ranks} failed
                {test["error"]}
                {with_patience(test["error"], remedy)}"""


def with_patience(why: str, remedy: str) -> str:
    """What helps against ``why`` a process has no answer; ``remedy`` if that is its own fault."""
    if why.startswith(NOT_ASKED):
        return "make room for processes (ulimit -u) and files in a temporary directory (TMPDIR)"
    return remedy + ("; on a slow machine wait longer: --timeout" if NO_ANSWER in why else "")


RULES: tuple[Callable[[Machine], Iterator[str]], ...] = (
    torch_itself,
    gpus_that_do_not_start,
    no_driver,
    nccl_versions,
    software_for_nvlink,
    links,
    host,
    memory,
    self_tests,
)
