"""Kernels of the two-level engine with their constants."""

from __future__ import annotations

from typing import Any

import torch

from tokenyard.config import Config
from tokenyard.engines.launches import Launch, Launches, combine_tiles
from tokenyard.engines.rings import Form, staged
from tokenyard.engines.twolevel_ground import TwoGround
from tokenyard.handle import Spec
from tokenyard.kernels.two_combine import two_combine_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_direct import bind_two_direct
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.kernels.two_letters import two_greet_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_pull import two_pull_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.types import kernel_type
from tokenyard.layout import power_of_two_at_least
from tokenyard.types import Quantize


def _without(known: dict[str, Any], *names: str) -> dict[str, Any]:
    """Constants without those of rings inside nodes, and others that a kernel does not take."""
    return {
        name: value for name, value in known.items() if name not in ("RINGS", "RING", "Q", *names)
    }


class TwoLaunches(Launches):
    """Launches that take the same arguments as those of engine nvlink."""

    _ground: TwoGround

    def __init__(self, config: Config, ground: TwoGround) -> None:
        super().__init__(config, ground)
        self.table_rows = 0
        """Rows of each node's part of the forwarders' table in the plan that is launched next."""

    def plan(self, spec: Spec, words: int, *, weighted: bool, wide: bool) -> Launch:
        launch = super().plan(spec, words, weighted=weighted, wide=wide)

        def launch_plan(*args: int) -> None:
            *others, rows, alignment = args
            launch(*others, rows | self.table_rows << 32, alignment)

        return launch_plan

    def plan_constants(self) -> dict[str, Any]:
        known, grid = self._ground.constants(), self._ground.grid
        return {"D": grid.world_size + grid.num_nodes} | {
            name: known[name] for name in ("P", "FAR", "NET")
        }

    def dispatch(
        self, form: Form, mode: Quantize | None, dtype: torch.dtype, width: int, **flags: bool
    ) -> Launch:
        key = ("dispatch", form, mode, dtype, width, *sorted(flags.items()))
        return self._made(
            key,
            lambda: bind_two_dispatch(
                self._ground, self._config.num_topk, form, mode, dtype, width, **flags
            ),
        )

    def combine(
        self,
        form: Form,
        dtype: torch.dtype,
        width: int,
        picks: int,
        bias: tuple[torch.dtype, ...],
        *,
        placed: bool,
        weighted: bool,
    ) -> Launch:
        ground, send, reduce = self._ground, self._ground.tuning.send, self._ground.tuning.reduce

        def constants() -> dict[str, Any]:
            net = ground.net_ring(form)
            chunk = send.chunk_of(ground.slots(form))
            tiles = combine_tiles(
                form.hidden, send, reduce, chunk, min(chunk, net.most_rows), placed=placed
            )
            stages = 1
            if not placed:
                token = self._token_bytes(dtype, bias)
                tiles["B"], stages = staged(
                    reduce, tiles["B"], tiles["BLOCK"] * token, ground.shared_bytes
                )
            kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
            return (
                ground.constants(form)
                | {
                    "K": picks,
                    "J": width,
                    "H": form.hidden,
                    "CHUNK": chunk,
                    "DTYPE": kernel_type(dtype),
                    "PLACED": placed,
                    "WEIGHTED": weighted,
                    "TURN": ground.tuning.turn,
                    "STAGES": stages,
                    "REDUCE": picks > 0,
                    "BIAS0": kinds[0],
                    "BIAS1": kinds[1],
                    "WORKERS": ground.tuning.workers,
                }
                | tiles
            )

        launch = self._bound(
            ("combine", form, dtype, width, picks, bias, placed, weighted),
            two_combine_kernel,
            ground.num_programs,
            reduce.num_warps,
            reduce.max_registers,
            constants,
        )
        return lambda *args: launch(*args, self._config.num_experts)

    def direct(self, form: Form, mode: Quantize | None, dtype: torch.dtype) -> Launch:
        launch = self._made(
            ("direct", form, mode, dtype),
            lambda: bind_two_direct(self._ground, self._config.num_topk, form, mode, dtype),
        )
        return lambda *args: launch(*args, self._config.num_experts)

    def pull(self, form: Form, dtype: torch.dtype, bias: tuple[torch.dtype, ...]) -> Launch:
        """Sums of rows in views."""
        ground, cut = self._ground, self._ground.tuning.pull

        def constants() -> dict[str, Any]:
            net, block = ground.net_ring(form), min(power_of_two_at_least(form.hidden), cut.block)
            most = cut.rows_of(block, min(net.chunk, net.most_rows))
            rows, stages = staged(
                cut, most, block * self._token_bytes(dtype, bias), ground.shared_bytes
            )
            kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
            return _without(ground.constants(form), "PAY") | {
                "H": form.hidden,
                "B": rows,
                "BLOCK": block,
                "TURN": ground.tuning.turn,
                "DTYPE": kernel_type(dtype),
                "BIAS0": kinds[0],
                "BIAS1": kinds[1],
                "WORKERS": ground.tuning.workers,
                "STAGES": stages,
            }

        launch = self._bound(
            ("pull", form, dtype, bias),
            two_pull_kernel,
            ground.num_programs,
            cut.num_warps,
            cut.max_registers,
            constants,
        )
        return lambda *args: launch(*args, self._config.num_experts)

    def _token_bytes(self, dtype: torch.dtype, bias: tuple[torch.dtype, ...]) -> int:
        """Bytes that a reducer loads for a channel of a token, at most."""
        grid = self._ground.grid
        return (grid.ranks_per_node + grid.num_nodes - 1) * dtype.itemsize + sum(
            kind.itemsize for kind in bias
        )

    def greet(self) -> Launch:
        return self._bound(("greet",), two_greet_kernel, 1, 4, None, self._ground.constants)
