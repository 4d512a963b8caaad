"""Stories of ranks that get puts: one that is given up just as its rows come, and is back before
the combine; two objects whose calls are under way together; a network that keeps messages back;
the example of the kernels.
Reached through ``nvlink_pool.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from cases import Case
from low_latency_cases import PADDED, Round, Scenario, rehearsal
from low_latency_failures import TIMEOUT, WAYS, case_of, life, meet, play, sum_up, sums_of
from low_latency_mutations import NO_FENCE, planted
from low_latency_ranks import MOST_STEPS, RankRun, reached, run
from tokenyard.engines.base import CombineArguments
from tokenyard.kernels.low_latency_memory import CHUNKS, PIECES
from tokenyard.testing import assert_same_bits, poisoned
from tokenyard.testing.simulator import SimulatedRank, SimulationError, scheduler, simulate
from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.network import Message, Network
from tokenyard.testing.simulator.pages import raw

_T = TypeVar("_T")

PRESENT = ((0,), (1,), (0, 1), ())
"""Ranks whose parts a sum may have."""


def late_rows(seed: int) -> bool:
    """Rank 1 waits for rank 0's rows in vain: for all, or for all chunks but the first. As soon as
    a program of it has left rank 0 out, they are there: others still take them. Whether some rows
    came, but not all.
    """
    scenario = replace(life(2, seed, 1), network=True, num_experts=2)
    case, way = case_of(scenario, seed, 0), WAYS[seed % 3]
    engines: dict[int, Any] = {}
    kept: list[Message] = []
    torn: list[bool] = []

    def hold(mine: RankRun) -> None:
        """Chunks of rows wait, of half 0."""
        network, sizes = mine.ranks.sim.network, mine.engine._workspace.sizes
        put = network.put_signal

        def put_signal(*args: int) -> None:
            put(*args)
            message = network.on_way[-1]
            word = (message.signal - network.regions[0][0][message.to]) // 8
            if message.to == 1 and word - sizes.region.arrivals in range(seed % 2, CHUNKS):
                kept.append(network.on_way.pop())

        network.put_signal = put_signal

    def body(mine: RankRun) -> None:
        rank, network = mine.rank, mine.ranks.sim.network
        engines[rank] = mine.engine
        if rank == 0:
            hold(mine)
        meet(mine.ranks, "begin")
        recv = mine.dispatch(case)
        if rank == 0:
            mine.ranks.wait_until(
                lambda: not engines[1].active[0], 1000 * TIMEOUT, "waits to be given up"
            )
            del network.put_signal
            network.on_way += kept
            while any(message in network.on_way for message in kept):
                network.deliver_one()
        meet(mine.ranks, "back")
        with mine.own:
            mine.engine.mask(1 - rank, active=True)
        meet(mine.ranks, "go on")
        lost = torch.empty(recv.handle.num_tokens)
        got = sum_up(mine, recv, case, way, seed % 2 == 1, lost)
        for token, bits in enumerate(got.view(torch.int16)):
            sums = [sums_of(case, way, present)[rank] for present in PRESENT]
            assert any(
                torch.equal(bits, each.x[token].view(torch.int16))
                and lost[token] == each.lost_weights[token]
                for each in sums
            ), f"rank {rank}: token {token} is {got[token]} and lacks {lost[token]}"
        if rank == 1:
            came = [int(((each.source >> 32) == 0).sum()) for each in (recv, case.expected[1])]
            torn.append(0 < came[0] < came[1])

    play(scenario, body, seed)
    assert kept
    return torn[0]


def two_objects(world_size: int, seed: int, per_node: int) -> None:
    """Each call of one object is made while one of the other has sent, and not received."""
    scenario = life(world_size, seed, per_node)

    def rank(ranks: SimulatedRank) -> None:
        pair = [RankRun(ranks, scenario, TIMEOUT) for _ in range(2)]

        def both(call: Callable[[int, bool], _T], outer: int) -> list[_T]:
            """By object; ``call(object, in_two)``."""
            made: dict[int, _T] = {}

            def inside() -> None:
                made[1 - outer] = call(1 - outer, False)

            with mock.patch.object(pair[outer], "between", inside):
                made[outer] = call(outer, True)
            return [made[0], made[1]]

        def turn(number: int) -> None:
            cases = [case_of(scenario, seed, 2 * number + at) for at in range(2)]
            outer, way = (seed + number) % 2, WAYS[(seed + number) % 3]
            lost = [torch.empty(len(case.picks[ranks.rank][0])) for case in cases]
            got = both(lambda at, in_two: pair[at].dispatch(cases[at], in_two), outer)
            for recv, case in zip(got, cases, strict=True):
                pair[0].check(recv, case)

            def back(at: int, in_two: bool) -> Tensor:
                return sum_up(pair[at], got[at], cases[at], way, in_two, lost[at])

            for at, sums in enumerate(both(back, 1 - outer)):
                want = sums_of(cases[at], way, tuple(range(world_size)))[ranks.rank]
                assert_same_bits(sums, want.x, what=f"sums {at}", rank=ranks.rank)
                assert_same_bits(lost[at], want.lost_weights, what="lost", rank=ranks.rank)

        for number in range(3):
            turn(number)

    with poisoned(), reached(scenario):
        simulate(world_size, rank, seed=seed, max_steps=MOST_STEPS, strict=True)


class KeepsBack(Network):
    """Keeps word that there are no sums for a rank, which nobody waits for if no token went there,
    until the next such signal was set: unless a fence forbids, that is then turned back.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.kept: list[Message] = []
        self.turned = 0

    def put_signal(self, *args: int) -> None:
        super().put_signal(*args)
        message = self.on_way[-1]
        for each in [each for each in self.kept if each in message.behind]:
            self.kept.remove(each)
            self.on_way.append(each)
        if message.parts == [(0, 16)] and 0 < message.value < 1 << 24 and message.value % 2 == 0:
            self.kept.append(self.on_way.pop(self.on_way.index(message)))

    def fence(self) -> None:
        super().fence()
        program = self._machine.caller
        running = self._machine.streams[program.rank][0]
        self._fences[program.serial] += [
            each
            for each in self.kept
            if each.sender is program
            or (each.sender.rank == program.rank and each.sender.launch is not running)
        ]

    def _signal(self, message: Message) -> None:
        super()._signal(message)
        for each in [each for each in self.kept if each.signal == message.signal]:
            self.kept.remove(each)
            self.on_way.append(each)
            self.turned += 1
            super()._signal(each)


