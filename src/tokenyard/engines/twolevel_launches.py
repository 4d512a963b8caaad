"""Kernels of the two-level engine with their constants."""

from __future__ import annotations

from typing import Any

import torch

from tokenyard.engines.kinds import Binders, Launch
from tokenyard.engines.rings import Form
from tokenyard.engines.twolevel_ground import TwoGround
from tokenyard.kernels.combine import tiles_of, types_of
from tokenyard.kernels.plan import bind_plan
from tokenyard.kernels.two_combine import two_combine_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.kernels.two_letters import two_greet_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_pull import two_pull_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.types import kernel_type
from tokenyard.layout import power_of_two_at_least


def _bind_two_direct(ground: TwoGround, *args: Any) -> Launch:
    """As ``bind_direct``: launches take the same arguments, the kernel one more."""
    launch = bind_two_direct(ground, *args)
    return lambda *given: launch(*given, ground.config.num_experts)


def bind_two_combine(
    ground: TwoGround,
    form: Form,
    dtype: torch.dtype,
    width: int,
    picks: int,
    bias: tuple[torch.dtype, ...],
    *,
    by_expert: bool,
    weighted: bool,
) -> Launch:
    """As ``bind_combine``."""
    send, reduce = ground.tuning.send, ground.tuning.reduce
    net = ground.net_ring(form)
    chunk = send.chunk_of(ground.slots(form))
    most = min(chunk, net.most_rows)
    sent, sent_block, rows, block = tiles_of(
        form.hidden, send, reduce, chunk, most, placed=by_expert
    )
    stages = 1
    if not by_expert:
        token = _token_bytes(ground, dtype, bias)
        rows, stages = reduce.staged(rows, block * token, ground.shared_bytes)
    bias0, bias1 = types_of(bias)
    constants = ground.constants(form) | {
        "K": picks,
        "J": width,
        "H": form.hidden,
        "CHUNK": chunk,
        "DTYPE": kernel_type(dtype),
        "PLACED": by_expert,
        "WEIGHTED": weighted,
        "TURN": ground.tuning.turn,
        "STAGES": stages,
        "REDUCE": picks > 0,
        "BIAS0": bias0,
        "BIAS1": bias1,
        "WORKERS": ground.tuning.workers,
        "SB": sent,
        "SBLOCK": sent_block,
        "B": rows,
        "BLOCK": block,
    }
    launch = ground.memory.bind(
        two_combine_kernel,
        ground.num_programs,
        num_warps=reduce.num_warps,
        max_registers=reduce.max_registers,
        **constants,
    )
    experts = ground.config.num_experts

    def launched(regions: int, state: int, plan: int, parts: Any, sums: Any, *rest: int) -> None:
        launch(regions, state, plan, *parts, *sums, *rest, experts)

    return launched


def bind_two_pull(
    ground: TwoGround, form: Form, dtype: torch.dtype, bias: tuple[torch.dtype, ...]
) -> Launch:
    """Sums of rows in views."""
    cut, net = ground.tuning.pull, ground.net_ring(form)
    block = min(power_of_two_at_least(form.hidden), cut.block)
    most = cut.rows_of(block, min(net.chunk, net.most_rows))
    rows, stages = cut.staged(most, block * _token_bytes(ground, dtype, bias), ground.shared_bytes)
    bias0, bias1 = types_of(bias)
    left_out = ("RINGS", "RING", "Q", "PAY")
    constants = {
        name: value for name, value in ground.constants(form).items() if name not in left_out
    } | {
        "H": form.hidden,
        "B": rows,
        "BLOCK": block,
        "TURN": ground.tuning.turn,
        "DTYPE": kernel_type(dtype),
        "BIAS0": bias0,
        "BIAS1": bias1,
        "WORKERS": ground.tuning.workers,
        "STAGES": stages,
    }
    launch = ground.memory.bind(
        two_pull_kernel,
        ground.num_programs,
        num_warps=cut.num_warps,
        max_registers=cut.max_registers,
        **constants,
    )
    return lambda *given: launch(*given, ground.config.num_experts)


def _token_bytes(ground: TwoGround, dtype: torch.dtype, bias: tuple[torch.dtype, ...]) -> int:
    """Bytes that a reducer loads for a channel of a token, at most."""
    grid = ground.grid
    return (grid.ranks_per_node + grid.num_nodes - 1) * dtype.itemsize + sum(
        kind.itemsize for kind in bias
    )


def bind_two_greet(ground: TwoGround) -> Launch:
    """A call without rows."""
    return ground.memory.bind(
        two_greet_kernel, 1, num_warps=4, max_registers=None, **ground.constants()
    )


BINDERS = Binders(
    bind_plan,
    bind_two_dispatch,
    bind_two_combine,
    _bind_two_direct,
    bind_two_pull,
    bind_two_greet,
)
