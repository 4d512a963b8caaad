"""``tokenyard doctor``: reading what this host and the GPU driver say, and probes that raise, crash
and hang.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import torch

from doctor_machines import Driver, Library, PciBus, Space, findings, gpu, machine, matrix
from tokenyard.cli import doctor_ask, doctor_probes
from tokenyard.cli.doctor_ask import ask, gather
from tokenyard.cli.doctor_probes import reason

links, p2p = (doctor_probes.QUESTIONS["nvml"][name] for name in ("links", "p2p"))

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


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process looks for ``proc``, ``sys`` and ``dev``."""
    monkeypatch.setattr(doctor_probes, "ROOT", tmp_path)
    return tmp_path


UUIDS = ("aa", "bb", "cc")
"""The stand-in's GPUs as torch names them."""


def test_nvml_tells_the_driver_and_its_gpus(nvml: Any) -> None:
    told = doctor_probes.driver()
    assert told is not None
    assert (told["version"], told["cuda"]) == ("580.159.04", "13.0")
    first, second, third = told["gpus"]
    memory = 143167 << 20
    assert first == {"uuid": "aa", "name": "NVIDIA H200", "memory_free": memory, "mig": False}
    assert (second["memory_free"], second["mig"]) == (None, True)
    assert third["mig"] is None
    nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12040
    nvml.nvmlDeviceGetCount = lambda: 0
    assert doctor_probes.driver() == Driver(version="580.159.04", cuda="12.4")


def test_nvml_tells_paths_between_gpus(nvml: Any) -> None:
    paths = [["X", "NV18", "SYS"], ["NV18", "X", "PHB"], ["SYS", "PHB", "X"]]
    assert links(*UUIDS) == paths
    assert (p2p(*UUIDS) or [])[2] == ["CNS", "GNS", "X"]
    nvml.STATUS[0, 1] = 99
    assert (p2p(*UUIDS) or [])[0] == ["X", "U", "CNS"]


def test_links_to_a_switch_count_for_all_gpus_behind_it(nvml: Any) -> None:
    """As few as the GPU has that has fewest; links that are down count nothing."""
    nvml.nvmlDeviceGetNvLinkState = lambda gpu, link: link < (18, 18, 17)[gpu]
    nvml.nvmlDeviceGetNvLinkRemoteDeviceType = lambda gpu, link: 2
    assert links(*UUIDS) == matrix(3, "NV17", "X", _0_1="NV18")


@pytest.mark.usefixtures("nvml", "root")
def test_tables_are_in_the_order_of_torch() -> None:
    paths = [["X", "SYS", "PHB"], ["SYS", "X", "NV18"], ["PHB", "NV18", "X"]]
    assert links("cc", "aa", "bb") == paths
    assert links("GPU-CC", "GPU-AA", "GPU-BB") == paths
    for few in ((), ("aa",), ("aa", "dd")):
        assert links(*few) is None, "dd: a MIG instance"


def answers(**groups: Any) -> Any:
    """Stands in for ``ask``: what processes answer, by group; the rest is not there."""
    return lambda group, *_, **__: groups.get(group, ({}, {}))


def test_gpus_are_matched_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [gpu(0, uuid="bb", memory_free=1), gpu(1, uuid="aa", memory_free=2), gpu(2, uuid="cc")]
    known = [
        {"uuid": "aa", "name": "H200", "memory_free": 143167 << 20, "mig": False},
        {"uuid": "bb", "name": "H200", "memory_free": None, "mig": True},
    ]
    told = {"driver": Driver(gpus=known)}
    monkeypatch.setattr(doctor_ask, "ask", answers(torch=({"gpus": ours}, {}), nvml=(told, {})))
    facts, untold = gather(1)
    assert untold == {}
    assert [(g["index"], g["memory_free"], g["mig"]) for g in facts["gpus"]] == [
        (0, 1, True),
        (1, 143167 << 20, False),
        (2, gpu(2)["memory_free"], False),
    ]


