"""Scenarios for the nvlink engine: a few calls of one object each, drawn from a seed.
``nvlink_ranks.py`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import torch

import tokenyard as ty
from cases import PLAIN, QUANTIZED, Case
from tokenyard.config import Config
from tokenyard.engines.rings import meta_words, row_layout_of
from tokenyard.engines.tuning import KernelConfig, Tuning
from tokenyard.handle import Spec
from tokenyard.rows import Payload
from tokenyard.testing import ROUTINGS
from tokenyard.topology import Topology

FLAT, MAJOR, PADDED = ty.Layout
WAYS = {
    FLAT: ("plain", "bias", "two biases", "reduce", "cached", "raw"),
    MAJOR: ("plain", "bias", "weighted", "weighted by the owner", "cached", "raw"),
    PADDED: ("plain", "two biases", "weighted", "weighted by the owner", "cached", "raw"),
}
"""What may follow a dispatch."""
IN_PLACE = ("in place", "in place, two biases", "in place, doubled")
"""Besides, after one with FLAT rows: combines in place; of rows times two, so that those of two
calls in a row differ.
"""


@dataclass(frozen=True)
class Round:
    """One dispatch and what follows; before it, the ranks ``refusers`` refuse one call each."""

    case: Case
    ways: tuple[str, ...]
    cached: Case  # the same picks, another payload
    in_place: bool = False
    refusers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """Calls of one object. ``slots``: rows of the largest row that a ring holds at least, besides
    those it needs.

    ``ranks_per_node``: of engine twolevel; None: engine nvlink. ``net``: nodes reach each other
    through the simulated network; ``mapped``: by it go node headers and announcements only, as
    nodes map each other's memory too. ``workers``: programs of a channel, at most. ``bundled``:
    pairs of channels share them.
    ``receive_bytes``, ``heap_bytes``: of the receive buffer and the heap of engine nvlink.
    """

    world_size: int
    num_experts: int
    num_topk: int
    max_tokens: int
    channels: int
    chunk: int
    rows: int
    slots: int
    rounds: tuple[Round, ...]
    ranks_per_node: int | None = None
    net: bool = False
    mapped: bool = False
    workers: int = 2
    bundled: bool = False
    receive_bytes: int = 0
    heap_bytes: int = 0

    @property
    def grid(self) -> Topology:
        per_node = self.ranks_per_node or self.world_size
        return Topology(self.world_size // per_node, per_node)

    @property
    def tuning(self) -> Tuning:
        whole = KernelConfig(rows=self.rows, block=1024, chunk=self.chunk)
        part = KernelConfig(
            rows=self.rows, block=32, chunk=self.chunk
        )  # a row takes several of its blocks
        return Tuning(
            channels=self.channels,
            dispatch=whole,
            send=whole,
            reduce=part,
            direct=part,
            pull=part,
            forward=part,
            # long rows by expert take several rounds
            push=replace(part, num_warps=1),
            # of whole rows, or of pieces
            gather=replace(part, stages=self.chunk, num_warps=1),
            pushers=self.channels,
            gatherers=2 - self.slots % 2,
            # in place the last worker of some channels is missing, if there are several
            num_sms=self.channels * self.workers + self.channels // 2,
            net_chunk=self.chunk + 1,
            turn=self.rows + 1,
            cast_ahead=self.slots % 2 == 1,
            bundle=2 if self.bundled else 1,
        )

    @cached_property
    def buffer_bytes(self) -> int:
        """Rings that hold few rows of the largest row and wrap around again and again."""
        slot = max(
            largest_slot(case, self.num_topk)
            for each in self.rounds
            for case in (each.case, each.cached)
        )
        ring = (2 * self.chunk + self.slots) * slot
        inner = self.world_size * self.channels * (-(-ring // 256) * 256)
        if self.grid.num_nodes == 1:
            return inner
        far = (
            2
            * (self.grid.num_nodes - 1)
            * self.channels
            * (-(-(3 * self.slots + 2) * slot // 256) * 256)
        )
        return 2 * max(inner, far)

    def config(self, rank: int, timeout: float = 5.0) -> Config:
        return Config(
            num_experts=self.num_experts,
            hidden=8,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens,
            rank=rank,
            world_size=self.world_size,
            timeout=timeout,
            topology=self.grid,
        )


def payload_of(case: Case, rank: int) -> Payload:
    """What ``rank`` brings; every third seed in tensors with gaps."""
    x = case.x[rank]
    payload = Payload(x.data, x.scales) if isinstance(x, ty.Quantized) else Payload(x, None)
    return (
        payload
        if case.seed % 3
        else Payload(*(None if part is None else _with_gaps(part) for part in payload))
    )


def _with_gaps(rows: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(rows.shape[0], rows.shape[1] + 3, dtype=rows.dtype)
    wide[:, 1:-2] = rows
    return wide[:, 1:-2]


def spec_of(case: Case) -> Spec:
    return Spec(
        layout=case.layout,
        exact=case.exact,
        expert_alignment=case.expert_alignment,
        capacity=case.capacity,
    )


def largest_slot(case: Case, num_topk: int) -> int:
    """Bytes of the largest row that any call of a round moves."""
    there = row_layout_of(
        payload_of(case, 0), case.quantize, meta_words(num_topk, experts=True, weighted=True)
    )
    back = row_layout_of(
        Payload(torch.empty(0, case.hidden, dtype=case.expert_rows[0].dtype), None),
        None,
        -(-num_topk // 4) * 4,
    )
    return max(there.slot_bytes, back.slot_bytes)


# Drawing


def draw(world_size: int, seed: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(seed)
    few = world_size > 4
    experts = random.choice(
        (world_size, world_size + 1, 2 * world_size, 2 * world_size + 1, 1 if few else 3)
    )
    scenario = Scenario(
        world_size=world_size,
        num_experts=experts,
        num_topk=random.choice((1, 2, 3, 4)),
        max_tokens=random.choice((2, 3) if few else (3, 5, 9)),
        channels=1
        if few
        else random.choice({2: (1, 2, 2, 3), 3: (1, 2), 4: (1, 1, 2)}[world_size]),
        chunk=random.choice((1, 1, 2)),
        rows=random.choice((1, 1, 2)),
        slots=random.choice((0, 0, 1, 3)),
        rounds=(),
        workers=1 + seed % 4,
    )
    if seed % 3 == 1:
        scenario = replace(scenario, channels=2 * scenario.channels, bundled=True)
    first = _draw_round(scenario, random, seed, few)
    if few or random.random() < 0.5:
        return replace(scenario, rounds=(first,))
    second = _draw_round(scenario, random, seed, few)
    return replace(
        scenario, rounds=(first, _like(first, second) if random.random() < 0.5 else second)
    )


def _like(first: Round, second: Round) -> Round:
    """``second`` with the payload and layout of ``first``: a rank with as many tokens as before
    guesses how many rows come.
    """
    case, other = first.case, second.case
    tokens = case.num_tokens if not case.exact or case.layout is PADDED else other.num_tokens
    case = replace(case, routing=other.routing, num_tokens=tokens, seed=other.seed + 1)
    cached = replace(first.cached, routing=other.routing, num_tokens=tokens, seed=other.seed + 1)
    return Round(case, first.ways, cached, first.in_place)


def _draw_round(scenario: Scenario, random: Random, seed: int, few: bool) -> Round:
    layout, exact = random.choice(tuple(ty.Layout)), random.random() < 0.6
    bounded = not exact or layout is PADDED
    case = Case(
        scenario.world_size,
        routing=random.choice(ROUTINGS),
        num_tokens=scenario.max_tokens if bounded else random.choice((1, 3, scenario.max_tokens)),
        num_topk=scenario.num_topk,
        num_experts=scenario.num_experts,
        layout=layout,
        exact=exact,
        expert_alignment=random.choice((1, 1, 2, 4)) if layout is MAJOR else 1,
        seed=seed,
        **_draw_payload(random),
    )
    cached = replace(case, **_draw_payload(random, other_than=case.hidden))
    ways = tuple(random.sample(WAYS[layout], 1 if few else random.choice((1, 1, 1, 2))))
    case, cached = with_options(case, seed, ways), with_options(cached, seed, ways)
    in_place = layout is FLAT and random.random() < 0.4
    return Round(
        case,
        ways,
        cached,
        in_place,
        (random.randrange(scenario.world_size),) if random.random() < 0.1 else (),
    )


def with_options(case: Case, seed: int, ways: tuple[str, ...]) -> Case:
    """``case`` without weights, or with a capacity: some of those that can be so."""
    random = Random(f"options of {seed}")
    weighted = bool({"weighted", "reduce"} & set(ways)) or random.random() < 0.7
    room = case.world_size * case.num_tokens
    capacity = random.choice((None, 0, 1, 3, room // 2, 2 * room))
    can = case.layout is MAJOR and not case.exact
    return replace(case, weighted=weighted, capacity=capacity if can else None)


def draw_in_place(world_size: int, seed: int) -> Scenario:
    """The scenario of a seed with flat rows, summed in place."""
    scenario, random = draw(world_size, seed), Random(seed)
    return replace(scenario, rounds=tuple(_in_place(each, random) for each in scenario.rounds))


def draw_pushed(world_size: int, seed: int) -> Scenario:
    """The scenario of a seed with a receive buffer, which all combines take or only some."""
    scenario = draw(world_size, seed)
    some = (world_size - 1) * scenario.max_tokens * 24 + 256 * world_size
    return replace(
        scenario,
        receive_bytes=(1 << 20) if seed % 3 else -(-some // 256) * 256,
    )


def _in_place(each: Round, random: Random) -> Round:
    case, cached = (
        replace(one, layout=FLAT, expert_alignment=1, capacity=None)
        for one in (each.case, each.cached)
    )
    ways = (
        random.choice(IN_PLACE),
        *random.sample((*IN_PLACE, "plain", "cached", "raw"), random.choice((0, 1, 2))),
    )
    return Round(case, ways, cached, random.random() < 0.6, each.refusers)


def _draw_payload(random: Random, other_than: int = 0) -> dict[str, Any]:
    mode = random.choice((None, None, None, *ty.Quantize))
    if mode is not None:
        hidden = random.choice([hidden for hidden in (8, 24, 24, 132) if hidden != other_than])
        return {"dtype": random.choice(PLAIN), "hidden": hidden, "quantize": mode}
    hidden = random.choice([hidden for hidden in (8, 16, 17, 24, 40) if hidden != other_than])
    return {"dtype": random.choice((*PLAIN, *QUANTIZED)), "hidden": hidden, "quantize": None}


def rehearsal(part: str, seed: int) -> Scenario:
    """Two ranks whose calls follow each other closely, with rows of other sizes each time.

    ``rings``: fresh, cached and back, again and again, through rings of two slots. ``alone``: the
    same, with one program for each channel. ``in-place buffers``: fresh and cached into in-place
    buffers. ``pushes``: in place, again and again, also when some programs have nothing to do.
    ``receives``: sums by expert, and weights, in a receive buffer. ``announcements``: calls of one
    token. ``plans``: refusals, so that plan follows plan. ``guesses``: more rows than guessed.
    ``lines``: rows so long that their slots are whole lines, and longer than they. ``heap``: rows
    and scales in a heap, until more rows come than one has room for, and a rank has no block.
    ``told``: cached ones too, of which the last is too large for a rank's heap.
    """
    random = Random(seed)
    base = Case(2, num_tokens=9, num_topk=2, num_experts=4, hidden=40, seed=3 * seed + 1)
    tiny = replace(base, num_tokens=1, hidden=8)
    cached = replace(base, hidden=24, dtype=torch.float32)
    few = replace(base, hidden=8, routing="local")
    long = replace(base, num_tokens=5, hidden=2056)
    known = replace(base, routing="dropped", seed=seed)
    scaled = replace(base, dtype=torch.float8_e4m3fn)
    back_and_forth = ("cached", "plain", "cached", "plain")
    rings = (Round(base, back_and_forth, cached),)
    rounds = {
        "rings": rings,
        "alone": rings,
        "buffers": (
            Round(base, ("cached", "plain"), cached, in_place=True),
            Round(base, (), cached, in_place=True),
        ),
        "pushes": (
            Round(
                base,
                ("in place", "in place, doubled", "cached", "in place, two biases"),
                cached,
                in_place=True,
            ),
            Round(tiny, ("in place", "in place, doubled"), tiny),
            Round(
                replace(base, seed=3 * seed + 2),
                ("plain", "in place", "in place, doubled", "in place"),
                cached,
            ),
        ),
        "receives": (
            Round(base, ("reduce", "plain", "reduce"), cached),
            Round(replace(base, layout=MAJOR, hidden=264), ("weighted", "plain"), cached),
            Round(base, ("reduce", "bias"), cached),
        ),
        "barriers": (Round(tiny, back_and_forth, replace(tiny, hidden=16)),),
        "plans": (
            Round(tiny, (), tiny, refusers=(0, 0, 0)),
            Round(tiny, (), tiny, refusers=(1, 1, 1)),
        ),
        "lines": (
            Round(long, ("cached", "plain"), replace(long, dtype=torch.float8_e4m3fn, hidden=4104)),
        ),
        "heap": tuple(
            Round(replace(scaled, routing=name, seed=seed), (), scaled)
            for name in ("uniform", "uniform", "uniform", "one_rank", "uniform")
        ),
        "told": tuple(
            Round(known, ("cached",), replace(known, hidden=hidden, dtype=dtype))
            for hidden, dtype in (
                (24, torch.float32),
                (24, torch.float32),
                (24, scaled.dtype),
                (40, scaled.dtype),
                (4096, torch.float32),
            )
        ),
        "guesses": tuple(
            Round(replace(few, routing=name), (), few) for name in ("local", "one_rank", "uniform")
        ),
    }
    return Scenario(
        world_size=2,
        num_experts=4,
        num_topk=2,
        max_tokens=9,
        channels=2,
        chunk=1 if part in ("rings", "alone") else random.choice((1, 2)),
        rows=2 if part == "pushes" else 1,
        slots=0,
        rounds=rounds[part],
        receive_bytes=1 << 20 if part == "receives" else 0,
        heap_bytes=1 << 16 if part in ("heap", "told") else 0,
        workers=1 if part == "alone" else 2,
    )


SKEWS = {
    "rings": "program",
    "alone": "program",
    "buffers": "rank",
    "pushes": "program",
    "receives": "program",
    "barriers": "program",
    "plans": "rank",
    "guesses": "rank",
    "heap": "rank",
    "told": "rank",
    "lines": "program",
}
"""Which hardware shows most in a rehearsal."""


# Failures (``nvlink_failures.py``)

Ending = tuple[str, str, int]
"""Type and text of an exception, and the rank that it names (-1: none)."""
FINE: Ending = ("", "", -1)
FAILED_RANK = 1
TIMEOUT = 5.0

DISAGREEMENTS = {
    "combine among cached dispatches": "the call",
    "another handle": "the handle",
    "cached: hidden": "hidden",
    "cached: dtype": "dtype",
    "cached: cast": "quantize",
    "cached: in place": "in_place",
    "combine: dtype": "dtype",
    "combine: in place": "in_place",
    "static: hidden": "hidden",
    "static: layout": "layout",
    "exact: hidden": "hidden",
    "exact: layout": "layout",
    "exact: dtype": "dtype",
    "exact among static": "exact",
}
"""What the failed rank does otherwise, and what the message says ranks disagree on."""
