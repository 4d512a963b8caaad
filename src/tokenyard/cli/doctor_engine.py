"""Which engine a machine would get, and what a workload would need there. Pure functions of
:class:`Facts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal, NamedTuple

import torch

from tokenyard.cli.doctor_facts import Facts, gpu_pairs, old_gpus, pairs_text, unreachable
from tokenyard.engines.known import COLLECTIVE, NVLINK
from tokenyard.engines.select import CAPABILITY, TRITON, triton_fits
from tokenyard.rows import RowFormat

NVLINK_BYTES = 129 << 20
"""Symmetric memory that engine ``nvlink`` holds per GPU, whatever the batch: a region of 128 MiB
and its counters.
"""

Layout = Literal["flat", "expert_major"]

DTYPE = torch.bfloat16
INDEX_BYTES, WEIGHT_BYTES, SOURCE_BYTES = 8, 4, 8


class Engine(NamedTuple):
    """An engine's name, and why it would be chosen, in one sentence."""

    name: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One MoE layer: ``tokens`` per rank of ``hidden`` bfloat16 channels, ``topk`` of ``experts``;
    over ``ranks``.
    """

    tokens: int
    hidden: int
    experts: int
    topk: int
    ranks: int
    layout: Layout = "flat"


class Bytes(NamedTuple):
    """What one rank needs: tensors that dispatch and combine return, and buffers of the engine."""

    rows: int
    results: int
    buffers: int

    @property
    def total(self) -> int:
        return self.results + self.buffers


class Need(NamedTuple):
    """Of one rank: ``even`` if every expert is equally popular, ``most`` if every token comes here;
    ``free`` for it (None: unknown), ``where`` it is.
    """

    even: Bytes
    most: Bytes
    free: int | None
    where: Literal["GPU", "host"]


def likely_engine(facts: Facts, ranks: int | None = None) -> Engine:
    """The engine that ``engine="auto"`` comes to on this machine, by default with one rank per GPU.

    ``nvlink`` needs GPUs of compute capability 7.0, Triton 3.6 and, for two ranks or more, GPUs
    that all reach each other's memory and torch's symmetric memory. Everything else is
    ``collective``: over NCCL where each rank has a GPU of its own, over gloo otherwise.
    """
    gpus = facts.gpus or []
    if not gpus:
        seen = "could not tell which GPUs torch sees" if facts.gpus is None else "torch sees no GPU"
        return Engine(COLLECTIVE, f"{seen}: ranks over gloo, through host memory")
    ranks = ranks or len(gpus)
    missing = missing_for_nvlink(facts, ranks)
    if not missing:
        who = "one rank, on a GPU" if ranks == 1 else f"{ranks} GPUs that all reach each other"
        memory = ", symmetric memory" if ranks > 1 else ""
        return Engine(NVLINK, f"{who}, Triton {facts.triton}{memory}")
    wire = "gloo, through host memory, since torch has no NCCL"
    if facts.torch is not None and "nccl" in facts.torch["backends"]:
        wire = "NCCL, one GPU per rank"
    return Engine(COLLECTIVE, f"over {wire}; not nvlink: {'; '.join(missing)}")


def missing_for_nvlink(facts: Facts, ranks: int) -> list[str]:
    """Everything that keeps ``ranks`` ranks on this machine from engine ``nvlink``, as
    ``engines/select.py`` would see it.
    """
    missing = list[str]()
    if NVLINK not in facts.engines:
        missing.append("this version does not have it")
    if facts.torch is not None and facts.torch["hip"]:
        missing.append("torch is built for ROCm")
    if ranks > 1:
        missing += _missing_links(facts, ranks)
    if facts.triton is None:
        missing.append("Triton is not installed")
    elif not triton_fits(facts.triton):
        missing.append(f"it needs Triton {TRITON}, and this is {facts.triton}")
    if old := old_gpus(facts, ranks):
        least = ".".join(map(str, CAPABILITY))
        names = ", ".join(f"{gpu['name']} ({gpu['capability']})" for gpu in old)
        missing.append(f"it needs compute capability {least}, and there is {names}")
    if ranks > 1 and facts.symmetric_memory != "":
        missing.append(f"torch symmetric memory: {facts.symmetric_memory or 'could not tell'}")
    return missing


def _missing_links(facts: Facts, ranks: int) -> list[str]:
    """Why ``ranks`` GPUs of this machine do not all reach each other's memory."""
    gpus, missing = len(facts.gpus or []), list[str]()
    if ranks > gpus:
        missing.append(f"{ranks} ranks, but {gpus} GPUs on this host")
    elif facts.peers is None:
        missing.append("could not tell which GPUs reach each other")
    bad, pairs = unreachable(facts, ranks), gpu_pairs(facts, ranks)
    if bad:
        of = f"{len(bad)} of {len(pairs)} pairs"
        missing.append(f"no peer access between GPUs {pairs_text(bad)} ({of})")
    elif facts.peers is not None:
        missing += facts.preflight or []
    return missing


def need(workload: Workload, engine: str, facts: Facts) -> Need:
    """Bytes that one rank needs while it dispatches and combines, and what is free for it.

    Counts received rows with their routing, the combined result and the engine's buffers; not the
    experts' own tensors. On GPUs free is what the fullest of them has left; on the CPU the host's
    memory is shared among the ranks.
    """
    w, flat = workload, workload.layout == "flat"
    here = -(-w.experts // w.ranks)  # of the rank that holds most
    sent_here = w.ranks * w.tokens
    reached = 1 - comb(w.experts - here, w.topk) / comb(w.experts, w.topk)
    arrivals = (round(sent_here * reached), sent_here)
    blocks = (round(sent_here * w.topk * here / w.experts), sent_here * min(w.topk, here))
    sent = (arrivals[0], w.tokens * min(w.topk, w.ranks))
    row = w.hidden * DTYPE.itemsize
    routing = SOURCE_BYTES + (w.topk * (INDEX_BYTES + WEIGHT_BYTES) if flat else WEIGHT_BYTES)
    wire = RowFormat(w.hidden, DTYPE, picks=w.topk, routed=True, weighted=True).row_bytes
    both: list[Bytes] = []
    for rows, out, back in zip(arrivals if flat else blocks, sent, arrivals, strict=True):
        staged = NVLINK_BYTES if engine == NVLINK else (out + back) * wire
        both.append(Bytes(rows, rows * (row + routing) + w.tokens * row, staged))
    if gpus := (facts.gpus or [])[: w.ranks]:
        left = [gpu["memory_free"] for gpu in gpus]
        return Need(both[0], both[1], None if None in left else min(left), "GPU")
    free = facts.memory["free"] // w.ranks if facts.memory else None
    return Need(both[0], both[1], free, "host")
