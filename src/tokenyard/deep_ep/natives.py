"""The native objects behind one ``Buffer``: made by the first call with their sizes, and kept."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import cycle
from operator import eq
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.api import BESIDE_COLLECTIVES, ExpertParallel
from tokenyard.arguments import LONGEST, check_timeout
from tokenyard.deep_ep.handles import KeptHandle, LowLatencyHandle, of_items
from tokenyard.deep_ep.inputs import Guess, of_group
from tokenyard.deep_ep.runtime import RING_BYTES
from tokenyard.engines.known import AUTO, ENGINES, LOW_LATENCY
from tokenyard.errors import Mismatch, NotSupported, PeerTimeout
from tokenyard.header import DISAGREE, DISPATCH
from tokenyard.memory.meeting import looking
from tokenyard.rendezvous import agree, group_store

Made = TypeVar("Made")

ENGINE_VARIABLE = "TOKENYARD_DEEP_EP_ENGINE"
"""Names the engine of normal mode (default "auto"); the same on every rank."""

LOW_LATENCY_VARIABLE = "TOKENYARD_DEEP_EP_LOW_LATENCY_ENGINE"
"""Names the engine of low-latency mode. Default: ``low_latency`` where that can work, else "auto".
"""

TIMEOUT_VARIABLE = "TOKENYARD_DEEP_EP_TIMEOUT"
"""Seconds that a silent rank is waited for (default: as long as DeepEP waits)."""

DEFAULT_TIMEOUT = 100.0
FEWEST_RING_BYTES = 32 << 20

MANY_OBJECTS = 6
"""Of normal mode: with static shapes so many come with a warning."""

LOW_LATENCY_OBJECTS = 2
"""Objects that take turns: one call of each may be outstanding, and DeepEP allows two."""

Sizes = tuple[int, int, int, int, torch.device]
NAMES = ("hidden", "num_experts", "num_topk", "max_tokens_per_rank", "device")
"""What a native object is made with, the same on every rank, also on one without tokens. A plain
tuple, as one is made in every call."""


class Turns(NamedTuple):
    """Objects of low-latency mode, and whose turn it is."""

    objects: list[ExpertParallel]
    turns: Iterator[ExpertParallel]


class Natives:
    """The objects by :class:`Sizes`. Making one is collective, as the call that asks for it is.

    Attributes:
        num_sms: multiprocessors that objects of normal mode made from now on may fill; None: any.
        last_normal, last_low_latency: the object of the last call in a mode.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        world_size: int,
        num_nvl_bytes: int,
        masks: bool = False,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """``timeout``: seconds, unless :data:`TIMEOUT_VARIABLE` says others."""
        self._timeout = timeout
        self.rank, self.world_size, self._masks = rank, world_size, masks
        self._group = group
        rings = min(max(num_nvl_bytes, FEWEST_RING_BYTES), RING_BYTES)
        self._ring_bytes = rings if num_nvl_bytes else None
        self._normal: dict[Sizes, ExpertParallel] = {}
        self._counting: dict[Sizes, ExpertParallel] = {}
        self._low: dict[Sizes, Turns] = {}
        self._closed = False

    num_sms: int | None = None
    last_normal: ExpertParallel | None = None
    last_low_latency: ExpertParallel | None = None

    def normal(self, sizes: Sizes, bounded: bool = False) -> ExpertParallel:
        """The object of normal mode. ``bounded``: no rank brings more tokens than ``sizes`` say."""
        known = self._normal.get(sizes)
        self.last_normal = known or self._new_normal(self._normal, sizes, bounded)
        return self.last_normal

    def counting(self, width: int, device: torch.device) -> ExpertParallel:
        """The object by which each rank gives each other one row of ``width`` words."""
        sizes = width, self.world_size, 1, self.world_size, device
        return self._counting.get(sizes) or self._new_normal(self._counting, sizes)

    def swap(self, words: Tensor, exact: bool = True) -> Tensor:
        """Row ``n`` of ``words [R, width]``, of 4 bytes each, to rank ``n``; what came, by rank."""
        to = torch.arange(self.world_size, device=words.device).unsqueeze(1)
        ep = self.counting(words.shape[1], words.device)
        return ep.dispatch(words.view(torch.float32), to, exact=exact).x.view(words.dtype)

    def whom_counting(self, width: int, device: torch.device | None) -> ExpertParallel | None:
        """The one that the others are likely to call; None if they are likely to make one."""
        return _nearest(self._counting, (width, self.world_size, 1, self.world_size, device))

    def _new_normal(
        self, made: dict[Sizes, ExpertParallel], sizes: Sizes, bounded: bool = False
    ) -> ExpertParallel:
        allowed = self.num_sms if sizes[-1].type == "cuda" else None
        num_sms = max(allowed, 2 * self.world_size) if allowed else None  # engines need as many
        enough = rings_for(sizes[3], sizes[0], self.world_size) if bounded else RING_BYTES
        rings = min(self._ring_bytes or enough, enough) if bounded else self._ring_bytes
        made[sizes] = self._make(sizes, ENGINE_VARIABLE, AUTO, rings, num_sms)
        if bounded and len(made) == MANY_OBJECTS and self.rank == 0:
            warnings.warn(
                f"this Buffer has {MANY_OBJECTS} objects ({', '.join(NAMES)} differ; the last: "
                f"num_worst_tokens / ranks = {sizes[3]}), each with buffers and connections of its "
                f"own: round num_worst_tokens up to a few values",
                stacklevel=2,
            )
        return made[sizes]

    def low_latency(self, sizes: Sizes) -> ExpertParallel:
        """The object of low-latency mode whose turn it is."""
        made = self._low.get(sizes)
        if made is None:
            objects = self._make_low_latency(sizes)
            made = self._low[sizes] = Turns(objects, cycle(objects))
        # Without masks nobody asks who was left out: this call tells.
        for each in () if self._masks else made.objects:
            low = each._calls.low  # pyright: ignore[reportPrivateUsage]
            rank = None if low is None else low.silent_rank()
            if rank is not None:
                raise PeerTimeout(
                    f"rank {rank} was silent for {each.config.timeout} s in an earlier "
                    f"low-latency call, and its tokens are missing there: restart it, or go on "
                    f"without it with Buffer(enable_shrink=True)",
                    rank,
                )
        self.last_low_latency = next(made.turns)
        return self.last_low_latency

    def all_low_latency(self) -> list[ExpertParallel]:
        return [each for made in self._low.values() for each in made.objects]

    # Of a rank that refuses its arguments

    def check_open(self) -> Natives:
        """These, unless the buffer was destroyed: then it raises."""
        if self._closed:
            raise RuntimeError("this Buffer was destroyed: make a new one")
        return self

    def whom_normal(self, guess: Guess) -> ExpertParallel | None:
        """The object of normal mode that others are likely to call; None: they are to make one."""
        return _nearest(self._normal, guess)

    def whom_low_latency(self, guess: Guess) -> ExpertParallel | None:
        """The same of low-latency mode. Takes its turn, as theirs does."""
        turns = _nearest(self._low, guess)
        return None if turns is None else next(turns.turns)

    def refused(
        self, error: Exception, ep: ExpertParallel | None, op: int, exact: bool = True
    ) -> Exception:
        """Tell the ranks that are in this call on ``ep`` (None: those that make one for a dispatch)
        of an ``error``; returns the one to raise."""
        if self.world_size == 1:
            return error
        if ep is not None:
            calls: Any = ep._calls  # pyright: ignore[reportPrivateUsage]
            if calls.gone:
                return error
            on_gpu = ep.device is not None and ep.device.type == "cuda"
            with torch.cuda.device(ep.device) if on_gpu else nullcontext(), torch.no_grad():
                return calls.refuse(op, exact, error)
        if op == DISPATCH:
            store = group_store(self._group)
            assert store is not None
            agree(store, self.rank, self.world_size, {}, str(error), 0.0)
        return error

    def refused_with(
        self, error: Exception, handle: Any, kind: type[KeptHandle], op: int
    ) -> Exception:
        """The same of a call with a ``handle`` of this ``kind``; a bad one: on the last object."""
        ep = self.last_low_latency if kind is LowLatencyHandle else self.last_normal
        with suppress(ValueError):
            handle = of_items(handle)
        if isinstance(handle, kind) and of_group(handle.ep, self._group):
            ep = handle.ep
        return self.refused(error, ep, op)

    # Making them

    def _make_low_latency(self, sizes: Sizes) -> list[ExpertParallel]:
        made: list[ExpertParallel] = []
        try:
            while len(made) < LOW_LATENCY_OBJECTS:
                made.append(self._make(sizes, LOW_LATENCY_VARIABLE, LOW_LATENCY))
                if made[0].engine != LOW_LATENCY:
                    break
        except NotSupported:  # on every rank alike; the engine that serves instead says so
            if made or LOW_LATENCY_VARIABLE in os.environ:
                raise
            made.append(self._make(sizes, LOW_LATENCY_VARIABLE, AUTO))
        return made

    def _make(
        self,
        sizes: Sizes,
        variable: str,
        default: str,
        buffer_bytes: int | None = None,
        num_sms: int | None = None,
    ) -> ExpertParallel:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured, and this is the first call with such sizes "
                f"({', '.join(map('{}={}'.format, NAMES, sizes))}): make one such call on every "
                f"rank before the capture"
            )
        engine, decodes = os.environ.get(variable, default), variable == LOW_LATENCY_VARIABLE
        known = [each for each in ENGINES if decodes or each != LOW_LATENCY]
        try:
            if engine not in known:
                text = f"{variable} ({engine!r}) must be one of {', '.join(map(repr, known))}"
                raise ValueError(text)
            timeout = timeout_of(self._timeout)
        except ValueError as error:
            raise self.refused(error, None, DISPATCH) from None
        named: dict[str, Any] = dict(zip(NAMES, sizes, strict=True))
        with looking(lambda: self._look(sizes)):
            made = ExpertParallel(
                self._group,
                **named,
                engine=engine,
                timeout=timeout,
                buffer_bytes=buffer_bytes,
                num_sms=num_sms,
                spare_sms=BESIDE_COLLECTIVES,
            )
        # handles outlive their buffer, as in DeepEP
        weakref.finalize(made, made._calls.close).atexit = False  # pyright: ignore[reportPrivateUsage]
        return made

    def _look(self, sizes: Sizes) -> None:
        """While this rank waits for others to make an object of ``sizes``: raise Mismatch if one of
        them waits for it in a call of an older object, which this rank refuses, so that all raise
        and stay in step. Over gloo, where ranks tell in which call they wait
        (``engines/failures.py``)."""
        low = ((each, ep) for each, made in self._low.items() for ep in made.objects)
        for theirs, ep in (*self._normal.items(), *low):
            calls: Any = ep._calls  # pyright: ignore[reportPrivateUsage]
            peer = None if calls.gone else calls.engine.awaited()
            differ = [each for each in zip(NAMES, theirs, sizes, strict=True) if each[1] != each[2]]
            if peer is not None and differ:
                name, his, mine = differ[0]
                error = Mismatch(
                    f"{DISAGREE}{name}: rank {peer} says {his}, rank {ep.rank} says {mine}"
                )
                calls.refuse(DISPATCH, True, error)
                raise error

    def close(self) -> None:
        self._closed = True
        for made in (*self._normal.values(), *self._counting.values(), *self.all_low_latency()):
            made.close()
        self._normal, self._counting, self._low = {}, {}, {}


def _nearest(made: dict[Sizes, Made], guess: Guess) -> Made | None:
    """What is of these sizes, or the last that agrees with most of those that are known."""
    known = made.get(guess)
    if known is not None or not made or None not in guess:
        return known
    return made[max(reversed(made), key=lambda sizes: sum(map(eq, sizes, guess)))]


def rings_for(max_tokens: int, hidden: int, num_ranks: int) -> int:
    """Bytes of rings of an object: all rows of all ranks, 4 bytes per channel, within bounds.

    >>> rings_for(128, 7168, 8) >> 20, rings_for(256, 7168, 8) >> 20, rings_for(4096, 7168, 8) >> 20
    (32, 56, 128)
    """
    return min(RING_BYTES, max(FEWEST_RING_BYTES, 4 * max_tokens * hidden * num_ranks))


def timeout_of(default: float) -> float:
    """Seconds that a silent rank is waited for."""
    text = os.environ.get(TIMEOUT_VARIABLE, default)
    try:
        return check_timeout(float(text))
    except ValueError:
        raise ValueError(
            f"{TIMEOUT_VARIABLE} ({text!r}) must be a positive number of seconds, at most "
            f"{LONGEST:.0f}"
        ) from None
