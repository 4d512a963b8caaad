"""``tokenyard doctor``: reading what this host and nvidia-smi say, and probes that raise, crash and
hang.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from doctor_machines import (
    findings,
    gpu,
    matrix,
)
from tokenyard.cli import doctor_child, doctor_nvidia, doctor_probes
from tokenyard.cli.doctor_facts import (
    Driver,
    Gpu,
    Library,
    PciBus,
    Space,
)
from tokenyard.cli.doctor_guard import Asker, ask_child, in_time, reason, run, without_launcher
from tokenyard.cli.doctor_nvidia import (
    ask_driver,
    by_uuid,
    driver_cuda,
    driver_version,
    parse_matrix,
    parse_query,
)

# Reading what others say

QUERY = """0, NVIDIA H200, GPU-aa, 143771, 143167, 580.159.04, 9.0, Disabled
1, NVIDIA H200, GPU-BB, 143771, [N/A], 580.159.04, [N/A], Enabled
"""
TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tPIX\t0-63\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tPHB\tSYS\t0-63\t0\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tSYS\t64-127\t1\t\tN/A\n"
    "NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n  NV#  = a bonded set of # "
    "NVLinks\n"
)
P2P = (
    " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tGNS\t\n GPU2\tCNS\tGNS\tX\t\n\n"
    "Legend:\n\n  OK   = Status Ok\n"
)
BANNER = "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0     |"


def test_nvidia_smi_query():
    version, gpus = parse_query(QUERY)
    assert version == "580.159.04"
    assert gpus[0] == Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-aa",
        memory_total=143771 << 20,
        memory_free=143167 << 20,
        capability="9.0",
        mig=False,
    )
    assert (gpus[1].memory_free, gpus[1].capability, gpus[1].mig) == (None, None, True)
    assert parse_query("0, Tesla, GPU-a, 100, 99, 470.5\n")[1][0].mig is None
    assert parse_query("") == (None, [])


def test_nvidia_smi_tables():
    assert parse_matrix(TOPO) == [["X", "NV18", "SYS"], ["NV18", "X", "PHB"], ["SYS", "PHB", "X"]]
    assert parse_matrix(P2P)[2] == ["CNS", "GNS", "X"]
    for text in (
        "",
        "GPU0\tX\n",
        "\tGPU0\tGPU1\nGPU0\tX\tOK\n",
        "\tGPU0\tGPU1\nGPU0\tX\tOK\nGPU1\tOK\n",
    ):
        with pytest.raises(ValueError, match="nvidia-smi topo"):
            parse_matrix(text)


def test_tables_are_in_the_order_of_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor_nvidia, "_smi", lambda words, timeout: TOPO)
    assert doctor_nvidia.ask_matrix(["topo"], [2, 0, 1], 1.0) == [
        ["X", "SYS", "PHB"],
        ["SYS", "X", "NV18"],
        ["PHB", "NV18", "X"],
    ]


def test_driver_versions():
    assert driver_cuda(BANNER) == "13.0"
    assert driver_cuda("| CUDA Version: N/A |") is None
    line = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC "
        "2023\nGCC version: 12\n"
    )
    assert driver_version(line) == "535.104.05"
    open_line = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    )
    assert driver_version(open_line) == "580.159.04"


def test_gpus_are_matched_by_uuid():
    ours = [gpu(0, uuid="bb", memory_free=1), gpu(1, uuid="aa", memory_free=2)]
    theirs = parse_query(QUERY)[1]
    merged, order = by_uuid(ours, theirs)
    assert order == [1, 0]
    assert [(g.index, g.memory_free, g.mig) for g in merged] == [
        (0, 1, True),
        (1, 143167 << 20, False),
    ]
    assert by_uuid([gpu(0, uuid="cc")], theirs) == ([gpu(0, uuid="cc")], None)


def test_loaded_files_and_wanted_packages():
    maps = (
        "7f0 r-xp 00000000 08:01 11   /a b/libnccl.so.2\n7f1 rw-p 00000000 08:01 11   /a "
        "b/libnccl.so.2\n"
        "7f2 r-xp 00000000 08:01 12   /opt/libnccl.so.2.18 (deleted)\n7f3 r-xp 00000000 08:01 13   "
        "/opt/libnccl-net.so\n"
        "7f4 rw-p 00000000 00:00 0 \n7f5 rw-p 00000000 00:00 0   [heap]\n"
    )
    assert doctor_child.mapped_files(maps, "libnccl.so") == [
        "/a b/libnccl.so.2",
        "/opt/libnccl.so.2.18",
    ]
    asks = [
        "filelock",
        'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"',
        "nvidia-nvshmem-cu12 (==3.4.5)",
    ]
    assert doctor_child.wanted_package(asks, "nvidia-nccl") == ("nvidia-nccl-cu13", "2.28.9")
    assert doctor_child.wanted_package(asks, "nvidia-nvshmem") == ("nvidia-nvshmem-cu12", "3.4.5")
    assert doctor_child.wanted_package([], "nvidia-nccl") == (None, None)


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
    assert doctor_probes.host_memory(tmp_path).free == 819200


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
    assert done.code is None
    assert done.why(1.5) == "no answer within 1.5 s"
    deadline = time.monotonic() + 10
    while not gone(int(done.out)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone(int(done.out))


def test_a_child_that_keeps_the_output_open_is_not_waited_for():
    done = run(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"],
        60,
    )
    os.kill(int(done.out), 9)
    assert done.code == 0


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
    assert ask_child([sys.executable, "-c", code], ["a", "b", "c"], ["x"], timeout) == (
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


def fake_smi(folder: Path, script: str) -> None:
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs come first."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


ANSWERS = f"""case "$*" in
  --query-gpu=*compute_cap*) cat <<'END'
{QUERY}END
  ;;
  "topo -m") cat <<'END'
{TOPO}END
  ;;
  "topo -p2p r") echo "no such option" >&2; exit 2;;
  "") echo "{BANNER}";;
