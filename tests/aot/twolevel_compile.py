"""Compiles the kernels of the two-level engine for sm_90 and tells what is in their code
(``code_facts.py``).

2 nodes of 2 GPUs; with peer pointers down to machine code, with NVSHMEM's calls down to PTX (its
library is not at hand): those of :data:`DEEP`, all with ``all``, others down to Triton's first
intermediate language, in which a fence stands before a put or not. JSON on the standard output.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import torch.distributed as dist

import nvlink_compile
from nvlink_compile import (
    EXPERTS,
    HIDDEN,
    SMS,
    TOKENS,
    TOP,
    Launch,
    Recorder,
    facts_of,
    side_by_side,
)
from tokenyard.config import Config
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.failures import FailureReports
from tokenyard.engines.ring_engine import TwolevelEngine
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.engines.tuning import peer_tuning
from tokenyard.formats import quantize
from tokenyard.handle import Spec
from tokenyard.header import COMBINE
from tokenyard.memory.symmetric import Region
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.topology import Topology
from tokenyard.types import Layout, Quantize

GRID = Topology(2, 2)
REST = re.compile(
    r"(direct|dispatch)_kernel FLAT (cached|fp8|cast)|dispatch_kernel EXPERT_MAJOR bf16"
    r"|FLAT reducing weights|plan_kernel EXPERT_MAJOR|unpack_kernel .* network|dispatch_.* mapped"
)
"""Which are not worth their seconds in every run: others are compiled of the same kinds. A dispatch
of rows by expert, which forwards them one by one, is compiled with a cast."""

DEEP = ("two_call_barrier_kernel", "two_direct_kernel", "low_refuse_kernel")
"""Kernels whose PTX with NVSHMEM's calls is worth its seconds in every run; without these calls all
are compiled anyway."""


class Mapping(Recorder):
    """Maps the memory of all ranks."""

    def allocate(self, num_bytes: int) -> Region:
        return Region(
            torch.empty(num_bytes, dtype=torch.uint8),
            torch.ones(self.world_size, dtype=torch.int64),
        )


def record(num_sms: int, network: bool, mapped: bool = False) -> dict[str, Launch]:
    """The launches worth their seconds. ``mapped``: the network is for node headers and
    announcements only.
    """
    memory: Any = Mapping() if mapped else Recorder()
    memory.ranks_per_node = GRID.ranks_per_node if network else 0
    config = Config(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOP,
        max_tokens_per_rank=TOKENS,
        rank=0,
        world_size=4,
        timeout=5.0,
        topology=GRID,
    )
    tuning = peer_tuning(num_sms, GRID, all_sms=num_sms == SMS)
    engine = TwolevelEngine(
        config,
        memory,
        Stats.zeros(0, 4),
        tuning,
        DEFAULT_BUFFER_BYTES,
        FailureReports(dist.HashStore(), 0, 1.0),
    )
    plain = Payload(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), None)
    cast = quantize(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), Quantize.FP8)
    idx, weights = torch.zeros(TOKENS, TOP, dtype=torch.int64), torch.zeros(TOKENS, TOP)
    for layout in (Layout.FLAT,) if network else (Layout.FLAT, Layout.EXPERT_MAJOR):
        spec, rows = Spec(layout=layout, exact=True), torch.empty(1, HIDDEN, dtype=torch.bfloat16)
        memory.label = f"{layout.name} bf16"
        _, plan, _ = engine.dispatch(DispatchArguments(plain, idx, weights, spec, None))
        engine.combine(CombineArguments(rows, plan, spec))
        if layout is Layout.EXPERT_MAJOR:
            memory.label = "EXPERT_MAJOR cast"
            engine.dispatch(DispatchArguments(plain, idx, weights, spec, Quantize.FP8))
        if layout is Layout.FLAT:
            engine.dispatch(DispatchArguments(plain, idx, weights, spec, None, in_place=True))
            engine.combine(CombineArguments(rows, plan, spec, in_place=True))
        if layout is Layout.FLAT and not network:
            memory.label = "FLAT cached bf16"
            engine.redispatch(CachedArguments(plain, plan, spec))
            engine.redispatch(CachedArguments(plain, plan, spec, in_place=True))
            memory.label = "FLAT fp8"
            engine.dispatch(
                DispatchArguments(Payload(cast.data, cast.scales), idx, weights, spec, None)
            )
            engine.dispatch(
                DispatchArguments(
                    Payload(cast.data, cast.scales), idx, weights, spec, None, in_place=True
                )
            )
            for mode in (Quantize.FP8, Quantize.MXFP8):  # as long as they differ in code
                memory.label = f"FLAT cast {mode.name}".removesuffix(" FP8")
                engine.dispatch(DispatchArguments(plain, idx, weights, spec, mode))
                engine.dispatch(DispatchArguments(plain, idx, weights, spec, mode, in_place=True))
            memory.label = "FLAT reducing weights"
            engine.combine(CombineArguments(rows, plan, spec, reduce_weights=torch.empty(1, TOP)))
    memory.label = ""
    engine.refuse(COMBINE, True, "")
    return memory.launches


class Wide(Recorder):
    """Of more ranks, without the memory."""

    world_size = 16

    def allocate(self, num_bytes: int) -> Region:
        return Region(
            torch.empty(16, dtype=torch.uint8), torch.zeros(self.world_size, dtype=torch.int64)
        )


def narrow_rows() -> Launch:
    """A cached dispatch of short rows on 2 nodes of 8 GPUs: Triton 3.6 crashed on its tiles."""
    memory: Any = Wide()
    memory.ranks_per_node, memory.label = 0, "narrow"
    grid = Topology(2, 8)
    config = Config(
        num_experts=32,
        hidden=256,
        num_topk=3,
        max_tokens_per_rank=40,
        rank=0,
        world_size=16,
        timeout=5.0,
        topology=grid,
    )
    tuning = peer_tuning(8, grid, all_sms=True)
    engine = TwolevelEngine(
        config,
        memory,
        Stats.zeros(0, 16),
        tuning,
        DEFAULT_BUFFER_BYTES,
        FailureReports(dist.HashStore(), 0, 1.0),
    )
    plain, spec = (
        Payload(torch.empty(40, 256, dtype=torch.bfloat16), None),
        Spec(layout=Layout.FLAT, exact=True),
    )
    _, plan, _ = engine.dispatch(
        DispatchArguments(plain, torch.zeros(40, 3, dtype=torch.int64), None, spec, None)
    )
    memory.label = "cached"
    engine.redispatch(CachedArguments(plain, plan, spec))
    return memory.launches["two_dispatch_kernel cached"]


def network_facts(launch: Launch, last: str) -> dict[str, Any]:
    """Calls of NVSHMEM in the code that stage ``last`` makes."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    from tokenyard.memory.kernel_launch import signature_of, wrapped

    kernel = launch["kernel"]
    constants = {name: wrapped(value) for name, value in launch["constants"].items()}
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": launch["warps"], "enable_fp_fusion": False})
    source = ASTSource(fn=kernel, signature=signature_of(kernel), constexprs=constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    metadata: dict[str, Any] = {"hash": "", "target": target, **options.__dict__}
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name == last:
            break
    return {
        "puts": len(re.findall(r'\bnvshmemx_putmem_signal_block[",]', str(module))),
        "fences": len(re.findall(r'\bnvshmem_fence[",]', str(module))),
    }


def facts_of_any(number: int) -> dict[str, Any]:
    """Of the launch of this number."""
    name, launch = nvlink_compile.LAUNCHES[number]
    if not name.endswith("network"):
        return facts_of(number)
    return network_facts(launch, "ptx" if "all" in sys.argv or name.startswith(DEEP) else "ttir")


if __name__ == "__main__":
    for num_sms in (SMS, 24) if "all" in sys.argv else (SMS,):
        every = record(num_sms, network=False).items()
        nvlink_compile.LAUNCHES += [
            (f"{name} @{num_sms}", each)
            for name, each in every
            if num_sms == SMS or ("bf16" in name and "MAJOR" not in name)
        ]
    nvlink_compile.LAUNCHES.append(("narrow rows, 2 x 8", narrow_rows()))
    nvlink_compile.LAUNCHES += [
        (f"{name} network", each) for name, each in record(SMS, network=True).items()
    ]
    nvlink_compile.LAUNCHES += [
        (f"{name} mapped network", each)
        for name, each in record(SMS, True, True).items()
        if name.startswith("two_d")
    ]
    if "all" not in sys.argv:
        nvlink_compile.LAUNCHES[:] = [
            each for each in nvlink_compile.LAUNCHES if not REST.search(each[0])
        ]
    facts = side_by_side(facts_of_any, range(len(nvlink_compile.LAUNCHES)))
    json.dump({name: facts[at] for at, (name, _) in enumerate(nvlink_compile.LAUNCHES)}, sys.stdout)
