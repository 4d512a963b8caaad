"""``tokenyard doctor``: engine, findings and memory on made-up machines."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenyard as ty
from doctor_machines import (
    CPU_BUILD,
    CPU_FACTS,
    GIB,
    GPU_FACTS,
    NCCL,
    NO_GPUS,
    PCIE,
    SILENT,
    Driver,
    HostName,
    Limits,
    PciBus,
    Space,
    Torch,
    engine,
    findings,
    gpu,
    gpu_facts,
    machine,
    matrix,
    need,
)
from tokenyard.cli.doctor_machine import numbers
from tokenyard.cli.doctor_probes import Record
from tokenyard.engines import obstacles
from tokenyard.planner.sizes import nvlink_sizes
from tokenyard.planner.workload import Workload
from tokenyard.testing import routing

OLD = Driver(version="470.57", cuda="11.4", gpus=[gpu(0)])

OLD_GPU = gpu(2, capability="6.1") | {"name": "Tesla P100"}

CUDA_BUILD = Torch(version="2.11.0+cu130", cuda="13.0", backends=["gloo", "nccl"])

# Which engine


@pytest.mark.parametrize(
    ("facts", "ranks", "name", "why"),
    [
        (CPU_FACTS, None, "collective", "torch sees no GPU: ranks over gloo"),
        (CPU_FACTS | {"gpus": None}, None, "collective", "could not tell which GPUs torch sees"),
        (
            GPU_FACTS,
            None,
            "nvlink",
            "4 GPUs that all reach each other, Triton 3.6.0",
        ),
        (GPU_FACTS, 2, "nvlink", "2 GPUs that all reach each other"),
        (GPU_FACTS, 1, "nvlink", "one rank, on a GPU, Triton 3.6.0"),
        (
            gpu_facts(
                peers=matrix(4, False, True), preflight=["ranks 0 and 1"], symmetric_memory="no"
            ),
            1,
            "nvlink",
            "one rank",
        ),
        (GPU_FACTS, 16, "collective", "16 ranks, but 4 GPUs on this host"),
        (gpu_facts(gpus=[gpu(0)], peers=[[True]]), None, "nvlink", "one rank, on a GPU"),
        (
            gpu_facts(gpus=[gpu(0)], peers=[[True]], triton="3.5.1"),
            None,
            "collective",
            "not nvlink: it needs triton 3.6, and this",
        ),
        (
            gpu_facts(peers=matrix(4, True, True, _0_3=False, _1_2=False)),
            None,
            "collective",
            "no peer access between GPUs 0-3, 1-2 (2 of 6 pairs)",
        ),
        (gpu_facts(peers=matrix(4, True, True, _0_3=False)), 3, "nvlink", "3 GPUs"),
        (
            gpu_facts(peers=[[True, True], [False, True]], gpus=[gpu(0), gpu(1)]),
            None,
            "collective",
            "GPUs 0-1 (1 of 1",
        ),
        (gpu_facts(peers=None), None, "collective", "could not tell which GPUs reach each other"),
        (
            gpu_facts(preflight=["ranks 0 and 1 share one GPU"]),
            None,
            "collective",
            "ranks 0 and 1 share one GPU",
        ),
        (gpu_facts(triton=None), None, "collective", "triton 3.6, which is not installed"),
        (
            gpu_facts(gpus=[gpu(0), gpu(1), OLD_GPU]),
            None,
            "collective",
            "not nvlink: it needs compute capability 7.0, and Tesla P100 is older",
        ),
        (gpu_facts(gpus=[gpu(0), gpu(1), OLD_GPU]), 2, "nvlink", "2 GPUs"),
        (gpu_facts(gpus=[OLD_GPU]), 1, "collective", "it needs compute capability 7.0"),
        (gpu_facts(gpus=[gpu(0, capability="10.0")]), 1, "nvlink", "one rank"),
        (
            gpu_facts(triton="3.7.0"),
            None,
            "collective",
            "not nvlink: it needs triton 3.6, and this is triton 3.7.0",
        ),
        (
            gpu_facts(triton="3.60.0"),
            None,
            "collective",
            "it needs triton 3.6, and this is triton 3.60.0",
        ),
        (
            gpu_facts(symmetric_memory="ImportError: no"),
            None,
            "collective",
            "symmetric memory: ImportError: no",
        ),
        (gpu_facts(symmetric_memory=None), None, "collective", "symmetric memory: could not tell"),
        (
            gpu_facts(triton=None, gpus=[gpu(0), OLD_GPU]),
            None,
            "collective",
            "which is not installed: pip install 'tokenyard[cuda]'; it needs compute capability",
        ),
        (
            gpu_facts(torch=Torch(version="2", hip="6.4", backends=["gloo", "nccl"])),
            None,
            "collective",
            "ROCm",
        ),
        (
            gpu_facts(torch=Torch(version="2", cuda="13.0", backends=["gloo"]), triton=None),
            None,
            "collective",
            "over gloo, through host memory, since torch has no NCCL",
        ),
    ],
)
def test_likely_engine(facts: Record, ranks: int | None, name: str, why: str):
    told = engine(facts, ranks)
    assert told["name"] == name
    assert why in told["why"]


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.6.1+git", "3.60.0", "3.7.0"])
def test_the_engine_takes_the_same_tritons(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(obstacles.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(
        obstacles.importlib, "import_module", lambda _: SimpleNamespace(__version__=version)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    taken = not obstacles.obstacle_of(torch.device("cuda", 0))
    assert taken == (engine(gpu_facts(triton=version))["name"] == "nvlink")
    assert taken == ("triton-version" not in findings(gpu_facts(triton=version)))


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (10, 0)])
def test_the_engine_takes_the_same_gpus(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(obstacles.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(
        obstacles.importlib, "import_module", lambda _: SimpleNamespace(__version__="3.6.0")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    obstacle = obstacles.obstacle_of(torch.device("cuda", 0))
    told = engine(gpu_facts(gpus=[gpu(0, capability=".".join(map(str, capability)))]))
    assert (not obstacle) == (told["name"] == "nvlink")
    assert obstacle.partition(",")[0] in told["why"]


def test_everything_that_is_missing_is_named():
    why = engine(gpu_facts(triton=None, peers=matrix(4, False, True)))["why"]
    assert "6 of 6 pairs" in why and "triton 3.6, which is not installed" in why


# What is wrong


@pytest.mark.parametrize("facts", [CPU_FACTS, GPU_FACTS], ids=["cpu", "gpus"])
def test_nothing_is_wrong_with_a_good_machine(facts: Record):
    assert findings(facts) == {}


def test_nothing_is_wrong_where_nothing_could_be_told_but_torch():
    assert findings(SILENT | {"torch": Torch(version="2", backends=["gloo"])}) == {}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"torch": None, "untold": {"torch": "signal 11"}},
            {"torch-silent": ("problem", "signal 11", "mend torch")},
        ),
        (
            {"torch": None, "untold": {"torch": "no answer within 0.1 s"}},
            {"torch-silent": ("problem", "no answer", "on a slow machine wait longer: --timeout")},
        ),
        (
            {"torch": Torch(version="2", cuda="13.0")},
            {
                "no-gloo": ("problem", "without gloo", "install"),
                "no-nccl": ("warning", "built without it", "NCCL"),
            },
        ),
        (
            {"torch": CPU_BUILD, "nccl": None, **NO_GPUS},
            {"cpu-only-torch": ("problem", "CPU-only build", "serves CUDA up to 13.0")},
        ),
        (
            {"driver": OLD, **NO_GPUS},
            {
                "old-driver": (
                    "problem",
                    "needs CUDA 13.0, but the driver serves CUDA up to 11.4",
                    "update the driver",
                )
            },
        ),
        (
            {
                "driver": Driver(version="470"),
                **NO_GPUS,
                "torch": CUDA_BUILD | {"error": "RuntimeError: driver too old"},
            },
            {"old-driver": ("problem", "the driver is older", "for CUDA of its age")},
        ),
        (
            {**NO_GPUS, "environment": {"CUDA_VISIBLE_DEVICES": ""}},
            {"gpus-hidden": ("warning", "CUDA_VISIBLE_DEVICES is ''", "unset")},
        ),
        (
            {**NO_GPUS, "gpus": None, "untold": {"gpus": "no answer within 60 s"}},
            {"gpus-silent": ("problem", "no answer within 60 s", "dmesg")},
        ),
        (
            {**NO_GPUS, "torch": CUDA_BUILD | {"error": "RuntimeError: CUDA error 802"}},
            {"gpus-silent": ("problem", "CUDA error 802", "nvidia-smi")},
        ),
        ({"driver": None, **NO_GPUS}, {"no-driver": ("warning", "not installed", "--gpus all")}),
        (
            {"driver": None, "untold": {"driver": "no answer within 60 s"}},
            {"nvidia-smi-silent": ("warning", "no answer within 60 s", "dmesg")},
        ),
        (
            {"nccl": NCCL | {"version": "2.27.3", "paths": ["/opt/libnccl.so.2"]}},
            {"nccl-mismatch": ("warning", "LD_LIBRARY_PATH", "NCCL 2.28.9 that torch asks for")},
        ),
        (
            {"nccl": NCCL | {"paths": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}},
            {"two-nccls": ("warning", "LD_PRELOAD", "leave one")},
        ),
        ({"triton": None}, {"no-triton": ("warning", "not installed", "tokenyard[cuda]")}),
        (
            {"triton": "3.9.1"},
            {"triton-version": ("warning", "torch brought it", "tokenyard[cuda]")},
        ),
        ({"triton": None, "gpus": [OLD_GPU], "peers": [[True]], "links": [["X"]]}, {}),
        (
            {"torch": None, "untold": {"torch": "no process to ask in: BlockingIOError: busy"}},
            {"torch-silent": ("problem", "no process to ask in: BlockingIOError", "ulimit -u")},
        ),
        (
            {"triton": None, "gpus": [gpu(0)], "peers": [[True]], "links": [["X"]]},
            {"no-triton": ("warning", "not installed", "tokenyard[cuda]")},
        ),
        (
            {
                "symmetric_memory": "ImportError: gone",
                "gpus": [gpu(0)],
                "peers": [[True]],
                "links": [["X"]],
            },
            {},
        ),
        (
            {"symmetric_memory": "ImportError: gone"},
            {"no-symmetric-memory": ("warning", "ImportError: gone", "2.9")},
        ),
        (
            {
                "peers": matrix(4, True, True, _0_3=False, _1_2=False),
                "p2p": matrix(4, "OK", "X", _0_3="TNS", _1_2="OK"),
            },
            {"no-peer-access": ("warning", "TNS: the topology does not", "ACS off")},
        ),
        (
            {"peers": matrix(4, True, True, _0_1=False), **PCIE},
            {
                "no-peer-access": (
                    "warning",
                    "an IOMMU translates between them (DMA-FQ)",
                    "iommu=pt",
                ),
                "uneven-links": ("warning", "wiring", "nvlink -s"),
            },
        ),
        (
            PCIE,
            {
                "iommu": ("warning", "ACS", "NCCL_P2P_DISABLE=1"),
                "uneven-links": ("warning", "down", "topo -m"),
            },
        ),
        ({**PCIE, "pci": PciBus(gpus=4, iommu=["identity"]), "links": matrix(4, "PHB", "X")}, {}),
        (
            {"links": matrix(4, "NV18", "X", _1_3="NV17")},
            {"uneven-links": ("warning", "links that are down", "nvlink -s")},
        ),
        (
            {"gpus": [gpu(i, mig=True) for i in range(4)]},
            {"mig": ("warning", "cannot reach", "-mig 0")},
        ),
        (
            {"gpus": [gpu(i, mig=True) for i in range(4)], "peers": matrix(4, False, True)},
            {
                "mig": ("warning", "cannot reach", "-mig 0"),
                "no-peer-access": ("warning", "MIG is on", "-mig 0"),
            },
        ),
        (
            {"shm": Space(total=64 << 20, free=64 << 20)},
            {"small-shm": ("warning", "64 MB", "--shm-size")},
        ),
        (
            {"shm": Space(total=4 * GIB, free=1 << 20)},
            {"small-shm": ("warning", "NCCL", "--ipc=host")},
        ),
        ({"infiniband": ["mlx5_0"]}, {"memlock": ("warning", "RDMA", "ulimit -l unlimited")}),
        ({"infiniband": ["mlx5_0"], "limits": Limits(memlock=-1, open_files=-1)}, {}),
        (
            {"limits": Limits(memlock=-1, open_files=256)},
            {"open-files": ("warning", "sockets", "ulimit -n")},
        ),
        (
            {"hostname": HostName(name="lost", error="Name or service not known")},
            {"hostname": ("warning", "gloo looks it up", "/etc/hosts")},
        ),
        (
            {"hostname": None, "untold": {"hostname": "no answer within 60 s"}},
            {"hostname": ("warning", "hangs", "GLOO_SOCKET_IFNAME")},
        ),
        (
            {"environment": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}},
            {"nccl-variable": ("warning", "slower", "unset")},
        ),
    ],
)
def test_findings(changes: dict[str, Any], found: dict[str, tuple[str, str, str]]):
    told = findings(gpu_facts(**changes))
    assert told.keys() == found.keys()
    for name, (severity, cause, remedy) in found.items():
        assert told[name]["severity"] == severity
        assert cause in told[name]["cause"]
        assert remedy in told[name]["remedy"]


@pytest.mark.parametrize(
    ("changes", "name", "symptom"),
    [
        (
            {"peers": matrix(4, True, True, _0_3=False, _1_2=False)},
            "no-peer-access",
            "no peer access between GPUs 0-3, 1-2 (2 of 6 pairs)",
        ),
        (
            {"nccl": NCCL | {"paths": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}},
            "two-nccls",
            "2 NCCLs are loaded: /a/libnccl.so.2, /b/libnccl.so.2",
        ),
        (
            {"nccl": NCCL | {"version": "2.27.3", "paths": ["/opt/libnccl.so.2"]}},
            "nccl-mismatch",
            "NCCL 2.27.3 is loaded from /opt/libnccl.so.2, but torch was made for 2.28.9",
        ),
        ({"triton": "3.7.0"}, "triton-version", "Triton 3.7.0: engine nvlink needs 3.6"),
        (
            {"hostname": HostName(name="lost", error="?")},
            "hostname",
            "this host's name lost has no address (?)",
        ),
    ],
)
def test_symptoms_name_what_they_are_about(changes: dict[str, Any], name: str, symptom: str):
    assert findings(gpu_facts(**changes))[name]["symptom"] == symptom


def test_versions_as_numbers():
    assert [numbers(v) for v in ("13.0", "2.11.0+cu130", "3.6.0rc1", "")] == [
        (13, 0),
        (2, 11, 0),
        (3, 6),
        (),
    ]


@pytest.mark.parametrize(("a", "b"), [(0, 3), (3, 0), (1, 2)])
def test_one_way_is_not_enough(a: int, b: int):
    """A GPU that is reached and cannot reach back."""
    peers = matrix(4, True, True)
    peers[a][b] = False
    assert machine(gpu_facts(peers=peers)).unreachable == [(min(a, b), max(a, b))]
    assert engine(gpu_facts(peers=peers))["name"] == "collective"


# Memory


def test_memory_of_nvlink_is_what_the_planner_says():
    work = Workload(nodes=1, gpus_per_node=4, tokens=4096, hidden=7168, experts=256, topk=8)
    large = need(GPU_FACTS)
    for each in (work, replace(work, tokens=64)):
        told = need(GPU_FACTS, tokens=each.tokens)
        buffers = nvlink_sizes(each).symmetric_bytes
        assert told["even"]["buffers"] == told["most"]["buffers"] == buffers
    assert large["free"] == 140 * GIB
    assert large["most"]["rows"] == 4 * 4096


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_memory_is_what_one_rank_really_takes(layout: Any):
    idx, weights = routing("uniform", 0, 1, 50, 3, 6, 0)
    with ty.ExpertParallel(
        num_experts=6, hidden=24, num_topk=3, max_tokens_per_rank=50, device="cpu"
    ) as ep:
        recv = ep.dispatch(
            torch.zeros(50, 24, dtype=torch.bfloat16),
            idx,
            weights,
            layout=ty.Layout[layout.upper()],
        )
        out = ep.combine(recv.x, recv.handle)
        buffers = ep.buffer_bytes
    parts = [recv.x, recv.topk_idx, recv.topk_weights, recv.row_weights, recv.source, out]
    real = sum(part.nbytes for part in parts if part is not None)
    sizes = {"tokens": 50, "hidden": 24, "experts": 6, "topk": 3, "ranks": 1}
    told = need(CPU_FACTS, layout=layout, **sizes)
    assert told["even"]["rows"] == recv.x.shape[0]
    assert (told["even"]["results"], told["even"]["buffers"]) == (real, buffers)
    assert told["even"]["total"] == real + buffers
    assert told["even"] == told["most"]


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_rows_of_even_routing(layout: Any):
    rows = 0
    for rank in range(4):
        # Rank 0 holds experts 0 to 2.
        here = (routing("uniform", rank, 4, 2000, 3, 10, 1)[0] < 3).sum(1)
        rows += int((here > 0).sum() if layout == "flat" else here.sum())
    told = need(CPU_FACTS, tokens=2000, hidden=8, experts=10, topk=3, ranks=4, layout=layout)
    assert told["even"]["rows"] == pytest.approx(rows, rel=0.03)
    assert told["most"]["rows"] == (8000 if layout == "flat" else 24000)


def test_what_does_not_fit():
    poor = gpu_facts(gpus=[gpu(0), gpu(1, memory_free=1 << 20), gpu(2), gpu(3)])
    assert need(poor)["free"] == 1 << 20
    assert findings(poor)["memory"]["severity"] == "warning"
    found = findings(poor, asked=True)["memory"]
    assert found["severity"] == "problem"
    assert found["remedy"] == "take fewer --tokens, or end what else runs here"
    assert need(poor, ranks=1)["free"] == 140 * GIB
    assert need(CPU_FACTS)["free"] == 6 * GIB // 4
    assert findings(CPU_FACTS, asked=True, ranks=1_000_000)["memory"]["remedy"] == (
        "take fewer --tokens or --ranks, or end what else runs here"
    )
    unknown = gpu_facts(gpus=[gpu(0, memory_free=None), gpu(1)], peers=matrix(2, True, True))
    unknown |= {"links": None}
    assert need(unknown)["free"] is None
    assert findings(unknown, asked=True) == {}