class Put(NamedTuple):
    """By a program, in a half: offsets in the region of the rank that gets it."""

    program: str
    target: int
    num_bytes: int
    signal: int
    value: int


class Notes(Network):
    """Notes what is put."""

    puts: ClassVar[list[Put]] = []

    def put_signal(
        self, target: int, source: int, num_bytes: int, signal: int, value: int, operation: int,
        to: int,
    ) -> None:  # fmt: skip
        caller = self._machine.caller
        first = self.regions[0][0][caller.rank]
        self.puts.append(Put(caller.name, target - first, num_bytes, signal - first, value))
        super().put_signal(target, source, num_bytes, signal, value, operation, to)


class Example(Case):
    """Rank 0 has tokens 0 to 3, of which 0, 2 and 3 go to rank 1, which has none."""

    @cached_property
    def picks(self) -> list[tuple[Tensor, Tensor]]:
        ids = torch.tensor([[1], [0], [1], [1]])
        return [(ids[:n].clone(), torch.ones(n, 1)) for n in (4, 0)]


def example(seed: int) -> None:
    """The one of ``kernels/low_latency_far.py``; far rank 5 is rank 1."""
    case = Example(
        2, num_tokens=4, num_topk=1, num_experts=2, layout=PADDED, exact=False, seed=seed
    )
    scenario = Scenario(2, 2, 1, 4, case.hidden, 3, (Round(case, ("plain",)),), per_node=1)
    sizes: list[Any] = []

    def body(mine: RankRun) -> None:
        sizes.append(mine.engine._workspace.sizes)
        mine.round(scenario.rounds[0])

    with mock.patch.object(scheduler, "Network", Notes), mock.patch.object(Notes, "puts", []):
        play(replace(scenario, put_bytes=200), body, seed, timeouts=False)
        puts = Notes.puts
    at, half, slot = sizes[0].region, 2 * 4, sizes[0].slot_bytes  # half: slots of two ranks
    row, total, back = 96, 80, half + 4  # bytes; the slots (1, 0) of half 1
    rows = [
        Put(
            "rank 0, low_dispatch_kernel[{}]", at.slots + done * row, n * row, 8 * word, 2 << 24 | 3
        )
        for done, n, word in ((0, 2, at.arrivals), (2, 1, at.arrivals + 1))
    ]
    sums = [
        Put(
            "rank 1, low_combine_kernel[{}]", at.slots + back * slot + done * total, n * total,
            8 * (at.flags + (back + done) * PIECES.value), 2 * 3 + 1,
        )
        for done, n in ((0, 2), (2, 1))
    ]  # fmt: skip
    for want in (rows, sums):
        there = {put.target for put in want}
        got = sorted((put for put in puts if put.target in there), key=lambda put: put.target)
        assert [put._replace(program=w.program) for put, w in zip(got, want, strict=True)] == want
        assert len({put.program for put in got}) == 2
        assert all(put.program[:-2] == want[0].program[:-3] for put in got)


