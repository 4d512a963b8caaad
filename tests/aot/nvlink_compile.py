"""The kernels that engine nvlink launches, compiled for sm_90, and what their machine code is made
of, as JSON.

A program of its own: kernels must not be interpreted here. The engine itself says which kernels
with which constants: it runs on memory that writes down what is launched and launches nothing.
``python nvlink_compile.py all`` compiles every variant (some minutes), without ``all`` those of
:data:`MAIN`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from triton.runtime.cache import triton_key

from code_facts import TOOLS, code_of, disassembled, ptx_facts, sass_facts
from nvlink_mutations import planted
from tokenyard.config import Config
from tokenyard.engines.base import CachedArguments, CombineArguments, DispatchArguments
from tokenyard.engines.failures import FailureReports
from tokenyard.engines.outputs import known_of
from tokenyard.engines.ring_engine import choose_peer
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.formats import quantize
from tokenyard.handle import Spec
from tokenyard.header import COMBINE
from tokenyard.memory.heap import Heap
from tokenyard.memory.kernel_launch import (
    Processor,
    compile_for,
    gpu_target,
    parameters,
    resident_programs,
)
from tokenyard.memory.symmetric import Region
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.testing.region_heap import RegionHeap
from tokenyard.types import Layout, Quantize

RANKS, SMS = 4, 132
HIDDEN, TOP, EXPERTS = 7168, 8, 256
TOKENS = 16  # no code depends on it
HOPPER = Processor(registers=65536, threads=2048, shared_bytes=228 << 10)

MAIN = (
    r"FLAT exact (?!.*(POW2|UE8M0|float32|cached (in (place|a heap) )?(FP|MX)|in \w+( heap)? MX))"
    r"(?!back with|(cached|fresh) in place fp8|cached bf16|fresh (in a heap )?(fp8|FP8)).*@132",
    r"unpack_kernel FLAT exact fresh in a heap fp8 @132",
    r"dispatch_kernel (EXPERT_MAJOR exact fresh bf16|EXPERT_PADDED static fresh FP8) @132",
    r"EXPERT_MAJOR exact back weighted @132",
    r"(plan_kernel int32 ids, no weights|refusal|a rank is gone) @132",
    r"(dispatch|direct|combine)_kernel FLAT exact (fresh|back|fresh in place)( bf16)? @24$",
    r"(dispatch|combine)_kernel FLAT exact (fresh|back)( bf16)? @24 of",
    r"FLAT exact back in place @8",
    r"push_kernel EXPERT_MAJOR pushed back weighted @24",
    r"FLAT exact back in place float32 @132",
)
"""Variants that are worth their seconds in every run."""

_Number = TypeVar("_Number")

Launch = dict[str, Any]
"""label, kernel, grid, warps, max_registers, constants."""


class Recorder:
    """Memory of rank 0 on which nothing runs."""

    rank, world_size, num_sms, device = 0, RANKS, SMS, torch.device("cpu")
    early, shared_gpu, ranks_per_node = True, False, 0

    def __init__(self, ranks: int | None = None) -> None:
        self.world_size, self.label = ranks or self.world_size, ""
        self.launches: dict[str, Launch] = {}
        self._kept: list[Tensor] = []

    def allocate(self, num_bytes: int) -> Region:
        return Region(
            torch.empty(num_bytes, dtype=torch.uint8),
            torch.zeros(self.world_size, dtype=torch.int64),
        )

    def heap(self, num_bytes: int) -> Heap:
        return RegionHeap(self.allocate(num_bytes))

    def host_words(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def tensors(self) -> Any:
        return nullcontext()

    def bind(
        self,
        kernel: Any,
        grid: int,
        *,
        num_warps: int,
        max_registers: int | None = None,
        **constants: Any,
    ) -> Callable[..., None]:
        launch = {
            "kernel": kernel,
            "grid": grid,
            "warps": num_warps,
            "max_registers": max_registers,
            "constants": constants,
        }
        if launch not in self.launches.values():  # several kinds of calls can share one
            self.launches[f"{kernel.__name__} {self.label}"] = launch
        names = parameters(kernel).args

        def launched(*args: int) -> None:
            given = dict(zip(names, args, strict=True))
            if given.get("nonce"):  # the plan tells the host that nobody sends anything
                ctypes.c_int64.from_address(given["header_out"]).value = given["nonce"]

        return launched

    def gate(self) -> None: ...

    def settle(self) -> None: ...

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        return ready()

    def close(self) -> None: ...


def record(num_sms: int, *, few: bool = False, ranks: int = RANKS) -> dict[str, Launch]:
    """All kinds of launches with ``num_sms`` multiprocessors; ``few``: the main ones."""
    memory = Recorder(ranks)
    config = Config(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOP,
        max_tokens_per_rank=TOKENS,
        rank=0,
        world_size=ranks,
        timeout=5.0,
    )
    chosen = choose_peer(config, num_sms, DEFAULT_BUFFER_BYTES, all_sms=num_sms == SMS, nodes=False)
    config, tuning, make = chosen.config, chosen.tuning, chosen.engine
    failures = FailureReports(dist.HashStore(), 0, 1.0)
    given = config, memory, Stats.zeros(0, ranks), tuning, DEFAULT_BUFFER_BYTES, failures
    engine = make(*given)
    plain = Payload(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), None)
    cast = quantize(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), Quantize.FP8)
    fp8 = Payload(cast.data, cast.scales)
    idx, weights = torch.zeros(TOKENS, TOP, dtype=torch.int64), torch.zeros(TOKENS, TOP)
    modes = () if few else tuple(Quantize)

    def label(*words: object) -> None:
        memory.label = " ".join(str(word) for word in words)

    for layout in Layout:
        for exact in (True,) if few else (True, False):
            spec = Spec(
                layout=layout,
                exact=exact,
                expert_alignment=128 if layout is Layout.EXPERT_MAJOR and not few else 1,
            )
            name = f"{layout.name} {'exact' if exact else 'static'}"
            for payload, what, mode in (
                (plain, "bf16", None),
                (fp8, "fp8", None),
                *((plain, mode.name, mode) for mode in modes),
            ):
                label(name, "fresh", what)
                _, plan, _ = engine.dispatch(DispatchArguments(payload, idx, weights, spec, mode))
                label(name, "cached", what)
                engine.redispatch(CachedArguments(payload, plan, spec, mode=mode))
                if layout is Layout.FLAT and exact:
                    label(name, "fresh in place", what)
                    _, plan, _ = engine.dispatch(
                        DispatchArguments(payload, idx, weights, spec, mode, in_place=True)
                    )
                    label(name, "cached in place", what)
                    engine.redispatch(
                        CachedArguments(payload, plan, spec, mode=mode, in_place=True)
                    )
            rows = torch.empty(1, HIDDEN, dtype=torch.bfloat16)
            label(name, "back")
            engine.combine(CombineArguments(rows, plan, spec))
            in_place = layout is Layout.FLAT and exact
            if in_place:
                label(name, "back in place")
                engine.combine(CombineArguments(rows, plan, spec, in_place=True))
            if few:
                continue
            if in_place:
                label(name, "back in place float32")
                engine.combine(CombineArguments(rows.float(), plan, spec, in_place=True))
                label(name, "back in place with two biases")
                engine.combine(
                    CombineArguments(
                        rows, plan, spec, in_place=True, bias=(plain.x, plain.x.float())
                    )
                )
            label(name, "back float32")
            engine.combine(CombineArguments(rows.float(), plan, spec))
            label(name, "back with two biases")
            engine.combine(CombineArguments(rows, plan, spec, bias=(plain.x, plain.x.float())))
            if layout is Layout.FLAT:
                label(name, "back reducing weights")
                engine.combine(
                    CombineArguments(rows, plan, spec, reduce_weights=torch.empty(1, TOP))
                )
            else:
                label(name, "back weighted")
                engine.combine(CombineArguments(rows, plan, spec, weights=torch.empty(1)))
    heaped = make(*given, heap_bytes=8 << 20)
    heaped._heap.least = 0
    spec = Spec(layout=Layout.FLAT, exact=True)
    for payload, mode in ((plain, None), (fp8, None), *((plain, mode) for mode in modes)):
        what = mode.name if mode else "fp8" if payload.scales is not None else "bf16"
        label("FLAT exact fresh in a heap", what)
        for _ in range(2):  # the first one makes the heap
            _, plan, _ = heaped.dispatch(DispatchArguments(payload, idx, weights, spec, mode))
        label("FLAT exact cached in a heap", what)
        fresh = next(iter(heaped._signatures.values()))
        heaped._heap.note(known_of(plan).counts, fresh, in_heap=True)
        heaped.redispatch(CachedArguments(payload, plan, spec, mode=mode))
    pushing = make(*given, 1 << 20)
    for layout in (Layout.EXPERT_MAJOR,) if few else Layout:
        spec = Spec(layout=layout, exact=True)
        _, plan, _ = pushing.dispatch(DispatchArguments(plain, idx, weights, spec, None))
        label(layout.name, "pushed back")
        pushing.combine(CombineArguments(rows, plan, spec))
        if layout is Layout.FLAT:
            label(layout.name, "pushed back reducing weights")
            pushing.combine(CombineArguments(rows, plan, spec, reduce_weights=torch.empty(1, TOP)))
        else:
            label(layout.name, "pushed back weighted")
            pushing.combine(CombineArguments(rows, plan, spec, weights=torch.empty(1)))
    if not few:
        label("int32 ids, no weights")
        engine.dispatch(
            DispatchArguments(plain, idx.int(), None, Spec(layout=Layout.FLAT, exact=True), None)
        )
        label("refusal")
        engine.refuse(COMBINE, True, "")
        label("a rank is gone")
        left = replace(config, absent=(1,))
        make(left, memory, engine.stats, tuning, DEFAULT_BUFFER_BYTES, failures)
    return memory.launches


def variants(everything: bool) -> Iterator[tuple[str, Launch]]:
    """Launches with 132, 24 and 8 multiprocessors, of two ranks with 24, whose channels share
    programs; and sums with a bug, to see that it shows."""
    for num_sms, ranks in ((SMS, RANKS), (24, RANKS), (8, RANKS), (24, 2)):
        for name, launch in record(num_sms, few=num_sms != SMS, ranks=ranks).items():
            label = f"{name} @{num_sms}" + f" of {ranks} ranks" * (ranks != RANKS)
            if everything or any(re.search(pattern, label) for pattern in MAIN):
                yield label, launch
    with planted("no barrier before a release"):
        yield "planted", record(8, few=True)["push_kernel FLAT exact back in place"]


def facts_of(number: int) -> dict[str, Any]:
    """Compile the launch of this number and look at its code."""
    return facts_of_launch(LAUNCHES[number][1])


def facts_of_launch(launch: Launch) -> dict[str, Any]:
    """Compile a launch and look at its code; the machine code comes with it, to be looked at
    together with that of others.
    """
    compiled = compile_for(
        launch["kernel"],
        launch["constants"],
        launch["warps"],
        gpu_target(90),
        launch["max_registers"],
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = int(re.search(r"REG:(\d+)", usage.stdout + usage.stderr)[1])
    fit = resident_programs(HOPPER, launch["warps"], registers, compiled.metadata.shared)
    sizes = {"registers": registers, "shared": compiled.metadata.shared, "fit": fit}
    return (
        sizes
        | {"grid": launch["grid"], "most": fit * SMS, "code": code_of(compiled.asm["cubin"])}
        | ptx_facts(compiled.asm["ptx"])
    )


def side_by_side(facts: Callable[[_Number], Any], numbers: Sequence[_Number]) -> dict[_Number, Any]:
    """The facts of each, by forks of this process, with what their "code" is made of."""
    triton_key()  # a hash of all of Triton, which each of them would make
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=get_context("fork")) as pool:
        found = dict(zip(numbers, pool.map(facts, numbers), strict=True))
    assembled = [each for each in found.values() if "code" in each]
    texts = disassembled([each.pop("code") for each in assembled])
    for each, sass in zip(assembled, texts, strict=True):
        each |= sass_facts(sass)
    return found


LAUNCHES: list[tuple[str, Launch]] = []

if __name__ == "__main__":
    LAUNCHES += variants("all" in sys.argv)
    # the largest take longest
    order = sorted(
        range(len(LAUNCHES)),
        key=lambda at: "combine" not in LAUNCHES[at][0] and "plan" not in LAUNCHES[at][0],
    )
    found = side_by_side(facts_of, order)
    json.dump({name: found[at] for at, (name, _) in enumerate(LAUNCHES)}, sys.stdout)
