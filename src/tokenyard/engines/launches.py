"""Kernels of the nvlink engine with their constants, compiled and loaded once per kind of call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from tokenyard.config import Config
from tokenyard.engines.rings import Cut, Form, Ground, Shape, staged, stages_for
from tokenyard.handle import Spec
from tokenyard.kernels.combine import combine_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.direct import MOST_PICKS, bind_direct, bind_unpack
from tokenyard.kernels.dispatch import bind_dispatch
from tokenyard.kernels.greet import greet_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.plan import plan_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.push import push_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.types import kernel_type
from tokenyard.layout import power_of_two_at_least
from tokenyard.types import Layout, Quantize

MOST_COMPARED, MOST_PLACED = 16384, 64
"""Pairs of picks of a token that a program of the plan compares at once (of ``MOST_PICKS`` picks);
picks if it compares all with each other."""

MOST_GATHERED = 16
"""Tokens that a program of a combine in place sums at once, however short their rows are."""

MOST_BATCHES = 4
"""Steps of a reducer between two returns of credits."""

Launch = Callable[..., None]


def combine_tiles(
    hidden: int, send: Cut, reduce: Cut, chunk: int, most: int, *, placed: bool
) -> dict[str, int]:
    """Rows and channels of each that senders (SB, SBLOCK) and reducers (B, BLOCK; ``most`` rows)
    have in flight.

    With ``placed`` a row is the sum of several, all of which are loaded at once: one row, 16 bytes
    of it per lane.
    """
    if placed:
        block = min(power_of_two_at_least(hidden), 256 * reduce.num_warps)
        return {"SB": 1, "SBLOCK": block, "B": 1, "BLOCK": block}
    whole, part = (min(power_of_two_at_least(hidden), cut.block) for cut in (send, reduce))
    return {
        "SB": send.rows_of(whole, chunk),
        "SBLOCK": whole,
        "B": reduce.rows_of(part, most),
        "BLOCK": part,
    }


class Launches:
    """Makes launches and keeps them. ``memory.bind`` may wait for the device, so a kind of call is
    slow the first time.
    """

    def __init__(self, config: Config, ground: Ground) -> None:
        self._config, self._ground, self._shape = config, ground, cast("Shape", ground.shape)
        self._kept: dict[tuple[Any, ...], Launch] = {}

    def plan(self, spec: Spec, words: int, *, weighted: bool, wide: bool) -> Launch:
        """``words``: of meta. ``wide``: ids are int64."""
        experts, padded = spec.layout is not Layout.FLAT, spec.layout is Layout.EXPERT_PADDED
        config, ground, top = (
            self._config,
            self._ground,
            power_of_two_at_least(self._config.num_topk),
        )
        return self._bound(
            ("plan", experts, padded, spec.exact, weighted, wide),
            plan_kernel,
            self._shape.channels,
            8,
            None,
            lambda: (
                {
                    "R": config.world_size,
                    "C": self._shape.channels,
                    "K": config.num_topk,
                    "W": ground.header_words,
                    "MW": words,
                    "KP": top,
                    "TB": max(
                        1,
                        min(
                            32,
                            MOST_COMPARED // top**2,
                            (MOST_PLACED if experts else MOST_PICKS) // top,
                        ),
                    ),
                    "RP": ground.rank_bins,
                    "EP": ground.expert_bins,
                    "LP": power_of_two_at_least(config.most_local_experts),
                    "CP": power_of_two_at_least(self._shape.channels),
                    "WP": power_of_two_at_least(ground.header_words),
                    "WIDE": wide,
                    "WEIGHTED": weighted,
                    "EXPERTS": experts,
                    "PADDED": padded,
                    "HOST": spec.exact,
                }
                | self.plan_constants()
            ),
        )

    def plan_constants(self) -> dict[str, Any]:
        """Where rows go, and how letters reach them."""
        return {"D": self._config.world_size, "P": self._config.world_size, "FAR": 0, "NET": False}

    def dispatch(
        self, form: Form, mode: Quantize | None, dtype: torch.dtype, width: int, **flags: bool
    ) -> Launch:
        """``width``: of ``slots``. ``flags``: see ``bind_dispatch``."""
        key = ("dispatch", form, mode, dtype, width, *sorted(flags.items()))
        return self._made(
            key,
            lambda: bind_dispatch(
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
        """``width``: of ``slots``. ``picks``: columns of reduced weights, 0 without."""
        send, reduce, config = self._shape.send, self._shape.reduce, self._config
        slots = self._ground.slots(form)
        chunk = send.chunk_of(slots)
        tiles = combine_tiles(form.hidden, send, reduce, chunk, chunk, placed=placed)
        kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
        grid = config.world_size * self._shape.channels + 1
        token = config.world_size * dtype.itemsize + sum(
            kind.itemsize for kind in bias
        )  # per channel
        shared = self._ground.shared_bytes // -(-grid // self._shape.writers)
        return self._bound(
            ("combine", form, dtype, width, picks, bias, placed, weighted),
            combine_kernel,
            grid,
            reduce.num_warps,
            reduce.max_registers,
            lambda: (
                self._ring(form)
                | {
                    "K": picks,
                    "J": width,
                    "H": form.hidden,
                    "CHUNK": chunk,
                    "DTYPE": kernel_type(dtype),
                    "PLACED": placed,
                    "WEIGHTED": weighted,
                    "REDUCE": picks > 0,
                    "BIAS0": kinds[0],
                    "BIAS1": kinds[1],
                    "BATCHES": max(1, min(MOST_BATCHES, (slots + 1 - chunk) // tiles["B"])),
                    "STAGES": 1
                    if placed
                    else stages_for(reduce.stages, tiles["B"] * tiles["BLOCK"] * token, shared),
                }
                | tiles
            ),
        )

    def direct(self, form: Form, mode: Quantize | None, dtype: torch.dtype) -> Launch:
        """Rows straight into views."""
        return self._made(
            ("direct", form, mode, dtype), lambda: bind_direct(self._ground, form, mode, dtype)
        )

    @property
    def chunks(self) -> int:
        """Chunks of the most rows that one rank can send back to another."""
        return -(-self._config.max_tokens_per_rank // self._shape.push.chunk)

    def push(self, form: Form, dtype: torch.dtype, bias: tuple[torch.dtype, ...]) -> Launch:
        """Rows straight to their owners, and their sums."""
        push, gather, shape, config = (
            self._shape.push,
            self._shape.gather,
            self._shape,
            self._config,
        )
        grid = shape.pushers + shape.gatherers

        def constants() -> dict[str, Any]:
            whole = power_of_two_at_least(form.hidden)
            block = min(whole, gather.block)
            kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
            token = config.world_size * dtype.itemsize + sum(
                kind.itemsize for kind in bias
            )  # per channel
            shared = self._ground.shared_bytes // -(-grid // shape.writers)
            rows, stages = staged(
                gather, gather.rows_of(block, MOST_GATHERED), block * token, shared
            )
            return {
                "R": config.world_size,
                "C": shape.channels,
                "RP": self._ground.rank_bins,
                "P": shape.pushers,
                "Q": shape.gatherers,
                "H": form.hidden,
                "N": form.words,
                "BITS": form.bits,
                "CHUNK": push.chunk,
                "CHUNKS": self.chunks,
                "TILE": min(power_of_two_at_least(push.chunk * form.words), push.rows * push.block),
                "B": rows,
                "BLOCK": block,
                "SPAN": whole if gather.stages > 1 else block,
                "STAGES": stages,
                "DTYPE": kernel_type(dtype),
                "BIAS0": kinds[0],
                "BIAS1": kinds[1],
            }

        return self._bound(
            ("push", form, dtype, bias),
            push_kernel,
            grid,
            gather.num_warps,
            gather.max_registers,
            constants,
        )

    def unpack(self, words: int, *, weighted: bool, static: bool) -> Launch:
        """What rode along with a direct dispatch, out of the view."""
        ground, ranks, top = self._ground, self.plan_constants()["D"], self._config.num_topk
        return self._made(
            ("unpack", words, weighted, static),
            lambda: bind_unpack(ground, top, ranks, words, weighted=weighted, static=static),
        )

    def greet(self) -> Launch:
        """A call without rows."""
        return self._bound(
            ("greet",),
            greet_kernel,
            1,
            4,
            None,
            lambda: {
                "R": self._config.world_size,
                "C": self._shape.channels,
                "RP": self._ground.rank_bins,
            },
        )

    def _ring(self, form: Form) -> dict[str, Any]:
        ground = self._ground
        return {
            "R": self._config.world_size,
            "C": self._shape.channels,
            "RP": ground.rank_bins,
            "RINGS": ground.rings_at,
            "RING": ground.ring_bytes,
            "SLOT": form.slot_bytes,
            "PAY": form.payload_bytes,
            "Q": ground.slots(form),
        }

    def _bound(
        self,
        key: tuple[Any, ...],
        kernel: Any,
        grid: int,
        warps: int,
        registers: int | None,
        constants: Callable[[], dict[str, Any]],
    ) -> Launch:
        bind = self._ground.memory.bind
        return self._made(
            key, lambda: bind(kernel, grid, num_warps=warps, max_registers=registers, **constants())
        )

    def _made(self, key: tuple[Any, ...], make: Callable[[], Launch]) -> Launch:
        launch = self._kept.get(key)
        if launch is None:
            launch = self._kept[key] = make()
        return launch
