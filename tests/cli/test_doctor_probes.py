"""``tokenyard doctor``: reading what this host and the GPU driver say, and probes that raise, crash
and hang.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from doctor_machines import (
    Driver,
    Gpu,
    Library,
    PciBus,
    Space,
    findings,
    gpu,
    matrix,
)
from tokenyard.cli import doctor_child, doctor_probes
from tokenyard.cli.doctor_facts import Record
from tokenyard.cli.doctor_guard import (
    NO_NVML,
    Asker,
    in_time,
    reason,
    run,
    without_launcher,
)
from tokenyard.cli.doctor_probes import by_uuid, driver_in

# Reading what the driver says

NVML = '''
"""Stands in for nvidia-ml-py: three GPUs, of which the first two share 18 NVLinks."""
from types import SimpleNamespace as _Known

NVML_NVLINK_MAX_LINKS = 36
PATHS = {(0, 2): 50, (1, 2): 30}
STATUS = {(0, 2): 1, (1, 2): 2}
NAMES = ["GPU-aa", "GPU-BB", "GPU-cc"]

class NVMLError(Exception): pass
class NVMLError_LibraryNotFound(NVMLError): pass
def nvmlInit(): pass
def nvmlSystemGetDriverVersion(): return "580.159.04"
def nvmlSystemGetCudaDriverVersion_v2(): return 13000
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetName(gpu): return "NVIDIA H200"
def nvmlDeviceGetUUID(gpu): return NAMES[gpu]
def nvmlDeviceGetPciInfo(gpu): return _Known(busId=f"00000000:0{gpu}:00.0")
def nvmlDeviceGetMemoryInfo(gpu):
    if gpu == 1:
        raise NVMLError("no")
    return _Known(total=143771 << 20, free=143167 << 20)
def nvmlDeviceGetCudaComputeCapability(gpu):
    if gpu == 1:
        raise NVMLError("no")
    return 9, 0
def nvmlDeviceGetMigMode(gpu):
    if gpu == 2:
        raise NVMLError("Not Supported")
    return [int(gpu == 1), 0]
def nvmlDeviceGetNvLinkState(gpu, link):
    if gpu == 2 or link >= 18:
        raise NVMLError("Not Supported")
    return 1
def nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link): return 0
def nvmlDeviceGetNvLinkRemotePciInfo(gpu, link): return nvmlDeviceGetPciInfo(1 - gpu)
def nvmlDeviceGetTopologyCommonAncestor(a, b): return PATHS[min(a, b), max(a, b)]
def nvmlDeviceGetP2PStatus(a, b, capability):
    assert capability == 0
    return STATUS.get((min(a, b), max(a, b)), 0)
'''


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, where this process looks for the module."""
    module = ModuleType("pynvml")
    exec(NVML, module.__dict__)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def seen() -> list[Record]:
    told = doctor_child.driver()
    assert told is not None
    return told["gpus"]


def test_nvml_tells_the_driver_and_its_gpus(nvml: Any) -> None:
    told = doctor_child.driver()
    assert told is not None
    assert (told["version"], told["cuda"]) == ("580.159.04", "13.0")
    gpus = seen()
    assert gpus[0] == Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-aa",
        memory_total=143771 << 20,
        memory_free=143167 << 20,
        capability="9.0",
        mig=False,
    )
    told = [gpus[1][name] for name in ("memory_free", "capability", "mig")]
    assert told == [None, None, True]
    assert gpus[2]["mig"] is None
    nvml.nvmlDeviceGetCount = lambda: 0
    assert seen() == []
    nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12040
    assert (doctor_child.driver() or {})["cuda"] == "12.4"


def test_nvml_tells_paths_between_gpus(nvml: Any) -> None:
    assert doctor_child.links() == [["X", "NV18", "SYS"], ["NV18", "X", "PHB"], ["SYS", "PHB", "X"]]
    assert (doctor_child.p2p() or [])[2] == ["CNS", "GNS", "X"]
    nvml.STATUS[0, 1] = 99
    assert (doctor_child.p2p() or [])[0] == ["X", "U", "CNS"]


