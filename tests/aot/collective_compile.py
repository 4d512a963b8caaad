"""The kernels that engine collective launches, compiled for sm_90, and what their machine code is
made of, as JSON: ``python tests/run.py collective_compile``.

A program of its own: kernels must not be interpreted here. The engine itself says which kernels
with which constants: it runs on a binder that writes down what is launched and launches nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from nvlink_compile import facts_of_launch, side_by_side
from tokenyard.config import Config
from tokenyard.engines.base import DispatchArguments
from tokenyard.engines.collective_launches import Launches
from tokenyard.formats import quantize, row_of
from tokenyard.handle import Plan, Spec
from tokenyard.rows import Payload, RowFormat
from tokenyard.types import Layout, Quantize

HIDDEN, TOP, EXPERTS, TOKENS, SMS = 7168, 8, 256, 300, 132
PROGRAMS = 4 * SMS
LAUNCHES: dict[str, dict[str, Any]] = {}


def record(ranks: int) -> None:
    """All kinds of launches of rank 0."""
    words: list[str] = []

    def bind(
        kernel: Any, grid: int, num_warps: int, max_registers: int | None, constants: Any
    ) -> Callable[..., None]:
        launch = {
            "kernel": kernel,
            "grid": grid,
            "warps": num_warps,
            "max_registers": max_registers,
            "constants": constants,
        }
        if launch not in LAUNCHES.values():
            LAUNCHES[f"{kernel.__name__} {' '.join(words)}"] = launch
        return lambda *_: None

    config = Config(
        num_experts=EXPERTS,
        hidden=HIDDEN,
        num_topk=TOP,
        max_tokens_per_rank=TOKENS,
        rank=0,
        world_size=ranks,
        timeout=5.0,
    )
    device = torch.device("cpu")
    launches = Launches(
        config, device, bind, PROGRAMS, config.most_local_experts + config.matrix_ranks,
        headers=False,
    )  # fmt: skip
    plain = Payload(torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), None)
    cast = quantize(plain.x, Quantize.FP8)
    fp8 = Payload(cast.data, cast.scales)
    idx, weights = torch.zeros(TOKENS, TOP, dtype=torch.int64), torch.zeros(TOKENS, TOP)
    kinds = [(plain, "bf16", None), (fp8, "fp8", None)]
    kinds += [(plain, mode.name, mode) for mode in Quantize]
    nothing = torch.empty(0, dtype=torch.int64)
    returns = torch.zeros(TOKENS, min(TOP, ranks), dtype=torch.int64)
    slots = torch.zeros(1, min(TOP, EXPERTS // ranks), dtype=torch.int64)
    plan = Plan(nothing, nothing, returns, slots, slots, nothing, nothing)
    for layout in Layout:
        for exact in (True, False):
            for payload, what, mode in kinds:
                words[:] = [layout.name, "exact" if exact else "static", what, f"of {ranks} ranks"]
                spec = Spec(layout=layout, exact=exact)
                given = launches.given(DispatchArguments(payload, idx, weights, spec, mode))
                row = row_of(payload, mode)
                launches.pack_again(
                    payload, row, mode, plan, nothing, torch.empty(0, row.row_bytes)
                )
                recv = torch.empty(1, given.kind.row.row_bytes, dtype=torch.uint8)
                for known in (None, plan):
                    launches.gather(row, recv, known, spec)
    for dtype in (torch.bfloat16, torch.float32):
        for picks in (0, TOP):
            words[:] = [str(dtype), f"{picks} weights", f"of {ranks} ranks"]
            row = RowFormat(HIDDEN, dtype, picks=picks, weighted=picks > 0)
            rows, to = torch.zeros(1, HIDDEN, dtype=dtype), torch.empty(1, row.row_bytes)
            more: dict[str, Any] = {"reduce_weights": None, "weights": None}
            for table in (slots, None) if picks else (slots,):
                launches.sum_here(row, rows, table, to, **more)
            words.append("weighted")
            launches.sum_here(row, rows, slots, to, reduce_weights=None, weights=weights)
            words[-1:] = ["and biases"]
            for bias in ((), (plain.x, plain.x.float())):
                launches.sum_there(row, to, returns, bias, None)


def facts_of(name: str) -> dict[str, Any]:
    """Compile the launch and look at its code."""
    return facts_of_launch(LAUNCHES[name])


if __name__ == "__main__":
    for ranks in (1, 8):
        record(ranks)
    names = [name for name in LAUNCHES if all(word in name for word in sys.argv[1:])]
    json.dump(side_by_side(facts_of, names), sys.stdout)
