"""Kernels of the two-level engine with their constants."""

from __future__ import annotations

from typing import Any

import torch

from tokenyard.config import Config
from tokenyard.engines.launches import Launch, Launches, combine_tiles
from tokenyard.engines.rings import Form
from tokenyard.engines.twolevel_ground import TwoGround
from tokenyard.handle import Spec
from tokenyard.kernels.payload import groups_of
from tokenyard.kernels.two_combine import two_combine_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_dispatch import two_dispatch_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.two_letters import two_greet_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.types import kernel_type
from tokenyard.layout import power_of_two_at_least
from tokenyard.types import Quantize

MOST_FORWARDED = 64
"""Rows times local ranks that a forwarder looks at at once: Triton 3.6 crashes on some tiles of 128."""


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
        return {"D": grid.world_size + grid.num_nodes} | {name: known[name] for name in ("P", "FAR", "NET")}

    def dispatch(
        self, form: Form, mode: Quantize | None, dtype: torch.dtype, width: int, *, placed: bool, padding: bool,
        fresh: bool = False, weighted: bool = False, static: bool = False,
    ) -> Launch:  # fmt: skip
        ground, cut, forward = self._ground, self._ground.tuning.dispatch, self._ground.tuning.forward
        grid, net = ground.grid, ground.net_ring(form)
        whole, block = (min(power_of_two_at_least(words), cut.block) for words in (form.slot_bytes // 4, form.words))
        chunk = cut.chunk_of(ground.slots(form))
        most = min(chunk, net.chunk)
        forwarded = min(most, max(1, MOST_FORWARDED // power_of_two_at_least(grid.ranks_per_node)))
        return self._bound(
            ("dispatch", form, mode, dtype, width, placed, padding, fresh, weighted, static),
            two_dispatch_kernel, ground.num_programs, cut.num_warps, cut.max_registers,
            lambda: ground.constants(form) | {
                "K": self._config.num_topk, "KP": power_of_two_at_least(self._config.num_topk), "J": width, "H": form.hidden,
                "N": form.words, "BITS": form.bits, "S": form.scale_words, "MW": form.meta_words, "CHUNK": chunk,
                "B": 1 if placed or mode is not None else cut.rows_of(block, most), "BLOCK": block,
                "FB": 1 if placed else forward.rows_of(whole, forwarded), "FBLOCK": whole, "PLACED": placed,
                "FRESH": fresh, "WEIGHTED": weighted, "STATIC": static, "PADDING": padding,
                "MODE": 0 if mode is None else mode.value, "GP": groups_of(form.hidden), "DTYPE": kernel_type(dtype),
                "WORKERS": ground.tuning.workers,
            },
        )  # fmt: skip

    def combine(
        self, form: Form, dtype: torch.dtype, width: int, picks: int, bias: tuple[torch.dtype, ...], *, placed: bool,
        weighted: bool,
    ) -> Launch:  # fmt: skip
        ground, send, reduce = self._ground, self._ground.tuning.send, self._ground.tuning.reduce
        net = ground.net_ring(form)
        chunk = send.chunk_of(ground.slots(form))
        tiles = combine_tiles(form.hidden, send, reduce, chunk, min(chunk, net.most_rows), placed=placed)
        kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
        launch = self._bound(
            ("combine", form, dtype, width, picks, bias, placed, weighted),
            two_combine_kernel, ground.num_programs, reduce.num_warps, reduce.max_registers,
            lambda: ground.constants(form) | {
                "K": picks, "J": width, "H": form.hidden, "CHUNK": chunk,
                "DTYPE": kernel_type(dtype), "PLACED": placed, "WEIGHTED": weighted, "TURN": ground.tuning.turn,
                "REDUCE": picks > 0, "BIAS0": kinds[0], "BIAS1": kinds[1], "WORKERS": ground.tuning.workers,
            } | tiles,
        )  # fmt: skip
        return lambda *args: launch(*args, self._config.num_experts)

    def greet(self) -> Launch:
        return self._bound(("greet",), two_greet_kernel, 1, 4, None, self._ground.constants)