def test_links_to_a_switch_count_for_all_gpus_behind_it(nvml: Any) -> None:
    """As few as the GPU has that has fewest; links that are down count nothing."""
    nvml.nvmlDeviceGetNvLinkState = lambda gpu, link: link < (18, 18, 17)[gpu]
    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda gpu, link: 2
    assert doctor_child.links() == matrix(3, "NV17", "X", _0_1="NV18")


def test_tables_are_in_the_order_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [gpu(at, uuid=uuid) for at, uuid in enumerate(("cc", "aa", "bb"))]
    links = [["X", "NV18", "SYS"], ["NV18", "X", "PHB"], ["SYS", "PHB", "X"]]
    known = [Gpu(index=at, name="H200", uuid=f"GPU-{u}") for at, u in enumerate(["aa", "bb", "cc"])]
    asker = Asker(1)
    told = {"driver": {"version": "1", "cuda": "13.0", "gpus": known}, "links": links}
    monkeypatch.setattr(asker, "process", lambda *_: (told, {}))
    facts = doctor_probes._of_driver(asker, gpus, tmp_path)
    assert facts["links"] == [["X", "SYS", "PHB"], ["SYS", "X", "NV18"], ["PHB", "NV18", "X"]]


def test_driver_versions(tmp_path: Path) -> None:
    """Of the driver's own file."""
    line = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC "
        "2023\nGCC version: 12\n"
    )
    open_line = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    )
    for text, version in ((line, "535.104.05"), (open_line, "580.159.04")):
        write(tmp_path, {"proc/driver/nvidia/version": text})
        assert driver_in(tmp_path) == Driver(version=version)
    write(tmp_path, {"proc/driver/nvidia/version": "what"})
    assert driver_in(tmp_path) is None


@pytest.mark.usefixtures("nvml")
def test_gpus_are_matched_by_uuid():
    ours = [gpu(0, uuid="bb", memory_free=1), gpu(1, uuid="aa", memory_free=2)]
    theirs = seen()[:2]
    merged, order = by_uuid(ours, theirs)
    assert order == [1, 0]
    assert [(g["index"], g["memory_free"], g["mig"]) for g in merged] == [
        (0, 1, True),
        (1, 143167 << 20, False),
    ]
    assert by_uuid([gpu(0, uuid="cc")], theirs) == ([gpu(0, uuid="cc")], None)


def test_loaded_files_and_wanted_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    maps = (
        "7f0 r-xp 00000000 08:01 11   /a b/libnccl.so.2\n7f1 rw-p 00000000 08:01 11   /a "
        "b/libnccl.so.2\n"
        "7f2 r-xp 00000000 08:01 12   /opt/libnccl.so.2.18 (deleted)\n7f3 r-xp 00000000 08:01 13   "
        "/opt/libnccl-net.so\n"
        "7f4 rw-p 00000000 00:00 0 \n7f5 rw-p 00000000 00:00 0   [heap]\n"
    )
    write(tmp_path, {"maps": maps})
    assert doctor_child.mapped_files("libnccl.so", tmp_path / "maps") == [
        "/a b/libnccl.so.2",
        "/opt/libnccl.so.2.18",
    ]
    asks = [
        "filelock",
        'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        "nvidia-nvshmem-cu12 (==3.4.5)",
    ]
    monkeypatch.setattr(doctor_child.metadata, "requires", lambda _: asks)
    assert doctor_child.wanted_package("nvidia-nccl") == ("nvidia-nccl-cu13", "2.28.9")
    assert doctor_child.wanted_package("nvidia-nvshmem") == ("nvidia-nvshmem-cu12", "3.4.5")
    monkeypatch.setattr(doctor_child.metadata, "requires", lambda _: None)
    assert doctor_child.wanted_package("nvidia-nccl") == (None, None)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_host_memory_counts_the_cgroup(tmp_path: Path):
    write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 "
            "kB\nHugePages_Total: 0\n"
        },
    )
    assert doctor_probes.host_memory(tmp_path) == Space(total=1024000, free=819200)
    group = {
        "memory.max": "500000\n",
        "memory.current": "400000\n",
        "memory.stat": "anon 1\ninactive_file 100000\n",
    }
    write(tmp_path / "sys/fs/cgroup", group)
    assert doctor_probes.host_memory(tmp_path) == Space(total=500000, free=200000)
    write(tmp_path / "sys/fs/cgroup", {"memory.max": "max\n"})
    assert doctor_probes.host_memory(tmp_path)["free"] == 819200