ANY = (-1, 0, 1, 2, 3, 5, 2**31 - 1, -(2**31), 2**32 + 7, 2**40, -(2**63), 2**63 - 1)
"""What a rank may say that lies."""


class Lies(Network):
    """Many a number that rank 0 puts is any: how many rows there are for an expert and in a
    message, their ids, places and tokens, weights, sums. Calls are true: else it would be in
    another.
    """

    offsets: Any = None

    def put_signal(
        self, target: int, source: int, num_bytes: int, signal: int, value: int, operation: int,
        to: int,
    ) -> None:  # fmt: skip
        if self._machine.caller.rank == 0:
            random, first = self._machine.rng, self.regions[0][0][0]
            starts = [getattr(self.offsets, name) for name in ("counts", "flags", "weights")]
            ends = [8 * each for each in (*starts, self.offsets.heartbeats)]
            part = sum(target - first >= each for each in (*ends, self.offsets.slots))
            true = {1: -1 << 24, 3: -1 << 32, 5: 0}.get(part, -1)  # bits of counts, weights, slots
            words = raw(source, num_bytes // 8, np.int64)
            for at, word in enumerate(words.tolist() if target - first < self._rest else ()):
                if random.random() < 0.3:
                    words[at] = (word & true) | (random.choice(ANY) & ~true)
            if signal - first >= 8 * self.offsets.arrivals and random.random() < 0.3:
                value = (value & -1 << 24) | (random.choice(ANY) & (1 << 24) - 1)
        super().put_signal(target, source, num_bytes, signal, value, operation, to)

    @property
    def _rest(self) -> int:
        """Where the slots end, bytes."""
        return 8 * self.offsets.arrivals


def lies(nodes: int, per_node: int, seed: int) -> int:
    """Rank 0 tells other nodes any numbers: nobody touches what is not its own, and no row has a
    source that cannot be. It may wait in vain for sums of rows that it has not told of. How many
    rows of rank 0 the others take.
    """
    size, came = nodes * per_node, list[int]()
    scenario = replace(life(size, seed, per_node, per_node > 1), network=True)

    def body(mine: RankRun) -> None:
        Lies.offsets = mine.engine._workspace.sizes.region
        for call in range(3):
            case, way = case_of(scenario, seed, call), WAYS[(seed + call) % 3]
            recv = mine.dispatch(case, call == 1)
            # counts that lie promise rows of which nothing is written
            unwritten = torch.iinfo(torch.int64).max
            source = recv.source[(recv.source != -1) & (recv.source != unwritten)]
            tokens, ranks = source & 0xFFFFFFFF, source >> 32
            assert ((tokens < scenario.max_tokens) & (ranks >= 0) & (ranks < size)).all(), source
            came.append(int((ranks == 0).sum()) if mine.rank >= per_node else 0)
            rows = torch.zeros(recv.x.shape, dtype=case.expert_rows[0].dtype).flatten(0, -2)
            given = {"weights": 2 * case.picks[mine.rank][1]} if way == WAYS[2] else {}
            arguments = CombineArguments(rows, recv.handle.plan, recv.handle.spec, **given)
            mine.call(call == 2, mine.engine.combine, arguments)

    with mock.patch.object(scheduler, "Network", Lies):
        play(scenario, body, seed)
    return sum(came)


def kept_back(seed: int, fenced: bool, part: str) -> tuple[int, str]:
    """How many signals such a network turned back in a rehearsal, and what went wrong."""
    made: list[KeepsBack] = []

    def network(machine: Machine) -> KeepsBack:
        made.append(KeepsBack(machine))
        return made[-1]

    wrong = ""
    with planted("" if fenced else NO_FENCE.kind), mock.patch.object(scheduler, "Network", network):
        try:
            run(rehearsal(seed, part), seed, max_steps=50_000)
        except SimulationError as error:
            wrong = str(error)
    return sum(each.turned for each in made), wrong