def test_loaded_files_and_wanted_packages(root: Path, monkeypatch: pytest.MonkeyPatch):
    maps = (
        "7f0 r-xp 00000000 08:01 11   /a b/libnccl.so.2\n7f1 rw-p 00000000 08:01 11   /a "
        "b/libnccl.so.2\n"
        "7f2 r-xp 00000000 08:01 12   /opt/libnccl.so.2.18 (deleted)\n7f3 r-xp 00000000 08:01 13   "
        "/opt/libnccl-net.so\n7f3 r-xp 00000000 08:01 13   /libnccl.so.d/other\n"
        "7f4 rw-p 00000000 00:00 0 \n7f5 rw-p 00000000 00:00 0   [heap]\n"
    )
    write(root, {"proc/self/maps": maps})
    asks = [
        "filelock",
        'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        "nvidia-nvshmem-cu12 (==3.4.5)",
    ]
    installed = {"nvidia-nvshmem-cu12": "3.4.6"}

    def version(name: str) -> str:
        if name not in installed:
            raise doctor_probes.metadata.PackageNotFoundError
        return installed[name]

    monkeypatch.setattr(doctor_probes.metadata, "version", version)
    monkeypatch.setattr(doctor_probes.metadata, "requires", lambda _: asks)
    loaded = ["/a b/libnccl.so.2", "/opt/libnccl.so.2.18"]
    found = doctor_probes.library("nvidia-nccl", "libnccl.so")
    assert found == Library(wanted="2.28.9", paths=loaded)
    found = doctor_probes.library("nvidia-nvshmem", "libnvshmem_host.so")
    assert found == Library(version="3.4.6", wanted="3.4.5")
    monkeypatch.setattr(doctor_probes.metadata, "requires", lambda _: None)
    assert doctor_probes.library("nvidia-nccl", "libnccl.so") == Library(paths=loaded)


