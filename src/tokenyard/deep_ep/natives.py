"""The native objects behind one ``Buffer``: made at the first call that tells their sizes, and kept."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import NamedTuple

import torch
import torch.distributed as dist

from tokenyard.api import BESIDE_COLLECTIVES, ExpertParallel
from tokenyard.deep_ep.config import RING_BYTES
from tokenyard.deep_ep.handles import kind_for
from tokenyard.errors import NotSupported, PeerTimeout

ENGINE_VARIABLE = "TOKENYARD_DEEP_EP_ENGINE"
"""Names the engine of normal mode (default "auto"); the same on every rank."""

LOW_LATENCY_VARIABLE = "TOKENYARD_DEEP_EP_LOW_LATENCY_ENGINE"
"""Names the engine of low-latency mode. Default: ``low_latency`` where that can work, else "auto"."""

TIMEOUT_VARIABLE = "TOKENYARD_DEEP_EP_TIMEOUT"
"""Seconds that a silent rank is waited for (default: as long as DeepEP waits)."""

DEFAULT_TIMEOUT = 100.0
FEWEST_RING_BYTES = 32 << 20

LOW_LATENCY = "low_latency"
"""The engine for decoding."""

LOW_LATENCY_OBJECTS = 2
"""Objects of that engine that take turns, as one call of each may be outstanding, and DeepEP allows two."""


Sizes = tuple[int, int, int, int, torch.device]
"""What a native object is made with, the same on every rank, also on one without tokens: hidden, num_experts, num_topk,
max_tokens_per_rank, device. A plain tuple, as one is made in every call."""


class Turns(NamedTuple):
    """Objects of low-latency mode, whose turn it is, and a question to each (none with masks): which rank it found silent."""

    objects: list[ExpertParallel]
    turns: Iterator[ExpertParallel]
    silent: list[Callable[[], int | None]]


class Natives:
    """The objects by :class:`Sizes`. Making one is collective, as the call that asks for it is.

    Attributes:
        kind: of handles in normal mode.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, world_size: int, num_nvl_bytes: int, masks: bool = False
    ) -> None:
        self.rank, self.world_size, self._masks = rank, world_size, masks
        self.kind = kind_for(world_size)
        self._group = group
        self._ring_bytes = min(max(num_nvl_bytes, FEWEST_RING_BYTES), RING_BYTES) if num_nvl_bytes else None
        self._normal: dict[Sizes, ExpertParallel] = {}
        self._low: dict[Sizes, Turns] = {}
        self._closed = False

    def normal(self, sizes: Sizes) -> ExpertParallel:
        """The object of normal mode."""
        made = self._normal.get(sizes)
        if made is None:
            engine = os.environ.get(ENGINE_VARIABLE, "auto")
            made = self._normal[sizes] = self._make(sizes, engine, self._ring_bytes)
        return made

    def low_latency(self, sizes: Sizes) -> ExpertParallel:
        """The object of low-latency mode whose turn it is."""
        made = self._low.get(sizes)
        if made is None:
            objects = self._make_low_latency(sizes)
            made = self._low[sizes] = Turns(objects, cycle(objects), [] if self._masks else _questions(objects))
        for silent in made.silent:  # without masks nobody asks who was left out, so the next call tells
            rank = silent()
            if rank is not None:
                raise PeerTimeout(
                    f"rank {rank} was silent for {made.objects[0].config.timeout} s in an earlier low-latency call, and its "
                    "tokens are missing there: restart it, or go on without it with Buffer(enable_shrink=True)", rank
                )  # fmt: skip
        return next(made.turns)

    def all_low_latency(self) -> list[ExpertParallel]:
        """Every object of low-latency mode."""
        return [each for made in self._low.values() for each in made.objects]

    def _make_low_latency(self, sizes: Sizes) -> list[ExpertParallel]:
        engine = os.environ.get(LOW_LATENCY_VARIABLE, LOW_LATENCY)
        try:
            first = self._make(sizes, engine, None)
        except NotSupported:  # on every rank alike; the engine that serves instead says so
            if LOW_LATENCY_VARIABLE in os.environ:
                raise
            first = self._make(sizes, "auto", None)
        more = LOW_LATENCY_OBJECTS - 1 if first.engine == LOW_LATENCY else 0
        return [first, *(self._make(sizes, engine, None) for _ in range(more))]

    def _make(self, sizes: Sizes, engine: str, buffer_bytes: int | None) -> ExpertParallel:
        if self._closed:
            raise RuntimeError("this Buffer was destroyed: make a new one")
        hidden, num_experts, num_topk, max_tokens, device = sizes
        made = ExpertParallel(
            self._group,
            hidden=hidden,
            num_experts=num_experts,
            num_topk=num_topk,
            max_tokens_per_rank=max_tokens,
            engine=engine,
            timeout=float(os.environ.get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT)),
            buffer_bytes=buffer_bytes,
            spare_sms=BESIDE_COLLECTIVES,
            device=device,
        )
        # handles outlive their buffer, as in DeepEP
        weakref.finalize(made, made._calls.close).atexit = False  # pyright: ignore[reportPrivateUsage]
        return made

    def close(self) -> None:
        """Let go of all of them. Closing again does nothing."""
        self._closed = True
        for made in (*self._normal.values(), *self.all_low_latency()):
            made.close()
        self._normal.clear()
        self._low.clear()


def _questions(objects: list[ExpertParallel]) -> list[Callable[[], int | None]]:
    lows = [made._calls.low for made in objects]  # pyright: ignore[reportPrivateUsage]
    return [low.silent_rank for low in lows if low is not None]
