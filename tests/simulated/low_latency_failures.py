"""Ranks that die, are late, or are left out, on simulated ranks with engine low_latency. Reached
through ``nvlink_pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor

import tokenyard as ty
from cases import PLAIN, Case
from low_latency_cases import MAJOR, PADDED, Scenario
from low_latency_mutations import TORN, planted
from low_latency_ranks import MOST_STEPS, RankRun, reached
from nvlink_pool import little_patience
from tokenyard import reference
from tokenyard.engines.base import CallOptions, CombineArguments
from tokenyard.errors import Mismatch, PeerTimeout
from tokenyard.header import CACHED, COMBINE, DISPATCH
from tokenyard.testing import ROUTINGS, assert_same_bits, poisoned
from tokenyard.testing.simulator import RanksFailed, SimulatedRank, simulate

TIMEOUT = 5.0
WAYS = ("plain", "weighted", "weighted by the owner")
CALLS = 4
"""Dispatches of a life, a combine behind each."""
WIDE = 1000
"""From this seed on lives differ more: in sizes, layouts, dtypes and casts."""


def life(world_size: int, seed: int, per_node: int = 0, once: bool = False) -> Scenario:
    """What the object is made for; :func:`case_of` says what it does. ``per_node``, ``once``: see
    :class:`Scenario`."""
    narrow = Scenario(
        world_size=world_size,
        num_experts=2 * world_size + seed % 2,
        num_topk=3,
        max_tokens=3,
        hidden=8,
        programs=world_size + 1,
        rounds=(),
        per_node=per_node,
        network=seed % 4 != 3,
        once=once,
        put_bytes=(1, 32, 128)[seed % 3],
    )
    random = Random(f"life of {seed}")
    return narrow if seed < WIDE else replace(
        narrow,
        num_experts=random.choice((1, world_size - 1, world_size, world_size + 1, 2 * world_size)),
        num_topk=random.choice((1, 2, 3, 5)),
        max_tokens=random.choice((1, 2, 3, 4)),
        hidden=random.choice((1, 7, 8, 33, 40, 130)),
        programs=world_size + random.choice((0, 0, 1, 3)),
        words=random.choice((8, 64)),
        pieces=random.choice((1, 2)),
        shares=random.choice((1, 2, 4, 8)),
        put_bytes=random.choice((1, 32, 128, 400)),
    )  # fmt: skip


def coming(
    rank: int, active: Sequence[bool], tree: int | None, *, back: bool = False
) -> list[bool]:
    """Of which ranks ``rank`` gets rows (``back``: sums), if those ``active`` are there: not of
    those whose rail is not."""
    if tree is None:
        return list(active)

    def rail(peer: int) -> int:
        near, far = (peer, rank) if back else (rank, peer)
        return near // tree * tree + far % tree if peer // tree != rank // tree else peer

    return [here and active[rail(peer)] for peer, here in enumerate(active)]


def case_of(scenario: Scenario, seed: int, call: int) -> Case:
    """What the oracle says of it is by expert, padded; :func:`laid_out` is what is asked for."""
    narrow = Case(
        scenario.world_size,
        num_tokens=scenario.max_tokens,
        num_topk=scenario.num_topk,
        num_experts=scenario.num_experts,
        hidden=scenario.hidden,
        layout=PADDED,
        exact=False,
        seed=CALLS * seed + call,
    )
    random = Random(f"call {call} of {seed}")
    return narrow if seed < WIDE else replace(
        narrow,
        routing=random.choice(("uniform", *ROUTINGS)),
        dtype=random.choice(PLAIN),
        quantize=random.choice((None, None, None, *ty.Quantize)),
    )  # fmt: skip


def laid_out(case: Case) -> Case:
    """Some of a wide life are packed."""
    packed = case.seed >= CALLS * WIDE and case.seed % 3 == 0
    return replace(case, layout=MAJOR) if packed else case


def blocks(recv: ty.Received) -> list[tuple[int, int]]:
    """Where rows of each expert begin and end."""
    if recv.expert_offsets is not None:
        return list(pairwise(recv.expert_offsets.tolist()))
    experts, rows = recv.source.shape
    return [(rows * expert, rows * (expert + 1)) for expert in range(experts)]


@dataclass(frozen=True)
class Part(Case):
    """A case in which only some ranks bring tokens."""

    present: tuple[int, ...] = ()

    def tokens_of(self, rank: int) -> int:
        return super().tokens_of(rank) if rank in self.present else 0


@lru_cache(maxsize=512)
def part_of(case: Case, present: tuple[int, ...]) -> Part:
    fields = {name: getattr(case, name) for name in Case.__dataclass_fields__}
    return Part(**fields, present=present)


def row_of(case: Case, rank: int, expert: int, source: int) -> int:
    """Row of the full case's expert block that holds ``source``."""
    return int((case.expected[rank].source[expert] == source).nonzero()[0, 0])


