"""Kernels of the low-latency engine with their constants, compiled and loaded once per kind of
call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tokenyard.config import Config
from tokenyard.engines.low_latency_ground import Ground
from tokenyard.engines.rings import Form
from tokenyard.handle import Spec
from tokenyard.kernels.low_combine import low_combine_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.low_dispatch import low_dispatch_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.low_refuse import low_refuse_kernel  # pyright: ignore[reportUnknownVariableType]
from tokenyard.kernels.payload import groups_of
from tokenyard.kernels.types import kernel_type
from tokenyard.layout import power_of_two_at_least
from tokenyard.types import Layout, Quantize

Launch = Callable[..., None]


class Parts(NamedTuple):
    """Which parts of a call a launch makes."""

    send: bool
    receive: bool


BOTH, SEND, RECEIVE = Parts(True, True), Parts(True, False), Parts(False, True)


class Launches:
    """Makes launches and keeps them. ``memory.bind`` may wait for the device, so a kind of call is
    slow the first time.
    """

    def __init__(self, config: Config, ground: Ground) -> None:
        self._config, self._ground, self._shape = config, ground, ground.shape
        self._kept: dict[tuple[Any, ...], Launch] = {}

    def dispatch(
        self,
        form: Form,
        mode: Quantize | None,
        dtype: torch.dtype,
        spec: Spec,
        parts: Parts,
        *,
        wide: bool,
        weighted: bool,
        columns: bool,
        loads: int,
        timed: bool,
    ) -> Launch:
        """``wide``: ids are int64. ``columns``, ``loads`` (bytes of one), ``timed``: what
        :class:`CallOptions` asks for.
        """
        asked = parts, wide, weighted, columns and parts.receive, loads, timed
        return self._bound(
            ("dispatch", form, mode, dtype, spec.layout, spec.expert_alignment > 1, *asked),
            low_dispatch_kernel,
            lambda: (
                self._common(parts, timed)
                | {
                    "HB": self._ground.expert_bins,
                    "TB": min(
                        power_of_two_at_least(self._config.max_tokens_per_rank),
                        32 * self._shape.num_warps,
                    ),
                    "H": form.hidden,
                    "N": form.words,
                    "BITS": form.bits,
                    "S": form.scale_words,
                    "PAY": form.payload_bytes,
                    "PIECES": self._shape.pieces,
                    "PART": max(1, power_of_two_at_least(form.words) // self._shape.pieces),
                    "BLOCK": min(power_of_two_at_least(form.words), self._shape.words),
                    "MODE": 0 if mode is None else mode.value,
                    "GP": groups_of(form.hidden) // self._shape.pieces,
                    "DTYPE": kernel_type(dtype),
                    "WIDE": wide,
                    "WEIGHTED": weighted,
                    "PADDED": spec.layout is Layout.EXPERT_PADDED,
                    "PADDING": spec.expert_alignment > 1,
                    "COLUMNS": columns and parts.receive,
                    "LOADS": loads,
                }
            ),
        )

    def combine(
        self,
        dtype: torch.dtype,
        weighted: int,
        bias: tuple[torch.dtype, ...],
        parts: Parts,
        *,
        kept: int,
        timed: bool,
        lost: bool,
    ) -> Launch:
        """``weighted``: 0 no, 1 by rows, 2 by the owner. ``kept``: bytes before a sum's list of
        picks; 0: it has none.
        """
        lost = lost and parts.receive
        hidden, shape = power_of_two_at_least(self._config.hidden), self._shape
        share = max(1, hidden // shape.shares)
        kinds = [kernel_type(kind) for kind in bias] + [None] * (2 - len(bias))
        return self._bound(
            ("combine", dtype, weighted, bias, parts, kept, timed, lost),
            low_combine_kernel,
            lambda: (
                self._common(parts, timed)
                | {
                    "H": self._config.hidden,
                    "SHARES": shape.shares,
                    "PART": share,
                    "BLOCK": min(hidden, shape.part),
                    "WHOLE": min(share, shape.whole),
                    "DTYPE": kernel_type(dtype),
                    "WEIGHTED": weighted,
                    "BIAS0": kinds[0],
                    "BIAS1": kinds[1],
                    "KEPT": kept,
                    "LOST": lost,
                }
            ),
        )

    def refuse(self) -> Launch:
        """A call to which this rank brings nothing."""
        names = ("R", "RP", "P", "M", "K", "LC", "EARLY")
        return self._bound(
            ("refuse",),
            low_refuse_kernel,
            lambda: {
                name: value for name, value in self._common(BOTH, False).items() if name in names
            },
        )

    def _common(self, parts: Parts, timed: bool) -> dict[str, Any]:
        config, ground = self._config, self._ground
        return {
            "R": config.world_size,
            "RP": ground.rank_bins,
            "P": self._shape.programs,
            "M": config.max_tokens_per_rank,
            "K": config.num_topk,
            "KP": power_of_two_at_least(config.num_topk),
            "E": config.num_experts,
            "LC": config.most_local_experts,
            "SLOT": ground.slot_bytes,
            "TIMED": timed,
            "SEND": parts.send,
            "RECEIVE": parts.receive,
            "EARLY": ground.memory.early,
        }

    def _bound(
        self, key: tuple[Any, ...], kernel: Any, constants: Callable[[], dict[str, Any]]
    ) -> Launch:
        if key not in self._kept:
            shape = self._shape
            self._kept[key] = self._ground.memory.bind(
                kernel,
                shape.programs,
                num_warps=shape.num_warps,
                max_registers=shape.max_registers,
                **constants(),
            )
        return self._kept[key]