esac"""


def test_nvidia_smi_that_hangs_fails_or_is_old(path: Path):
    for script, timeout, why in (
        ("exec sleep 600", 0.3, "no answer within 0.3 s"),
        ("echo NVML: version mismatch; exit 18", 60, "exit code 18: NVML: version mismatch"),
    ):
        fake_smi(path, script)
        with pytest.raises(RuntimeError, match=why):
            ask_driver(timeout, path)
    fake_smi(
        path,
        'case "$*" in *compute_cap*) echo Field x is not a valid field; exit 2;; --q*) '
        "echo 0, K80, GPU-x, 10, 9, 390.1;; *) echo CUDA Version: 9.1;; esac",
    )
    driver = ask_driver(30, path)
    assert driver is not None
    assert (driver.version, driver.cuda, driver.gpus[0].memory_free) == ("390.1", "9.1", 9 << 20)


def test_driver_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_driver(30, tmp_path) is None
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1  "
            "Sat\n"
        },
    )
    assert ask_driver(30, tmp_path) == Driver(version="535.1")


def test_a_made_up_machine_from_end_to_end(path: Path, monkeypatch: pytest.MonkeyPatch):
    """nvidia-smi's tables come out in torch's order, and one that fails only leaves a line."""
    seen = [
        {"index": 0, "name": "NVIDIA H200", "uuid": "cc"},
        {"index": 1, "name": "NVIDIA H200", "uuid": "bb"},
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
        "gpus": seen,
        "peers": matrix(2, True, True),
    }
    fake_smi(
        path, ANSWERS.replace(QUERY, QUERY + "2, NVIDIA H200, GPU-cc, 1, 1, 580, 9.0, Disabled\n")
    )
    asker = Asker(30)
    monkeypatch.setattr(asker, "ask_process", lambda *_: answers)
    facts = doctor_probes.gather(asker, path)
    assert facts.links == [["X", "PHB"], ["PHB", "X"]]
    assert facts.p2p is None
    assert facts.untold["p2p"].endswith("exit code 2: no such option")
    assert "FileNotFoundError" in facts.untold["memory"]
    assert facts.driver is not None and facts.driver.cuda == "13.0" and len(facts.driver.gpus) == 3
    assert facts.gpus is not None and [g.mig for g in facts.gpus] == [False, True]
    assert facts.torch is not None and facts.nccl == Library(version="2.28.9")
    assert {"mig", "no-nccl"} <= findings(facts).keys()