def check_rows(
    recv: ty.Received, case: Case, rank: int, before: Sequence[bool], after: Sequence[bool]
) -> None:
    """All rows of ranks that were there all the time, none of ranks that were not, some of those
    that fell silent.
    """
    want, scales = case.expected[rank], None if recv.scales is None else recv.scales.flatten(0, -2)
    sources, x, weights = recv.source.flatten(), recv.x.flatten(0, -2), recv.row_weights.flatten()
    for expert, (first, end) in enumerate(blocks(recv)):
        got = [source for source in sources[first:end].tolist() if source >= 0]
        full = [source for source in want.source[expert].tolist() if source >= 0]
        assert got == [source for source in full if source in got], "rows in order, none twice"
        for source in full:
            assert after[source >> 32] <= (source in got) <= before[source >> 32], (
                rank,
                expert,
                source,
            )
        for source in got:
            here = first + int((sources[first:end] == source).nonzero()[0, 0])
            there = row_of(case, rank, expert, source)
            assert_same_bits(x[here], want.x[expert, there], what="x", rank=rank)
            assert weights[here] == want.row_weights[expert, there]
            if scales is not None:
                assert_same_bits(scales[here], want.scales[expert, there], what="scales", rank=rank)
            if recv.source_ranges is not None:
                begin, count = recv.source_ranges[expert, source >> 32].tolist()
                assert begin <= here - first < begin + count
    known = sum(int((sources[first:end] >= 0).sum()) for first, end in blocks(recv))
    assert known == int((sources >= 0).sum()), "rows behind the last block"
    assert not weights[sources < 0].any()


def rows_for(recv: ty.Received, case: Case, rank: int) -> Tensor:
    """What experts make of the rows that came; NaN elsewhere."""
    out = torch.full(
        (*recv.source.shape, case.hidden), float("nan"), dtype=case.expert_rows[rank].dtype
    )
    rows, sources = out.view(-1, case.hidden), recv.source.flatten().tolist()
    for expert, (first, end) in enumerate(blocks(recv)):
        for place in range(first, end):
            if sources[place] >= 0:
                there = row_of(case, rank, expert, sources[place])
                rows[place] = case.expert_rows[rank][expert, there]
    return out


@lru_cache(maxsize=512)
def sums_of(
    case: Case, way: str, present: tuple[int, ...], tree: int | None = None
) -> list[reference.ReferenceCombined]:
    """The oracle's sums if only those of the ranks ``present`` come."""
    absent = [set(range(case.world_size)) - set(present)] * case.world_size
    options: dict[str, Any] = {} if way == "plain" else {"weighted": True}
    options["ranks_per_node"] = tree
    if way == "weighted by the owner":
        options["topk_weights"] = [2 * weights for _, weights in case.picks]
    return reference.combine(case.expert_rows, case.expected, absent=absent, **options)


def check_sums(
    got: Tensor,
    lost: Tensor | None,
    case: Case,
    way: str,
    rank: int,
    before: Sequence[bool],
    after: Sequence[bool],
    tree: int | None = None,
) -> None:
    """Each token's sum is that with or without each of the ranks that fell silent, and ``lost``
    says which.
    """
    sure, maybe = (
        {r for r, here in enumerate(coming(rank, active, tree, back=True)) if here}
        for active in (after, before)
    )
    unsure = sorted(maybe - sure)
    wanted = [
        sums_of(case, way, tuple(sorted(sure.union(some))), tree)[rank]
        for count in range(len(unsure) + 1)
        for some in combinations(unsure, count)
    ]
    for token in range(got.shape[0]):
        bits, told = got[token].view(torch.int16), None if lost is None else lost[token]
        assert any(
            torch.equal(bits, each.x[token].view(torch.int16))
            and (told is None or told == each.lost_weights[token])
            for each in wanted
        ), (
            f"rank {rank}: token {token} is {got[token]} and lacks {told}, not one of "
            f"{[(each.x[token], each.lost_weights[token]) for each in wanted]}"
        )