def test_gpus_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that others keep to themselves has no free memory to tell; peers may differ by way."""

    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")
        return 140, 141

    properties = {"name": "H200", "uuid": UUID(int=7), "major": 9, "minor": 0, "total_memory": 141}
    cuda = {
        "device_count": lambda: 2,
        "get_device_properties": lambda _: SimpleNamespace(**properties),
        "mem_get_info": mem_get_info,
        "can_device_access_peer": lambda a, b: a < b,
    }
    for name, known in cuda.items():
        monkeypatch.setattr(torch.cuda, name, known)
    told = {"name": "H200", "capability": "9.0", "memory_total": 141, "mig": None}
    told["uuid"] = "00000000-0000-0000-0000-000000000007"
    assert doctor_probes.gpus() == [
        {**told, "index": 0, "memory_free": 140},
        {**told, "index": 1, "memory_free": None},
    ]
    assert doctor_probes.peers() == [[True, True], [False, True]]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_host_memory_counts_the_cgroup(root: Path):
    write(
        root,
        {
            "proc/meminfo": "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  800 "
            "kB\nHugePages_Total: 0\n"
        },
    )
    assert doctor_probes.memory() == Space(total=1024000, free=819200)
    group = {
        "memory.max": "500000\n",
        "memory.current": "400000\n",
        "memory.stat": "anon 1\ninactive_file 100000\n",
    }
    write(root / "sys/fs/cgroup", group)
    assert doctor_probes.memory() == Space(total=500000, free=200000)
    write(root / "sys/fs/cgroup", {"memory.max": "max\n"})
    assert doctor_probes.memory()["free"] == 819200


def test_pci_bus_and_shared_memory(root: Path):
    assert doctor_probes.pci() == PciBus(gpus=0)
    assert doctor_probes.shm() == Space(total=0, free=0)
    device = "sys/bus/pci/devices/0000:0"
    write(
        root,
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
    assert doctor_probes.pci() == PciBus(gpus=1, iommu=["DMA-FQ"])


def test_environment_shows_what_matters_only(monkeypatch: pytest.MonkeyPatch):
    shown = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**shown, "HOME": "/x", "SECRET": "s", "NCCL": "s"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor_ask, "ask", answers())
    assert shown.items() <= gather(1)[0]["environment"].items()
    assert not {"HOME", "SECRET", "NCCL"} & gather(1)[0]["environment"].keys()


# Processes that raise, crash and hang


def child(code: str, *words: str, timeout: float = 60) -> tuple[dict[str, Any], dict[str, str]]:
    """What a process that runs ``code`` answers to the questions about the driver."""
    code = (
        f"import json, os, subprocess, sys, time\ndef tell(**told): print(json.dumps(told))\n{code}"
    )
    return ask("nvml", *words, timeout=timeout, program=[sys.executable, "-uc", code])


def test_a_process_is_not_taken_for_a_rank(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKS", "kept")
    starts = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "TORCHELASTIC_")
    names = f"[name for name in os.environ if name.startswith({starts})]"
    assert child(f"tell(name='driver', value={names})")[0] == {"driver": ["RANKS"]}


def gone(pid: int) -> bool:
    """Whether a process is no more (or a zombie that nobody has waited for)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_hanging_process_is_killed_with_its_children():
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "tell(name='driver', value=subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    )
    told, errors = child(code, timeout=2)
    assert errors == dict.fromkeys(("links", "p2p"), "no answer within 2 s")
    deadline = time.monotonic() + 10
    while not gone(told["driver"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(told["driver"])


def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for():
    told, errors = child("tell(name='driver', value=subprocess.Popen(['sleep', '600']).pid)")
    os.kill(told["driver"], 9)
    assert errors["links"].startswith("exit code 0")


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
        "tell(name='driver', value=1); tell(name='links', error='E')\n"
        "print('{}'); print('7'); print('a library talks'); tell(other='that too')\n"
        f"""print('{{"name": '); assert sys.argv[1:] == ['nvml', 'x']; {end}"""
    )
    assert child(code, "x", timeout=timeout) == ({"driver": 1}, {"links": "E", "p2p": why})


def test_an_answer_stands_on_its_own_line_whatever_was_printed():
    """And a question that raises, or whose answer is no JSON, is not the end."""
    code = (
        "import runpy; probes = runpy.run_path(sys.argv[1])\n"
        "def fails(): raise SystemExit('gone')\n"
        "def talks(): print('NCCL INFO', end=''); return 3\n"
        "probes['QUESTIONS']['nvml'] = {'driver': fails, 'links': lambda: {1}, 'p2p': talks}\n"
        "probes['main']('nvml')"
    )
    program = [sys.executable, "-c", f"import sys\n{code}", doctor_probes.__file__]
    told, errors = ask("nvml", timeout=60, program=program)
    assert told == {"p2p": 3}
    assert errors["driver"] == "SystemExit: gone"
    assert errors["links"].startswith("TypeError")


def test_the_probes_need_no_torch_to_begin():
    """So that a torch that hangs when it is imported leaves the host's answers."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, doctor_probes.__file__]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "False"


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
    assert reason(ValueError("two\nlines")) == "ValueError: two lines"
    assert len(reason(ValueError("x" * 9999))) == 500


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules come first in processes of the doctor."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return tmp_path


@pytest.mark.parametrize(
    ("script", "timeout", "why"),
    [
        ("import time; time.sleep(600)", 5, "no answer within 5 s"),
        ("raise RuntimeError('NVML: version mismatch')", 60, "NVML: version mismatch"),
        ("import os; os.kill(os.getpid(), 9)", 60, "signal 9"),
    ],
)
def test_a_driver_that_hangs_or_fails(path: Path, script: str, timeout: float, why: str) -> None:
    write(path, {"pynvml.py": f"{NVML}\ndef nvmlInit():\n    {script}\n"})
    told, errors = ask("nvml", *UUIDS, timeout=timeout)
    assert told == {}
    assert errors.keys() == {"driver", "links", "p2p"}
    assert why in errors["driver"]


def test_no_driver_is_no_fault(path: Path) -> None:
    text = f"{NVML}\ndef nvmlInit():\n    raise NVMLError_LibraryNotFound\n"
    write(path, {"pynvml.py": text})
    assert ask("nvml", *UUIDS, timeout=60) == ({"driver": None, "links": None, "p2p": None}, {})


def test_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are GPUs, it is said what is missing, with the remedy."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for question in (doctor_probes.driver, links, p2p):
        assert question() is None
        with pytest.raises(ModuleNotFoundError, match="nvidia-ml-py is not installed: pip install"):
            question("aa", "bb")


def test_a_made_up_machine_from_end_to_end(path: Path, monkeypatch: pytest.MonkeyPatch):
    """NVML's tables come out in torch's order, and one that fails only leaves a line."""
    build = {"version": "2.11.0", "cuda": "13.0", "hip": None, "backends": ["gloo"], "error": ""}
    seen = {
        "torch": build,
        "nccl": Library(version="2.28.9"),
        "gpus": [gpu(0, uuid="cc"), gpu(1, uuid="bb")],
        "peers": matrix(2, True, True),
    }
    broken = "\ndef nvmlDeviceGetP2PStatus(*_):\n    raise NVMLError('no such option')\n"
    write(path, {"pynvml.py": NVML + broken})
    real = doctor_ask.ask

    def asked(group: str, *words: str, timeout: float) -> Any:
        return (seen, {}) if group == "torch" else real(group, *words, timeout=timeout)

    monkeypatch.setattr(doctor_ask, "ask", asked)
    facts, untold = gather(30)
    assert untold == {"p2p": "NVMLError: no such option"}
    assert facts["links"] == [["X", "PHB"], ["PHB", "X"]]
    assert facts["p2p"] is None
    assert facts["driver"]["cuda"] == "13.0" and len(facts["driver"]["gpus"]) == 3
    assert [g["mig"] for g in facts["gpus"]] == [None, True]
    assert {"mig", "no-nccl"} <= findings(facts).keys()
    assert machine(facts).count == 2
