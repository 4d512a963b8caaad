"""Runs programs of calls on simulated ranks, and checks every result bit for bit. What ranks need
not agree on, each draws for itself: strides, dtypes of ids, whether a call is asynchronous.

Kernels are interpreted here, so tests reach this module through ``nvlink_pool.py``. ``python
tests/run.py drawn_runs nvlink 3 0 17`` runs the program of 3 ranks, without nodes, and seed 17.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from cases import check_combined, check_received
from drawn_gradients import backward_of_combine, backward_of_dispatch, placed
from drawn_programs import PADDED, Back, Cached, Fresh, Program, Sizes, draw
from tokenyard.memory.nvshmem import PUTS_VARIABLE
from tokenyard.testing import poisoned
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

MOST_STEPS = 4_000_000
LATER = ({"async_op": True}, {"return_hook": True})


def strided(tensor: Any, random: Random) -> Any:
    """The same values at other places."""
    if isinstance(tensor, ty.Quantized):
        return ty.Quantized(strided(tensor.data, random), strided(tensor.scales, random))
    how = random.choice(("dense", "dense", "gaps", "turned", "off"))
    if how == "dense" or tensor.dim() != 2:
        return tensor
    rows, columns = tensor.shape
    if how == "turned":
        made = torch.empty(columns, rows, dtype=tensor.dtype).t()
    elif how == "gaps":
        made = torch.empty(rows, columns + 3, dtype=tensor.dtype)[:, 1:-2]
    else:
        made = torch.empty(rows * columns + 1, dtype=tensor.dtype)[1:].view(rows, columns)
    return made.copy_(tensor)


class Run:
    """One rank's side of a program. ``pending``: checks of calls that nobody has waited for;
    ``kept``: of results that nobody may write to."""

    def __init__(self, here: SimulatedRank, program: Program, seed: int) -> None:
        sizes = self.sizes = program.sizes
        self.rank, self.program = here.rank, program
        self.random = Random(f"{seed} of rank {here.rank}")
        self.results: dict[int, ty.Received] = {}
        self.pending: list[Callable[[], None]] = []
        self.kept: list[Callable[[], None]] = []
        given: dict[str, Any] = {"num_sms": program.num_sms, "timeout": 30.0}
        if sizes.gone:
            given["timeout"] = 0.05 if sizes.engine == "nvlink" else 1.0
        if sizes.per_node:
            given["topology"] = sizes.ranks // sizes.per_node, sizes.per_node
        if sizes.low:
            given |= {"once_per_node": sizes.once} if sizes.per_node else {}
        rings = 1 << ((15 if sizes.hidden <= 40 else 17) + 3 * (sizes.low or not program.small))
        self.ep = ty.ExpertParallel(
            SimulatedGroup(here), engine=sizes.engine, num_experts=sizes.experts,
            hidden=sizes.hidden, num_topk=sizes.top, max_tokens_per_rank=sizes.most,
            buffer_bytes=rings * sizes.ranks, **given,
        )  # fmt: skip
        if program.num_sms and not sizes.low:
            self.ep._calls.engine._heap.least = 0  # pyright: ignore
        if sizes.gone:
            self.lose(here)

    def lose(self, here: SimulatedRank) -> None:
        """A rank dies, and the others go on without it."""
        if self.rank in self.sizes.gone:
            here.sim.kill(self.rank, here.sim.steps)
        x, idx = torch.ones(1, self.sizes.hidden), torch.zeros(1, self.sizes.top).long()

        def until_lost() -> None:
            while True:
                self.ep.dispatch(x, idx)
                self.ep.check()

        with pytest.raises(ty.PeerTimeout):
            until_lost()
        left = self.ep.recover(self.sizes.replicas)
        assert left == [rank for rank in range(self.sizes.ranks) if rank not in self.sizes.gone]

    def step(self, number: int) -> None:
        each = self.program.steps[number]
        while each.in_place and self.pending:  # may be of rows that end now
            self.pending.pop()()
        if isinstance(each, Fresh) and each.refuser >= 0:
            self.refused(each)
        elif isinstance(each, Fresh):
            self.fresh(number, each)
        elif isinstance(each, Cached):
            self.cached(each)
        else:
            self.back(each)

    def how(self) -> dict[str, Any]:
        """Now, later or in two; behind something or not."""
        given = {**self.random.choice(({}, {}, *LATER))}
        if self.random.random() < 0.2:
            given["after"] = mock.Mock(spec=["wait"])
        return given

    def done(self, how: dict[str, Any], check: Callable[[], None]) -> None:
        """``check`` the result of a call now or, of one for later, perhaps later."""
        self.pending.append(check)
        later = "async_op" in how or ("return_hook" in how and not self.sizes.low)
        if not later:
            self.pending.pop()()
        while len(self.pending) > 7 or (self.pending and self.random.random() < 0.4):
            self.pending.pop(self.random.randrange(len(self.pending)))()

    # Dispatch

    def fresh(self, number: int, case: Fresh) -> None:
        idx, weights = case.asked[self.rank]
        idx = strided(idx.int() if self.random.random() < 0.5 else idx, self.random)
        weights = strided(weights, self.random) if case.weighted else None
        x: Any = strided(case.x[self.rank], self.random)
        how, wanted = {} if case.grad else self.how(), {**case.options, "in_place": case.in_place}
        loads = torch.full(case.expected[self.rank].tokens_per_expert.shape, 3)
        if case.grad:
            x = x.clone().requires_grad_()
            weights = None if weights is None else weights.clone().requires_grad_()
        if self.sizes.low and self.random.random() < 0.5:
            wanted["options"] = self.options(case, loads)
        recv = self.results[number] = self.ep.dispatch(x, idx, weights, **wanted, **how)

        def check() -> None:
            assert recv.handle.index_dtype == idx.dtype
            check_received(recv, case, self.rank)
            if "options" in wanted:
                assert torch.equal(loads, 3 + case.expected[self.rank].tokens_per_expert.long())

        self.done(how, check)
        if not case.in_place:
            self.kept.append(check)
        if case.grad:
            backward_of_dispatch(recv, case, self.rank, x, weights)

    def refused(self, case: Fresh) -> None:
        """All learn of an exact call. Engine low_latency goes on without the rank's tokens, or
        without the pick."""
        idx, weights = case.asked[self.rank]
        x, given, mine, low = (
            case.x[self.rank],
            case.options,
            case.refuser == self.rank,
            self.sizes.low,
        )
        weights = weights if case.weighted else None
        if mine and case.bad == "x":
            wrong = torch.ones(len(idx), case.hidden + 1)
            with pytest.raises(ValueError, match="channels"):
                self.ep.dispatch(wrong, idx, weights, **given, **self.how())
            return
        if mine:
            idx = idx.clone()
            idx[0, 0] = case.num_experts + 3
        how = self.how()
        if low:
            recv = self.ep.dispatch(x, idx, weights, **given, **how)
            self.done(how, lambda: check_received(recv, case, self.rank))
            if mine:
                with pytest.raises(ValueError, match=r"topk_idx\[0, 0\] is"):
                    self.ep.check()
            return

        def call(asked: dict[str, Any]) -> ty.Received:
            recv = self.ep.dispatch(x, idx, weights, **given, **asked)
            if not asked.keys() & {"async_op", "return_hook"}:
                recv.wait()
            return recv

        kind, says = (
            (ValueError, r"topk_idx\[0, 0\] is") if mine else (ty.PeerError, "refused its side")
        )
        if how.keys() & {"async_op", "return_hook"}:
            later = call(how)

            def check() -> None:
                with pytest.raises(kind, match=says):
                    later.wait()

            self.done(how, check)
        else:
            with pytest.raises(kind, match=says):
                call(how)

    def options(self, case: Fresh, loads: Tensor) -> ty.CallOptions:
        words = (case.quantize or ty.Quantize.MXFP8) is not ty.Quantize.MXFP8
        words = words or (case.scales is not None and case.scales[0].itemsize == 4)
        columns = words and case.layout is PADDED and self.random.random() < 0.5
        waits = torch.zeros(self.sizes.ranks, dtype=torch.int64)
        waits = waits if self.random.random() < 0.5 else None
        return ty.CallOptions(loads=loads, waits=waits, scales_by_column=columns)

    def cached(self, each: Cached) -> None:
        case, handle, how = each.case, self.results[each.of].handle, self.how()
        x, wanted = strided(case.x[self.rank], self.random), {"in_place": case.in_place, **how}
        recv = self.ep.dispatch(x, handle=handle, quantize=case.quantize, **wanted)

        def check() -> None:
            check_received(recv, case, self.rank)
            if not case.in_place:
                none = (recv.source < 0).flatten()
                assert not recv.x.flatten(0, -2)[none].float().any(), "rows of nobody are zeros"

        self.done(how, check)
        if not case.in_place:
            self.kept.append(check)

    # Combine

    def back(self, each: Back) -> None:
        case, rank, recv = each.case, self.rank, self.results[each.of]
        rows, want = placed(each.rows[rank], recv, case, rank), each.sums[rank]
        how, lost = {} if each.grad else self.how(), torch.full((case.tokens[rank],), float("nan"))
        given = self.arguments(each, recv)
        if each.lost:
            given["options"] = ty.CallOptions(lost_weights=lost)
        if each.in_place:
            there = self.ep.empty_for_combine(recv.handle, each.dtype, in_place=True)
            rows = there.copy_(rows)
        elif each.grad:
            rows.requires_grad_()
        else:
            rows = strided(rows, self.random)
        with torch.set_grad_enabled(each.grad):  # weights that rode along have a gradient if x has
            got: Any = self.ep.combine(rows, recv.handle, in_place=each.in_place, **given, **how)

        def check() -> None:
            sums = got if isinstance(got, Tensor) else got.x
            assert given.get("out", sums) is sums
            check_combined(sums, case, rank, want.x)
            if each.weighting == "reduced":
                check_combined(got.topk_weights, case, rank, want.topk_weights, "reduced weights")
            if each.lost:  # the other engines tell of ranks that are gone only
                weights = each.weights and each.weights[rank]
                right = want.lost_weights if self.sizes.low else case.lost(rank, weights)
                check_combined(lost, case, rank, right, "lost weights")

        self.done(how, check)
        self.kept.append(check)
        if each.grad:
            y, weights = got if isinstance(got, Tensor) else got.x, given.get("topk_weights")
            backward_of_combine(y, recv, each, self.rank, rows, weights)

    def arguments(self, each: Back, recv: ty.Received) -> dict[str, Any]:
        """Weights, bias and where sums go."""
        given: dict[str, Any] = {"weighted": each.weights is not None}
        if each.weighting == "owner":
            given["topk_weights"] = strided(each.owned[self.rank], self.random)
            if each.grad:
                given["topk_weights"] = given["topk_weights"].clone().requires_grad_()
        if each.weighting == "reduced":
            mine = placed(each.reduced[self.rank], recv, each.case, self.rank)
            given["reduce_weights"] = strided(mine, self.random)
        if each.biases:
            terms = tuple(strided(term, self.random) for term in each.terms[self.rank])
            given["bias"] = terms if len(terms) > 1 else self.random.choice((terms, terms[0]))
        if not each.grad and self.random.random() < 0.4:
            shape = each.sums[self.rank].x.shape
            given["out"] = strided(torch.empty(shape, dtype=each.dtype), self.random)
        return given


def run(program: Program, seed: int) -> None:
    """All steps on all ranks, under the schedule of ``seed``."""

    def body(here: SimulatedRank) -> None:
        mine = Run(here, program, seed)
        for number in range(len(program.steps)):
            mine.step(number)
        mine.ep.check()
        for check in mine.pending + mine.kept:
            check()
        mine.ep.close()

    sizes = program.sizes
    options = {"max_steps": MOST_STEPS, "timeouts": bool(sizes.gone)}
    with poisoned(), nodes_reached(sizes, seed):
        simulate(sizes.ranks, body, seed=seed, **options)


@contextmanager
def nodes_reached(sizes: Sizes, seed: int) -> Iterator[None]:
    """Inside, ranks of other nodes are reached through the simulated network or, by seed, through
    pointers, or (twolevel) by both."""
    network, open_memory = (
        sizes.per_node and not sizes.gone and seed % 2 == 0,
        SimulatedGroup.open_memory,
    )

    def opened(group: SimulatedGroup, *given: Any, **more: Any) -> Any:
        memory = open_memory(group, *given, **more)
        memory.ranks_per_node = sizes.per_node if network else 0
        memory.maps_all = not sizes.low and seed % 4 == 2
        return memory

    puts = {PUTS_VARIABLE: "1" if sizes.per_node and sizes.low and not network else ""}
    there = mock.patch.object(SimulatedGroup, "open_memory", opened)
    with there, mock.patch.dict(os.environ, puts):
        yield


def check_seed(engine: str, ranks: int, per_node: int, seed: int, lose: bool = False) -> None:
    """The program of ``seed`` passes."""
    run(draw(engine, ranks, per_node, seed, lose), seed)


if __name__ == "__main__":
    which = draw(sys.argv[1], *map(int, sys.argv[2:5]), *map(bool, sys.argv[5:]))
    print(which.sizes, *which.steps, sep="\n")
    run(which, int(sys.argv[4]))