def sum_up(
    mine: RankRun, recv: ty.Received, case: Case, way: str, in_two: bool, lost: Tensor | None = None
) -> Tensor:
    """``lost``: to be filled."""
    given: dict[str, Any] = (
        {} if lost is None else {"options": CallOptions(lost_weights=lost.fill_(torch.nan))}
    )
    if way == "weighted":
        given["weights"] = recv.handle.arrived.weights
    elif way == "weighted by the owner":
        given["weights"] = 2 * case.picks[mine.rank][1]
    rows = rows_for(recv, case, mine.rank).flatten(0, -2)
    return mine.call(
        in_two,
        mine.engine.combine,
        CombineArguments(rows, recv.handle.plan, recv.handle.spec, **given),
    )[0]


def seen_by(mine: RankRun, dead: int | None) -> list[bool]:
    """Who is surely there, as far as ``mine`` knows. If rows cross once per node, a rail may know
    that a rank is ``dead`` before others do."""
    active = mine.engine.active_ranks()
    if dead == mine.rank:
        return [rank == dead for rank in range(len(active))]
    if mine.tree and dead is not None:
        active[dead] = False
    return active


def ten_good_calls(
    mine: RankRun, scenario: Scenario, seed: int, gone: tuple[int, ...] = ()
) -> None:
    """Five dispatches and a combine behind each: of all ranks but those that are ``gone`` there is
    everything, and nobody is given up."""
    there = [rank not in gone for rank in range(scenario.world_size)]
    for call in range(CALLS, CALLS + 5):
        assert mine.engine.active_ranks() == there
        live(mine, scenario, seed, (call,))
    assert mine.engine.active_ranks() == there


def live(
    mine: RankRun,
    scenario: Scenario,
    seed: int,
    calls: Iterable[int] = range(CALLS),
    dead: int | None = None,
) -> None:
    """All calls, each checked against what this rank knows of who is there. ``dead``: a rank that
    may be; this one: the others may have given it up."""
    for call in calls:
        case, way, in_two = (
            case_of(scenario, seed, call),
            WAYS[(call + seed) % 3],
            (call + seed) % 4 == 3,
        )
        before = mine.engine.active_ranks()
        recv = mine.dispatch(laid_out(case), in_two)
        middle = seen_by(mine, dead)
        came = (coming(mine.rank, active, mine.tree) for active in (before, middle))
        check_rows(recv, case, mine.rank, *came)
        lost = torch.empty(recv.handle.num_tokens) if seed % 4 else None
        got = sum_up(mine, recv, case, way, in_two, lost)
        check_sums(got, lost, case, way, mine.rank, before, seen_by(mine, dead), mine.tree)


Ending = tuple[str, list[bool]]
"""What went wrong, and which ranks take part at the end."""


def play(
    scenario: Scenario, body: Callable[[RankRun], None], seed: int, **options: Any
) -> tuple[list[Ending | None], int]:
    """Run ``body`` on every rank. How each ended (None: it died), and the steps that it took."""
    steps: list[int] = []

    def guarded(ranks: SimulatedRank) -> Ending:
        try:
            mine = RankRun(ranks, scenario, TIMEOUT)
        except PeerTimeout as error:
            return f"absent {error.rank}", []
        body(mine)
        steps.append(ranks.sim.steps)
        active, silent = mine.engine.active_ranks(), mine.engine.silent_rank()
        assert silent is None or not active[silent], (active, silent)
        return "", active

    with poisoned(), reached(scenario), little_patience():
        options = {"max_steps": MOST_STEPS, "strict": True, "timeouts": True, **options}
        return simulate(scenario.world_size, guarded, seed=seed, **options), max(steps, default=0)


STEPS = {2: 2300, 3: 3900, 4: 5200}
"""About so many has a life without a death, by world size: a death may come at any of them, or, now
and then, too late.
"""


