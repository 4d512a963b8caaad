"""Programs of calls drawn from a seed: what a user may ask of one ``ExpertParallel``, in any order.
``drawn_runs.py`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor

import tokenyard as ty
from cases import PLAIN, Case
from tokenyard import reference
from tokenyard.testing import ROUTINGS, payload, routing
from tokenyard.types import QUANTIZED_DTYPES

FLAT, MAJOR, PADDED = ty.Layout
MICRO = torch.float8_e8m0fnu
FORMATS = (
    (torch.float32, 1),
    (torch.float32, 3),
    (torch.int32, 1),
    (torch.int32, 2),
    (MICRO, 0),
)
"""Dtype and number of scales of rows that the caller has cast."""


@dataclass(frozen=True)
class Sizes:
    """Of an object. ``per_node``: ranks of a node; 0: there are no nodes. ``gone``: ranks that die
    before all calls; ``replicas``: what ``recover`` is given then.
    """

    engine: str
    ranks: int
    experts: int
    top: int
    most: int
    hidden: int
    per_node: int = 0
    once: bool = False
    gone: tuple[int, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()

    @property
    def low(self) -> bool:
        return self.engine == "low_latency"

    @property
    def tree(self) -> int | None:
        """Ranks of a node in the tree of sums; None: one level."""
        levels = (self.engine == "twolevel" or self.once) and not self.gone
        return self.per_node if levels and self.per_node else None

    @cached_property
    def table(self) -> list[int]:
        """Where picks of each expert go; -1: they are dropped."""
        bounds, table = ty.expert_bounds(self.experts, self.ranks), list(range(self.experts))
        for rank in self.gone:
            table[bounds[rank] : bounds[rank + 1]] = [-1] * (bounds[rank + 1] - bounds[rank])
        left = set(table) - {-1}
        for row in self.replicas:
            for at, expert in enumerate(row):
                others = [each for each in row[at + 1 :] + row[:at] if each in left]
                if expert >= 0 and expert not in left:
                    table[expert] = (*others, -1)[0]
        return table


@dataclass(frozen=True, eq=False)
class Fresh(Case):
    """A dispatch: ``tokens`` and ``routings`` by rank. ``scales``: one of :data:`FORMATS`, of rows
    that the caller has cast. ``refuser``: a rank that has a bad argument, "x" or "ids"; -1: none
    has."""

    sizes: Sizes | None = None
    tokens: tuple[int, ...] = ()
    routings: tuple[str, ...] = ()
    rows_seed: int = 0
    scales: tuple[torch.dtype, int] | None = None
    weights_dtype: torch.dtype = torch.float32
    in_place: bool = False
    grad: bool = False
    refuser: int = -1
    bad: str = ""

    @cached_property
    def asked(self) -> list[tuple[Tensor, Tensor]]:
        """Picks as they are given."""
        given = [
            routing(name, 0 if name == "empty_ranks" else rank, self.world_size, tokens,
                    self.num_topk, self.num_experts, self.seed + rank)
            for rank, (name, tokens) in enumerate(zip(self.routings, self.tokens, strict=True))
        ]  # fmt: skip
        return [(idx, weights.to(self.weights_dtype)) for idx, weights in given]

    @cached_property
    def picks(self) -> list[tuple[Tensor, Tensor]]:  # pyright: ignore
        """Those that go somewhere."""
        assert self.sizes is not None
        table = torch.tensor([*self.sizes.table, -1])
        picks = [(table[idx], weights) for idx, weights in self.asked]
        if self.bad == "ids":
            picks[self.refuser][0][0, 0] = -1
        return picks

    @cached_property
    def x(self) -> list[Tensor | ty.Quantized]:  # pyright: ignore
        return [self._rows(rank, tokens) for rank, tokens in enumerate(self.tokens)]

    def _rows(self, rank: int, tokens: int) -> Tensor | ty.Quantized:
        if self.scales is None:
            return payload(rank, tokens, self.hidden, self.dtype, self.rows_seed)
        dtype, number = self.scales
        if dtype is MICRO:
            plain = payload(rank, tokens, self.hidden, torch.bfloat16, self.rows_seed)
            return reference.quantize(plain, ty.Quantize.MXFP8)
        rows = payload(rank, tokens, self.hidden, self.dtype, self.rows_seed)
        random = torch.Generator().manual_seed(self.rows_seed + rank)
        words = torch.randint(-(2**31), 2**31, (tokens, number), generator=random)
        return ty.Quantized(rows, words.int() if dtype is torch.int32 else words.float())

    def lost(self, rank: int, weights: Tensor | None) -> Tensor:
        """What the picks weigh that go to nobody, of the merged ones."""
        assert self.sizes is not None
        idx = self.asked[rank][0]
        merged, weights, _ = reference.merge_picks(idx, weights)
        lost = torch.zeros(len(idx))
        for token, picks in enumerate(merged.tolist()):
            for at, pick in enumerate(picks):
                if pick >= 0 and self.sizes.table[pick] < 0:
                    lost[token] += 1.0 if weights is None else weights[token, at]
        return lost

    @property
    def can_be_in_place(self) -> bool:
        bounded = max(self.tokens) <= self.num_tokens
        return self.sizes is not None and not self.sizes.low and self.layout is FLAT and bounded


@dataclass(frozen=True, eq=False)
class Cached:
    """A dispatch along the routing of step number ``of``: ``case`` is that with other rows."""

    of: int
    case: Fresh

    @property
    def in_place(self) -> bool:
        return self.case.in_place


@dataclass(frozen=True, eq=False)
class Back:
    """A combine of rows of step number ``of``, which was ``case``. ``weighting``: "", "carried",
    "owner" or "reduced"; ``biases``: dtypes of terms."""

    of: int
    case: Fresh
    dtype: torch.dtype
    weighting: str
    biases: tuple[torch.dtype, ...]
    in_place: bool
    lost: bool
    grad: bool
    seed: int

    def random(self, rank: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + rank)

    @cached_property
    def rows(self) -> list[Tensor]:
        """What experts return."""
        shapes = [(*each.source.shape, self.case.hidden) for each in self.case.expected]
        return [
            torch.randn(shape, generator=self.random(rank)).to(self.dtype)
            for rank, shape in enumerate(shapes)
        ]

    @cached_property
    def terms(self) -> list[tuple[Tensor, ...]]:
        hidden = self.case.hidden
        return [
            tuple(payload(r, tokens, hidden, d, self.seed + i) for i, d in enumerate(self.biases))
            for r, tokens in enumerate(self.case.tokens)
        ]

    @cached_property
    def reduced(self) -> list[Tensor]:
        """Weights to reduce."""
        shapes = [(*each.source.shape, self.case.num_topk) for each in self.case.expected]
        return [torch.rand(shape, generator=self.random(r)) for r, shape in enumerate(shapes)]

    @cached_property
    def owned(self) -> list[Tensor]:
        """Weights of the owners."""
        return [0.5 + weights.float() for _, weights in self.case.picks]

    @property
    def weights(self) -> list[Tensor] | None:
        """By which sums are weighted."""
        carried = [weights.float() for _, weights in self.case.picks]
        return {"owner": self.owned, "carried": carried}.get(self.weighting)

    @cached_property
    def sums(self) -> list[reference.ReferenceCombined]:
        assert self.case.sizes is not None
        given: dict[str, Any] = {"weighted": self.weights is not None}
        if self.weighting == "owner":
            given["topk_weights"] = self.owned
        elif self.weighting == "reduced":
            given["reduce_weights"] = self.reduced
        if self.biases:
            given["bias"] = [term if len(term) > 1 else term[0] for term in self.terms]
        tree = self.case.sizes.tree
        return reference.combine(self.rows, self.case.expected, ranks_per_node=tree, **given)


Step = Fresh | Cached | Back


@dataclass(frozen=True, eq=False)
class Program:
    """``num_sms``: of the object; ``small``: its rings hold a few rows."""

    sizes: Sizes
    steps: tuple[Step, ...]
    num_sms: int | None
    small: bool


def draw(engine: str, ranks: int, per_node: int, seed: int, lose: bool = False) -> Program:
    """The program of a seed. ``lose``: a rank dies before it."""
    random, few = Random(f"{engine} {ranks} {per_node} {seed}"), ranks > 4
    sizes = Sizes(
        engine=engine,
        ranks=ranks,
        experts=random.choice((1, 2, 3, max(1, ranks - 1), ranks, ranks + 1, 2 * ranks, 9)),
        top=random.choice((1, 1, 2, 3, 5)),
        most=random.choice((1, 2, 3) if few else (1, 2, 3, 5, 9)),
        hidden=random.choice((1, 7, 8, 24, 33, 40, 130, 300)),
        per_node=per_node,
        once=engine == "low_latency" and per_node > 1 and random.random() < 0.6,
    )
    if lose:
        ids, copies = random.sample(range(sizes.experts), sizes.experts), random.choice((1, 2, 3))
        rows = [ids[at : at + copies] for at in range(0, len(ids), copies)]
        table = tuple((*row, *[-1] * (copies - len(row))) for row in rows)
        sizes = replace(sizes, gone=(random.randrange(ranks),), replicas=table)
    steps: list[Step] = []
    for number in range(random.choice((2, 3)) if few else random.choice((3, 4, 6))):
        steps.append(_step(sizes, steps, random, 100 * seed + 10 * number))
    num_sms = random.choice((None, max(2, ranks // 2 + 1)))
    return Program(sizes, tuple(steps), num_sms, random.random() < 0.7)


def _step(sizes: Sizes, before: list[Step], random: Random, seed: int) -> Step:
    calls = [(at, each) for at, each in enumerate(before) if isinstance(each, Fresh)]
    fresh = [(at, each) for at, each in calls if each.refuser < 0]
    kind = random.choice(("fresh", "fresh", "cached", "back", "back", "back"))
    if random.random() < 0.12 and not sizes.once:  # else a rail may be missing
        return _refused(sizes, random, seed)
    if not fresh or kind == "fresh":
        like = fresh[-1][1] if fresh and random.random() < 0.4 else None
        return _fresh(sizes, random, seed, like)
    at, case = random.choice((fresh[-1], random.choice(fresh)))
    if kind == "cached" and not sizes.low:
        case = replace(case, **_rows(random, seed), in_place=_in_place(case, random))
        return Cached(at, case)
    return _back(at, case, random, seed)


def _in_place(case: Fresh, random: Random) -> bool:
    return case.can_be_in_place and random.random() < 0.4


def _fresh(sizes: Sizes, random: Random, seed: int, like: Fresh | None) -> Fresh:
    layout = random.choice((MAJOR, PADDED) if sizes.low else tuple(ty.Layout))
    exact = not sizes.low and random.random() < 0.6
    large = exact and layout is not PADDED and random.random() < 0.3
    most = 2 * sizes.most + 1 if large else sizes.most
    tokens = [random.choice((0, 1, most, random.randrange(most + 1))) for _ in range(sizes.ranks)]
    tokens = [0 if rank in sizes.gone else each for rank, each in enumerate(tokens)]
    one = random.choice(ROUTINGS)
    names = [random.choice((one, one, random.choice(ROUTINGS))) for _ in range(sizes.ranks)]
    if like is not None:  # a call of the same kind, with other tokens
        most = sizes.most if max(like.tokens) <= sizes.most else most
        tokens = tuple(min(each, most) for each in tokens)
        return replace(like, tokens=tokens, routings=tuple(names), seed=seed, rows_seed=seed)
    capacity = random.choice((None, None, 0, 1, 3, 5, sizes.ranks * sizes.most))
    made = Fresh(
        sizes.ranks, num_tokens=sizes.most, num_topk=sizes.top, num_experts=sizes.experts,
        hidden=sizes.hidden, layout=layout, exact=exact, seed=seed, sizes=sizes,
        tokens=tuple(tokens), routings=tuple(names),
        expert_alignment=random.choice((1, 1, 2, 3, 16)) if layout is MAJOR else 1,
        capacity=capacity if layout is MAJOR and not exact else None,
        weighted=random.random() < 0.7,
        weights_dtype=random.choice((torch.float32, torch.float32, torch.bfloat16)),
        **_rows(random, seed),
    )  # fmt: skip
    in_place = _in_place(made, random)
    grad = made.quantize is None and made.scales is None and not sizes.low and not in_place
    return replace(made, in_place=in_place, grad=grad and random.random() < 0.3)


def _refused(sizes: Sizes, random: Random, seed: int) -> Fresh:
    """A dispatch of which one rank has a bad argument, and which all outlive."""
    case = _fresh(sizes, random, seed, None)
    rank = random.choice([rank for rank in range(sizes.ranks) if rank not in sizes.gone])
    bad = random.choice(("x", "ids")) if case.tokens[rank] else "x"
    tokens = list(case.tokens)
    if sizes.low and bad == "x":  # the others go on without it
        tokens[rank] = 0
    exact, most = not sizes.low, {"tokens": tuple(tokens), "refuser": rank, "bad": bad}
    return replace(case, exact=exact, capacity=None, in_place=False, grad=False, **most)


def _rows(random: Random, seed: int) -> dict[str, Any]:
    """Plain, cast on the way, or by the caller."""
    kind = random.choice(("plain", "plain", "plain", "cast", "cast", "given"))
    rows: dict[str, Any] = {"rows_seed": seed, "quantize": None, "scales": None}
    if kind == "given":
        scales = random.choice(FORMATS)
        micro = scales[0] is MICRO
        dtype = torch.float8_e4m3fn if micro else random.choice(QUANTIZED_DTYPES)
        return rows | {"dtype": dtype, "scales": scales}
    mode = random.choice(tuple(ty.Quantize)) if kind == "cast" else None
    return rows | {"dtype": random.choice(PLAIN), "quantize": mode}


def _back(at: int, case: Fresh, random: Random, seed: int) -> Back:
    ways = ["", "owner", *(["carried"] if case.weighted else [])]
    ways = ["", "reduced"] if case.layout is FLAT else ways
    in_place = _in_place(case, random)
    weighting = "" if in_place else random.choice(ways)
    grad = not in_place and weighting in ("", "owner") and random.random() < 0.4
    assert case.sizes is not None
    return Back(
        of=at,
        case=case,
        dtype=random.choice(PLAIN),
        weighting=weighting,
        biases=tuple(random.choice(PLAIN) for _ in range(random.choice((0, 0, 1, 2)))),
        in_place=in_place,
        lost=random.random() < 0.3,
        grad=grad and not case.sizes.low,
        seed=seed,
    )