def test_pci_bus_and_shared_memory(tmp_path: Path):
    assert doctor_probes.pci_bus(tmp_path) == PciBus(gpus=0)
    assert doctor_probes.shared_memory(tmp_path) == Space(total=0, free=0)
    device = "sys/bus/pci/devices/0000:0"
    write(
        tmp_path,
        {
            f"{device}1/vendor": "0x10de\n",
            f"{device}1/class": "0x030200\n",
            f"{device}1/iommu_group/type": "DMA-FQ\n",
            f"{device}2/vendor": "0x10de\n",
            f"{device}2/class": "0x068000\n",
            f"{device}3/vendor": "0x15b3\n",
            f"{device}3/class": "0x020700\n",
        },
    )
    assert doctor_probes.pci_bus(tmp_path) == PciBus(gpus=1, iommu=["DMA-FQ"])


def test_environment_shows_what_matters_only():
    given = {"NCCL_DEBUG": "INFO", "HOME": "/x", "CUDA_VISIBLE_DEVICES": "0", "SECRET": "s"}
    assert doctor_probes.environment(given) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"}
    launched = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin"}
    assert without_launcher(launched) == {"PATH": "/bin"}


# Probes that raise, crash and hang


def raises() -> int:
    raise OSError("gone")


def hangs() -> int:
    time.sleep(600)
    return 0


def test_a_probe_that_raises_or_hangs_could_not_tell():
    asker = Asker(timeout=0.1)
    assert asker.ask("cpus", raises) is None
    assert asker.ask_soon("shm", hangs) is None
    assert asker.ask_soon("memory", raises) is None
    assert Asker(timeout=60).ask_soon("limits", lambda: 3) == 3
    gone = "OSError: gone"
    assert asker.untold == {
        "cpus": gone,
        "shm": "TimeoutError: no answer within 0.1 s",
        "memory": gone,
    }
    with pytest.raises(KeyboardInterrupt):
        in_time(lambda: (_ for _ in ()).throw(KeyboardInterrupt), 5)


def gone(pid: int) -> bool:
    """Whether a process is no more (or a zombie that nobody has waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_hanging_command_is_killed_with_its_children():
    done = run(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; sleep 600"], 1.5)
    assert done.why == "no answer within 1.5 s"
    deadline = time.monotonic() + 10
    while not gone(int(done.output)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(int(done.output))


def test_a_child_that_keeps_the_output_open_is_not_waited_for():
    done = run(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"],
        60,
    )
    os.kill(int(done.output), 9)
    assert done.why.startswith("exit code 0")


@pytest.mark.parametrize(
    ("end", "timeout", "why"),
    [
        ("os.kill(os.getpid(), 9)", 60, "signal 9"),
        ("time.sleep(600)", 2, "no answer within 2 s"),
        ("sys.exit('what a pity')", 60, "exit code 1: what a pity"),
    ],
)
def test_what_was_answered_before_the_end_counts(end: str, timeout: float, why: str):
    code = (
        "import json, os, sys, time; out = open(sys.argv[1], 'w', buffering=1);"
        "print(json.dumps({'name': 'a', 'value': 1}), file=out); print(json.dumps({'name': 'b', "
        "'error': 'E'}), file=out);"
        f"out.write('{{\"name\": '); out.flush(); assert sys.argv[2] == 'x'; {end}"
    )
    asker = Asker(timeout, [sys.executable, "-c", code])
    assert asker.process(["a", "b", "c"], "x") == (
        {"a": 1},
        {"b": "E", "c": why},
    )


def test_reasons_are_short():
    traced = (
        "rank 0 failed:\nTraceback (most recent call last):\n  File x\nKeyError: 1\n\nDuring "
        "handling\n\n"
        "Traceback (most recent call last):\n  File y\n    call()\nAssertionError: x: 1 row is "
        "wrong\ncolumn 3: is 0\n"
    )
    assert (
        reason(RuntimeError(traced))
        == "rank 0 failed: AssertionError: x: 1 row is wrong column 3: is 0"
    )
    assert reason(ValueError()) == "ValueError"
    assert len(reason(ValueError("x" * 9999))) == 500


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules come first, also for processes of the doctor; its driver is loaded."""
    known = [str(tmp_path), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(known))
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1  Sat\n"
    write(tmp_path, {"proc/driver/nvidia/version": version})
    return tmp_path


