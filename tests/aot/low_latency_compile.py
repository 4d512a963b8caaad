"""The kernels that engine low_latency launches, compiled for sm_90, and what their machine code is
made of, as JSON.

A program of its own, like ``nvlink_compile.py``, which looks at the code: kernels must not be
interpreted here. ``all`` compiles every variant, without it :data:`REST` is left out.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import nvlink_compile
from low_latency_mutations import planted
from nvlink_compile import EXPERTS, HIDDEN, RANKS, SMS, TOP, Launch, Recorder, side_by_side
from tokenyard.config import Config
from tokenyard.engines.base import CallOptions, CombineArguments, DispatchArguments
from tokenyard.engines.low_latency import LowLatencyEngine
from tokenyard.engines.low_latency_workspace import low_latency_tuning
from tokenyard.handle import Spec
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.memory.symmetric import Region
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.topology import Topology
from tokenyard.types import Layout, Quantize
from twolevel_compile import facts_of_any

TOKENS, FEW_TOKENS = 128, 32
"""Slots of more programs than fit with 8 warps each, and of fewer."""


GRID = Topology(2, 2)
"""Of ranks that are far."""
FAR = re.compile("refuse|kernel (None|FP8|plain|weighted by the owner, lost)$")
"""Which launches are compiled for those too."""
REST = re.compile(
    r"kernel (MXFP8|FP8_POW2|FP8_UE8M0|options|FP8 by column|FP8 by column, hook receive)$"
    r"|combine_kernel (float16, two biases|weighted|weighted by the owner|hook receive)$"
    r"|few tokens|FP8, (between|once|net)|(combine.*|refuse), between nodes$|refuse, once per node$"
    r"|owner, lost, |(low_combine_kernel plain|refuse), network$|None, once per node, network$"
)
"""Which are not worth their seconds in every run: others are compiled of the same kinds."""


class Small(Recorder):
    """Without the memory."""

    def allocate(self, num_bytes: int) -> Region:
        self.num_bytes = num_bytes
        return Region(torch.empty(16, dtype=torch.uint8), torch.zeros(RANKS, dtype=torch.int64))


def record(
    tokens: int = TOKENS,
    grid: Topology | None = None,
    *,
    network: bool = False,
    once: bool = False,
) -> tuple[dict[str, Launch], int]:
    """All launches of the engine by label, and the bytes of symmetric memory. ``grid``: ranks of
    other nodes are far, and ``network``: reached by NVSHMEM; ``once``: rows cross once per node.
    """
    memory = Small()
    memory.label = "refuse"
    memory.ranks_per_node = GRID.ranks_per_node if network else 0
    config = Config(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOP,
        max_tokens_per_rank=tokens,
        rank=0,
        world_size=RANKS,
        timeout=5.0,
        topology=grid,
    )
    tuning = replace(low_latency_tuning(SMS, RANKS, tokens), once_per_node=once)
    engine = LowLatencyEngine(config, memory, Stats.zeros(0, RANKS), tuning, None)
    x, idx = torch.empty(1, HIDDEN, dtype=torch.bfloat16), torch.zeros(1, TOP, dtype=torch.int64)
    weights, waits = torch.zeros(1, TOP), torch.zeros(RANKS, dtype=torch.int64)
    timed = CallOptions(waits=waits)
    padded = Spec(layout=Layout.EXPERT_PADDED, exact=False)
    major = Spec(layout=Layout.EXPERT_MAJOR, exact=False, expert_alignment=128, capacity=256)

    def run(label: str, call: Any, *args: Any, **options: Any) -> Any:
        memory.label = label
        return call(*args, **options)

    for mode in (None, *Quantize):
        run(
            f"{mode and mode.name}",
            engine.dispatch,
            DispatchArguments(Payload(x, None), idx, weights, major, mode),
        )
    options = CallOptions(waits=waits, loads=torch.zeros(EXPERTS // RANKS, dtype=torch.int64))
    run(
        "options",
        engine.dispatch,
        DispatchArguments(Payload(x, None), idx, weights, major, Quantize.FP8, options=options),
    )
    hook = run(
        "hook send",
        engine.dispatch,
        DispatchArguments(Payload(x, None), idx.int(), None, major, Quantize.FP8, in_two=True),
    )
    _, plan, _ = run("hook receive", hook)
    columns = CallOptions(
        loads=torch.zeros(EXPERTS // RANKS, dtype=torch.int32), scales_by_column=True
    )
    sent = Payload(x, None), idx.int(), None, padded
    for mode in (Quantize.FP8, Quantize.FP8_UE8M0):
        run(
            f"{mode.name} by column",
            engine.dispatch,
            DispatchArguments(*sent, mode, options=columns),
        )
    hook = run(
        "hook send",
        engine.dispatch,
        DispatchArguments(*sent, Quantize.FP8, options=columns, in_two=True),
    )
    run("FP8 by column, hook receive", hook)
    rows, by_rows = x.expand(1, HIDDEN), torch.zeros(1)
    run("plain", engine.combine, CombineArguments(rows, plan, padded))
    run(
        "float16, two biases",
        engine.combine,
        CombineArguments(rows.half(), plan, padded, bias=(x, x.float())),
    )
    run(
        "weighted",
        engine.combine,
        CombineArguments(rows, plan, padded, weights=by_rows, options=timed),
    )
    run(
        "weighted by the owner",
        engine.combine,
        CombineArguments(rows, plan, padded, weights=weights),
    )
    hook = run(
        "hook send",
        engine.combine,
        CombineArguments(rows, plan, padded, weights=weights, in_two=True),
    )
    run("hook receive", hook)
    lost = CallOptions(lost_weights=torch.zeros(1))
    run(
        "weighted by the owner, lost",
        engine.combine,
        CombineArguments(rows, plan, major, weights=weights, options=lost),
    )
    return memory.launches, memory.num_bytes


if __name__ == "__main__":
    launches, num_bytes = record()
    nvlink_compile.LAUNCHES += launches.items()
    few = record(FEW_TOKENS)[0]
    nvlink_compile.LAUNCHES += [
        (f"{name}, few tokens", few[name])
        for name in few
        if name.endswith((" FP8", " send", " weighted"))
    ]
    with mock.patch.dict(os.environ, {PUTS_VARIABLE: "1"}):
        far, far_bytes = record(grid=GRID)
        once = record(grid=GRID, once=True)[0]
    through = record(grid=GRID, network=True)[0]
    both = record(grid=GRID, network=True, once=True)[0]
    kinds = {
        "between nodes": far,
        "once per node": once,
        "network": through,
        "once per node, network": both,
    }
    for kind, found in kinds.items():
        nvlink_compile.LAUNCHES += [
            (f"{name}, {kind}", each) for name, each in found.items() if FAR.search(name)
        ]
    with planted("combine: no barrier before the flag"):
        nvlink_compile.LAUNCHES.append(("planted", record()[0]["low_combine_kernel plain"]))
    if "all" not in sys.argv:
        nvlink_compile.LAUNCHES[:] = [
            each for each in nvlink_compile.LAUNCHES if not REST.search(each[0])
        ]
    numbers = range(len(nvlink_compile.LAUNCHES))
    found = side_by_side(facts_of_any, numbers)
    facts = {name: found[at] for at, (name, _) in enumerate(nvlink_compile.LAUNCHES)}
    json.dump({"bytes": num_bytes, "far bytes": far_bytes, "facts": facts}, sys.stdout)