def death(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> tuple[int, int, list[Ending | None]]:
    """A rank dies at some step of its life, and the others make ten good calls. Which, when (of
    1000), and how all ended."""
    random = Random(seed)
    victim, scenario, steps = (
        random.randrange(world_size),
        life(world_size, seed, per_node, once),
        STEPS[world_size],
    )
    step, marked = random.randrange(steps), dict[int, list[bool]]()

    def body(mine: RankRun) -> None:
        live(mine, scenario, seed, dead=victim)
        assert mine.engine.silent_rank() == (None if mine.engine.active_ranks()[victim] else victim)
        marked[mine.rank] = mine.engine.active_ranks()
        if mine.rank != victim:  # which is gone now, or dead
            with mine.own:
                mine.engine.mask(victim)
            ten_good_calls(mine, scenario, seed, (victim,))

    # a chain of waits for a rank that is gone is longer by the rail: seed 1 of 2x2 takes 400,000
    most = MOST_STEPS * (2 if once else 1)
    endings, _ = play(scenario, body, seed, kill={victim: step}, max_steps=most)
    endings = [ending and (ending[0], marked.get(rank, [])) for rank, ending in enumerate(endings)]
    return victim, 1000 * step // steps, endings


def freeze(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> tuple[bool, list[Ending | None]]:
    """A rank stops at some step of its life, in a kernel or between two, and goes on when another
    has made its calls. It writes on, makes its own calls, and is back: then all make ten good
    calls. Whether the others had given it up, and how all ended.
    """
    random = Random(seed)
    victim, scenario = random.randrange(world_size), life(world_size, seed, per_node, once)
    calls = random.randrange(1, 3)  # each takes it long to make alone
    step = random.randrange(STEPS[world_size] * calls // CALLS)
    waker = random.choice([rank for rank in range(world_size) if rank != victim])
    given_up: list[bool] = []

    def body(mine: RankRun) -> None:
        if mine.rank == victim:
            mine.ranks.sim.freeze(victim, mine.ranks.sim.steps + step)
        live(mine, scenario, seed, range(calls), dead=victim)
        if mine.rank == waker:
            mine.ranks.sim.thaw(victim)
        given_up.append(mine.rank != victim and not mine.engine.active_ranks()[victim])
        all_back(mine)
        ten_good_calls(mine, scenario, seed)

    endings, _ = play(scenario, body, seed, max_steps=4 * MOST_STEPS)
    return any(given_up), endings


def deaths_in_a_combine(
    world_size: int, seed: int, deaths: int, per_node: int = 0, once: bool = False
) -> list[tuple[bool, list[float]]]:
    """Rank 1 dies at each of some steps of a combine. Whether rank 0 marks it, and what its tokens
    lack.
    """
    scenario, way = life(world_size, seed, per_node, once), WAYS[seed % 3]
    case = case_of(scenario, seed, 0)
    began: list[int] = []
    told: list[tuple[bool, list[float]]] = []

    def body(mine: RankRun) -> None:
        recv = mine.dispatch(laid_out(case))
        began.append(mine.ranks.sim.steps)
        before, lost = mine.engine.active_ranks(), torch.empty(recv.handle.num_tokens)
        got = sum_up(mine, recv, case, way, seed % 2 == 1, lost)
        after = seen_by(mine, 1)
        check_sums(got, lost, case, way, mine.rank, before, after, mine.tree)
        if mine.rank == 0:
            told.append((not mine.engine.active_ranks()[1], [float(each) for each in lost]))

    _, ended = play(scenario, body, seed)
    first = max(began)
    for death in range(deaths):
        play(scenario, body, seed, kill={1: first + (ended - first) * death // deaths})
    return told[1:]


def torn(first: int, end: int, agree: bool) -> int:
    """The first of these seeds in which only some channels of a token lack a rank that dies in a
    combine; -1: there is none.
    """
    with planted("" if agree else TORN.kind):
        for seed in range(first, end):
            try:
                deaths_in_a_combine(2, seed, 4)
            except (AssertionError, RanksFailed):
                return seed
    return -1


def meet(ranks: SimulatedRank, name: str) -> None:
    """All ranks' hosts come here."""
    here = ranks.world.gathered(("meet", name))
    here[ranks.rank] = 1
    ranks.sim.happened()
    ranks.wait_until(
        lambda: len(here) == ranks.world_size, 1000 * TIMEOUT, f"waits for all at {name}"
    )


def all_back(mine: RankRun) -> None:
    """All have made the same number of calls, and let each other in."""
    meet(mine.ranks, "back")
    with mine.own:
        for rank in range(mine.ranks.world_size):
            if rank != mine.rank:
                mine.engine.mask(rank, active=True)
    meet(mine.ranks, "go on")


def masked_by_one(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> list[Ending | None]:
    """One rank leaves another out by hand, which does not know it, nor does anybody else. Whoever
    waits for what does not come gives that rank up; all results say what they lack. Then all are
    back, and make ten good calls.
    """
    scenario = life(world_size, seed, per_node, once)
    one, other = Random(seed).sample(range(world_size), 2)

    def body(mine: RankRun) -> None:
        live(mine, scenario, seed, range(1))
        if mine.rank == one:
            with mine.own:
                mine.engine.mask(other)
        live(mine, scenario, seed, range(1, 2), dead=mine.rank)
        assert mine.rank != other or not mine.engine.active_ranks()[one]
        all_back(mine)
        ten_good_calls(mine, scenario, seed)

    return play(scenario, body, seed, max_steps=4 * MOST_STEPS)[0]


def left_out_and_back(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> list[Ending | None]:
    """A rank is left out by hand, the others go on, and it comes back."""
    scenario, victim = life(world_size, seed, per_node, once), seed % world_size

    def body(mine: RankRun) -> None:
        live(mine, scenario, seed, range(1))
        others = [
            r for r in range(world_size) if r != mine.rank and (mine.rank == victim or r == victim)
        ]
        with mine.own:
            for rank in others:
                mine.engine.mask(rank)
        live(mine, scenario, seed, range(1, 3))
        meet(mine.ranks, "back")
        with mine.own:
            for rank in others:
                mine.engine.mask(rank, active=True)
        meet(mine.ranks, "go on")
        live(mine, scenario, seed, range(3, 5))
        assert all(mine.engine.active_ranks())

    return play(scenario, body, seed, timeouts=False)[0]


def late_and_back(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> list[Ending | None]:
    """A rank is silent for longer than the timeout, comes too late, makes its calls alone, and
    joins again.
    """
    scenario, victim = life(world_size, seed, per_node, once), seed % world_size

    def body(mine: RankRun) -> None:
        live(mine, scenario, seed, range(1))
        if mine.rank == victim:
            mine.ranks.wait_until(lambda: False, 10 * TIMEOUT, "is late")
        case = case_of(scenario, seed, 1)
        for _ in range(2):
            mine.dispatch(laid_out(case))
        assert mine.rank == victim or not mine.engine.active_ranks()[victim]
        all_back(mine)
        live(mine, scenario, seed, range(2, 4))

    return play(scenario, body, seed, max_steps=2 * MOST_STEPS)[0]


def refusal(
    world_size: int, seed: int, per_node: int = 0, once: bool = False
) -> list[Ending | None]:
    """A rank refuses a dispatch, then a combine: the others miss its tokens or its rows, and nobody
    is left out.
    """
    scenario, refuser = life(world_size, seed, per_node, once), seed % world_size
    there = [rank != refuser for rank in range(world_size)]

    def body(mine: RankRun) -> None:
        case, way = case_of(scenario, seed, 0), WAYS[seed % 3]
        if mine.rank == refuser:
            with mine.own:
                assert mine.engine.refuse(CACHED if seed % 2 else DISPATCH, False, "x is wrong")
        else:
            recv = mine.dispatch(laid_out(case))
            came = coming(mine.rank, there, mine.tree)
            check_rows(recv, case, mine.rank, came, came)
        recv = mine.dispatch(laid_out(case))
        check_rows(recv, case, mine.rank, [True] * world_size, [True] * world_size)
        if mine.rank == refuser:
            with mine.own:
                assert mine.engine.refuse(COMBINE, False, "x is wrong")
        else:
            lost = torch.empty(recv.handle.num_tokens)
            come = coming(mine.rank, there, mine.tree, back=True)
            others = tuple(rank for rank in range(world_size) if come[rank])
            got, want = (
                sum_up(mine, recv, case, way, False, lost),
                sums_of(case, way, others, mine.tree)[mine.rank],
            )
            assert_same_bits(got, want.x, what="sums without the refuser", rank=mine.rank)
            assert_same_bits(
                lost, want.lost_weights, what="what the refuser would have added", rank=mine.rank
            )
        live(mine, scenario, seed, range(1, 3))
        assert all(mine.engine.active_ranks())

    return play(scenario, body, seed, timeouts=False)[0]


def disagreement(seed: int) -> list[Ending | None]:
    """A rank dispatches another dtype: whoever sees it says so, and they go on apart."""
    scenario, failed_rank = life(3, seed), seed % 3

    def body(mine: RankRun) -> None:
        case = case_of(scenario, seed, 0)
        with suppress(
            Mismatch
        ):  # a rank that was left out before it told the others only sees that they are silent
            mine.dispatch(replace(case, dtype=torch.float16) if mine.rank == failed_rank else case)

    return play(scenario, body, seed)[0]
