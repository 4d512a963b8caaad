"""Made-up machines for the tests of ``tokenyard doctor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenyard.cli import doctor_findings
from tokenyard.cli.doctor_machine import Machine
from tokenyard.cli.doctor_probes import QUESTIONS, Record


def record(**defaults: Any) -> Callable[..., Record]:
    """Makes records of one kind."""
    return lambda **known: defaults | known


Driver = record(version=None, cuda=None, gpus=[])
Gpu = record(uuid=None, capability=None, memory_total=None, memory_free=None, mig=None)
HostName = record(error="")
Library = record(version=None, wanted=None, paths=[])
Limits = record()
PciBus = record(iommu=[])
Space = record()
Torch = record(cuda=None, hip=None, backends=[], error="")

GIB = 1 << 30
LAYER = {"tokens": 4096, "hidden": 7168, "experts": 256, "topk": 8, "ranks": 4, "layout": "flat"}
SILENT: Record = dict.fromkeys(
    name for group in ("host", "torch", "nvml") for name in QUESTIONS[group]
)
SILENT |= {"python": "3.12.3", "engines": ["auto"], "environment": {}}
CPU_FACTS = SILENT | {
    "engines": ["auto", "collective", "nvlink"],
    "cpus": 2,
    "memory": Space(total=8 * GIB, free=6 * GIB),
    "shm": Space(total=4 * GIB, free=4 * GIB),
    "limits": Limits(memlock=8 << 20, open_files=20000),
    "hostname": HostName(name="here"),
    "infiniband": [],
    "pci": PciBus(gpus=0),
    "torch": Torch(version="2.11.0+cpu", backends=["gloo"]),
    "triton": "3.6.0",
    "symmetric_memory": "",
    "gpus": [],
    "peers": [],
    "preflight": [],
}


def matrix(count: int, value: Any, own: Any, **others: Any) -> list[list[Any]]:
    """``value`` everywhere, ``own`` on the diagonal, ``others`` (``_0_3="SYS"``) at their place and
    its mirror.
    """
    rows = [[own if a == b else value for b in range(count)] for a in range(count)]
    for place, other in others.items():
        a, b = map(int, place.strip("_").split("_"))
        rows[a][b] = rows[b][a] = other
    return rows


def gpu(index: int, **changes: Any) -> Record:
    known = {
        "uuid": f"0{index}",
        "capability": "9.0",
        "memory_total": 141 * GIB,
        "memory_free": 140 * GIB,
        "mig": False,
    }
    return Gpu(index=index, name="NVIDIA H200", **(known | changes))


NCCL = Library(version="2.28.9", wanted="2.28.9", paths=["/site/nccl/lib/libnccl.so.2"])
GPU_FACTS = CPU_FACTS | {
    "pci": PciBus(gpus=4),
    "driver": Driver(version="580.159.04", cuda="13.0", gpus=[gpu(i) for i in range(4)]),
    "torch": Torch(version="2.11.0+cu130", cuda="13.0", backends=["gloo", "nccl"]),
    "nccl": NCCL,
    "gpus": [gpu(i) for i in range(4)],
    "peers": matrix(4, True, True),
    "links": matrix(4, "NV18", "X"),
    "p2p": matrix(4, "OK", "X"),
}


def gpu_facts(**changes: Any) -> Record:
    return GPU_FACTS | changes


def machine(facts: Record, asked: bool = False, **layer: Any) -> Machine:
    """With these facts, of which ``untold`` are the reasons, and a layer like ``LAYER``."""
    known = dict(facts)
    return Machine(known, known.pop("untold", {}), LAYER | layer, asked)


def engine(facts: Record, ranks: int | None = None) -> dict[str, str]:
    """The likely engine, by default with one rank per GPU."""
    return machine(facts).engine(ranks or len(facts["gpus"] or []))


def need(facts: Record, **layer: Any) -> dict[str, Any]:
    return machine(facts, **layer).need


NO_GPUS: dict[str, Any] = {"gpus": [], "peers": [], "links": None, "p2p": None}
PCIE: dict[str, Any] = {
    "links": matrix(4, "NV18", "X", _0_1="PHB"),
    "pci": PciBus(gpus=4, iommu=["DMA-FQ"]),
}
CPU_BUILD = Torch(version="2.11.0+cpu", backends=["gloo"])


def findings(facts: Record, *tests: Record, asked: bool = False, **layer: Any) -> dict[str, Record]:
    """By their ids."""
    made = machine(facts, asked, **layer)
    made.self_tests += tests
    found = doctor_findings.findings(made)
    assert not [name for name in made.untold if name.startswith("rule")], made.untold
    return {finding["id"]: finding for finding in found}