def ask_driver(timeout: float, root: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """What is found out about a driver, and why the rest could not be told."""
    asker = Asker(timeout)
    return doctor_probes._of_driver(asker, [], root), asker.untold


@pytest.mark.parametrize(
    ("script", "timeout", "why"),
    [
        ("import time; time.sleep(600)", 5, "no answer within 5 s"),
        ("raise RuntimeError('NVML: version mismatch')", 60, "NVML: version mismatch"),
        ("import os; os.kill(os.getpid(), 9)", 60, "signal 9"),
    ],
)
def test_a_driver_that_hangs_or_fails(path: Path, script: str, timeout: float, why: str) -> None:
    text = f"{NVML}\ndef nvmlInit():\n    {script}\n"
    write(path, {"pynvml.py": text})
    facts, untold = ask_driver(timeout, path)
    assert facts["driver"] is None
    assert untold.keys() == {"driver", "links", "p2p"}
    assert why in untold["driver"]


def test_no_driver_is_no_fault(path: Path) -> None:
    text = f"{NVML}\ndef nvmlInit():\n    raise NVMLError_LibraryNotFound\n"
    write(path, {"pynvml.py": text})
    assert ask_driver(60, path) == ({"driver": None}, {})


def test_driver_without_nvml(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is known by its file; what is not known is said, with the remedy."""
    write(path, {"pynvml.py": "raise ModuleNotFoundError('pynvml')\n"})
    facts, untold = ask_driver(60, path)
    assert facts == {"driver": Driver(version="535.1")}
    assert untold == {"links": NO_NVML, "p2p": NO_NVML}
    assert "pip install" in NO_NVML
    (path / "proc/driver/nvidia/version").unlink()
    assert ask_driver(60, path) == ({"driver": None}, {})
    asker = Asker(60)
    monkeypatch.setattr(asker, "process", pytest.fail)
    monkeypatch.setattr(asker, "ask_process", lambda *_: {"gpus": []})
    assert doctor_probes.gather(asker, path).driver is None, "where nothing is, nobody is asked"


def test_a_made_up_machine_from_end_to_end(path: Path, monkeypatch: pytest.MonkeyPatch):
    """NVML's tables come out in torch's order, and one that fails only leaves a line."""
    gpus = [
        Gpu(index=0, name="NVIDIA H200", uuid="cc"),
        Gpu(index=1, name="NVIDIA H200", uuid="bb"),
    ]
    answers = {
        "torch": {
            "version": "2.11.0",
            "cuda": "13.0",
            "hip": None,
            "backends": ["gloo"],
            "error": "",
        },
        "nccl": {"version": "2.28.9", "wanted": None, "paths": []},
        "gpus": gpus,
        "peers": matrix(2, True, True),
    }
    broken = "\ndef nvmlDeviceGetP2PStatus(*_):\n    raise NVMLError('no such option')\n"
    write(path, {"pynvml.py": NVML + broken})
    asker = Asker(30)
    monkeypatch.setattr(asker, "ask_process", lambda *_: answers)
    facts = doctor_probes.gather(asker, path)
    assert facts.links == [["X", "PHB"], ["PHB", "X"]]
    assert facts.p2p is None
    assert facts.untold["p2p"] == "NVMLError: no such option"
    assert "FileNotFoundError" in facts.untold["memory"]
    assert facts.driver is not None
    assert facts.driver["cuda"] == "13.0" and len(facts.driver["gpus"]) == 3
    assert facts.gpus is not None and [g["mig"] for g in facts.gpus] == [None, True]
    assert facts.torch is not None and facts.nccl == Library(version="2.28.9")
    assert {"mig", "no-nccl"} <= findings(facts).keys()
