"""What facts mean: which engine this machine would get, and what a workload would need there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, takewhile
from math import comb
from typing import Any

import torch

from tokenyard.cli.doctor_probes import Record
from tokenyard.engines.known import COLLECTIVE, NVLINK
from tokenyard.engines.obstacles import obstacles
from tokenyard.planner.sizes import nvlink_sizes
from tokenyard.planner.traffic import popularity, reach
from tokenyard.planner.workload import Workload
from tokenyard.rows import RowFormat

Pairs = list[tuple[int, int]]

DTYPE = torch.bfloat16
INDEX_BYTES, WEIGHT_BYTES, SOURCE_BYTES = 8, 4, 8


@dataclass
class Machine:
    """What was found out, and what follows from it. Facts are attributes too.

    Attributes:
        facts: ``docs/how-to/doctor.md`` lists them. None: could not tell, or not there.
        untold: why something could not be told, by its name.
        workload: one MoE layer. asked: whether somebody gave a size of it.
    """

    facts: dict[str, Any]
    untold: dict[str, str]
    workload: dict[str, Any]
    asked: bool = False
    self_tests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def __getattr__(self, name: str) -> Any:
        return self.facts[name]

    @cached_property
    def count(self) -> int:
        """GPUs that torch sees."""
        return len(self.gpus or ())

    @cached_property
    def devices(self) -> list[Record]:
        """GPUs that torch sees, and those that the driver does."""
        return [*(self.gpus or ()), *(self.driver["gpus"] if self.driver else ())]

    @cached_property
    def pairs(self) -> Pairs:
        return list(combinations(range(self.count), 2))

    @cached_property
    def unreachable(self) -> Pairs:
        """The pairs of which one GPU cannot address the other's memory; none if nobody told."""
        known = self.pairs if self.peers else []
        return [(a, b) for a, b in known if not (self.peers[a][b] and self.peers[b][a])]

    @cached_property
    def nvlinks(self) -> dict[tuple[int, int], int]:
        """NVLinks of each pair, 0 if its path is PCIe; empty if nobody told."""
        links = {(a, b): self.links[a][b] for a, b in self.pairs} if self.links else {}
        return {pair: int(word[2:]) if word[2:].isdecimal() else 0 for pair, word in links.items()}

    def apart(self, ranks: int) -> str:
        """Which of the first ``ranks`` GPUs do not reach each other's memory, if any."""
        bad = [pair for pair in self.unreachable if pair[1] < ranks]
        of = f"{pairs_text(bad)} ({len(bad)} of {comb(ranks, 2)} pairs)"
        return f"no peer access between GPUs {of}" if bad else ""

    def obstacles(self, ranks: int) -> list[str]:
        """Everything that keeps ``ranks`` ranks, a GPU each, from engine ``nvlink``."""
        found = ["torch is built for ROCm"] if self.torch and self.torch["hip"] else []
        if ranks > self.count:
            found.append(f"{ranks} ranks, but {self.count} GPUs on this host")
        elif ranks > 1 and self.peers is None:
            found.append("could not tell which GPUs reach each other")
        elif ranks > 1:
            apart = self.apart(ranks)
            found += [apart] if apart else self.preflight or []
        for gpu in self.gpus[:ranks]:
            found += obstacles(self.triton, gpu["name"], numbers(gpu["capability"]))
        if ranks > 1 and self.symmetric_memory != "":
            found.append(f"torch symmetric memory: {self.symmetric_memory or 'could not tell'}")
        return list(dict.fromkeys(found))

    def engine(self, ranks: int) -> dict[str, str]:
        """The engine that ``engine="auto"`` comes to with ``ranks`` ranks, and why."""
        if not self.gpus:
            unknown = "could not tell which GPUs torch sees"
            seen = unknown if self.gpus is None else "torch sees no GPU"
            return {"name": COLLECTIVE, "why": f"{seen}: ranks over gloo, through host memory"}
        missing = "; ".join(self.obstacles(ranks))
        if not missing:
            who = "one rank, on a GPU" if ranks == 1 else f"{ranks} GPUs that all reach each other"
            return {"name": NVLINK, "why": f"{who}, Triton {self.triton}"}
        wire = "gloo, through host memory, since torch has no NCCL"
        if self.torch and "nccl" in self.torch["backends"]:
            wire = "NCCL, one GPU per rank"
        return {"name": COLLECTIVE, "why": f"over {wire}; not nvlink: {missing}"}

    @cached_property
    def need(self) -> dict[str, Any]:
        """Bytes that one rank needs for results and buffers: ``even`` if every expert is equally
        popular, ``most`` if every token comes here; ``free`` for it (None: unknown), and ``where``:
        what the fullest GPU has left, else a share of the host's memory."""
        sizes = {name: self.workload[name] for name in ("tokens", "hidden", "experts", "topk")}
        work = Workload(nodes=1, gpus_per_node=self.workload["ranks"], **sizes)
        tokens, topk, ranks, row = work.tokens, work.topk, work.ranks, work.back_bytes
        nvlink, flat = self.engine(ranks)["name"] == NVLINK, self.workload["layout"] == "flat"
        here, everything = -(-work.experts // ranks), ranks * tokens  # experts: of who has most
        routing = SOURCE_BYTES + (topk * (INDEX_BYTES + WEIGHT_BYTES) if flat else WEIGHT_BYTES)
        wire = RowFormat(work.hidden, DTYPE, picks=topk, routed=True, weighted=True).row_bytes

        def one(came: int, sent: int, picks: int) -> dict[str, int]:
            rows = came if flat else picks
            results = rows * (row + routing) + tokens * row
            buffers = nvlink_sizes(work).symmetric_bytes if nvlink else (sent + came) * wire
            total = results + buffers
            return {"rows": rows, "results": results, "buffers": buffers, "total": total}

        chances = popularity("uniform", work.experts)
        came = round(everything * reach(chances, [0, here, work.experts], topk)[0])
        picks = round(everything * topk * here / work.experts)
        free = self.memory["free"] // ranks if self.memory else None
        if self.gpus:
            left = [gpu["memory_free"] for gpu in self.gpus[:ranks]]
            free = None if None in left else min(left)
        return {
            "workload": self.workload,
            "even": one(came, came, picks),
            "most": one(everything, tokens * min(topk, ranks), everything * min(topk, here)),
            "free": free,
            "where": "GPU" if self.gpus else "host",
        }


def numbers(version: str) -> tuple[int, ...]:
    """``"12.8"`` to ``(12, 8)``, up to the first part that is no number."""
    return tuple(map(int, takewhile(str.isdecimal, version.split("+")[0].split("."))))


def pairs_text(pairs: Pairs) -> str:
    """``0-1, 0-3``."""
    return ", ".join(f"{a}-{b}" for a, b in pairs)
