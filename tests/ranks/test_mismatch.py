"""Ranks that pass different arguments: every rank raises ``Mismatch`` with the argument and two
values, and the object works on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from bad_input import SIZES, Inputs, anyone, assert_works, check, complaint, error_of, make, meet
from tokenyard.testing import Ranks, distributed_test

WORLD_SIZES = (2, 4)
FLAT, MAJOR, PADDED = ty.Layout
Call = Callable[["Scene"], Any]


@dataclass(frozen=True)
class Scene:
    """An object, good inputs and earlier dispatches of it."""

    ep: ty.ExpertParallel
    inputs: Inputs
    flat: ty.Received
    major: ty.Received

    @staticmethod
    def of(ranks: Ranks) -> Scene:
        ep, i = make(ranks), Inputs.of(ranks)
        routing = (i.x, i.topk_idx, i.topk_weights)
        return Scene(ep, i, ep.dispatch(*routing), ep.dispatch(*routing, layout=MAJOR))

    def dispatch(self, *, x: Any = None, weights: bool = True, **options: Any) -> ty.Received:
        i = self.inputs
        return self.ep.dispatch(
            i.x if x is None else x, i.topk_idx, i.topk_weights if weights else None, **options
        )

    def cached(self, x: torch.Tensor | None = None, **options: Any) -> ty.Received:
        return self.ep.dispatch(
            self.inputs.x if x is None else x, handle=self.flat.handle, **options
        )

    def combine(
        self, recv: ty.Received | None = None, dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> Any:
        recv = self.flat if recv is None else recv
        return self.ep.combine(recv.x.to(dtype), recv.handle, **options)

    def quantized(self, scales: int = 1, dtype: torch.dtype = torch.float32) -> ty.Received:
        x = self.inputs.x
        ones = torch.ones(x.shape[0], scales, dtype=dtype, device=x.device)
        return self.dispatch(x=ty.Quantized(x.to(torch.float8_e4m3fn), ones))


STATIC = {"layout": MAJOR, "exact": False}
FP8 = ty.Quantize.FP8
# What differs, the first value, another, and the call of either kind.
CALLS: list[tuple[str, str, str, Call, Call]] = [
    (
        "dtype",
        "torch.bfloat16",
        "torch.float32",
        lambda s: s.dispatch(),
        lambda s: s.dispatch(x=s.inputs.x.float()),
    ),
    (
        "dtype",
        "torch.bfloat16",
        "torch.float16",
        lambda s: s.cached(),
        lambda s: s.cached(s.inputs.x.half()),
    ),
    (
        "dtype",
        "torch.bfloat16",
        "torch.float32",
        lambda s: s.combine(),
        lambda s: s.combine(dtype=torch.float32),
    ),
    ("layout", "FLAT", "EXPERT_MAJOR", lambda s: s.dispatch(), lambda s: s.dispatch(layout=MAJOR)),
    (
        "layout",
        "EXPERT_MAJOR",
        "EXPERT_PADDED",
        lambda s: s.dispatch(layout=MAJOR),
        lambda s: s.dispatch(layout=PADDED),
    ),
    ("exact", "True", "False", lambda s: s.dispatch(), lambda s: s.dispatch(exact=False)),
    (
        "expert_alignment",
        "4",
        "16",
        lambda s: s.dispatch(layout=MAJOR, expert_alignment=4),
        lambda s: s.dispatch(layout=MAJOR, expert_alignment=16),
    ),
    ("weights", "True", "False", lambda s: s.dispatch(), lambda s: s.dispatch(weights=False)),
    (
        "quantize",
        "FP8",
        "FP8_POW2",
        lambda s: s.dispatch(quantize=FP8),
        lambda s: s.dispatch(quantize=ty.Quantize.FP8_POW2),
    ),
    (
        "quantize",
        "FP8",
        "FP8_UE8M0",
        lambda s: s.dispatch(quantize=FP8),
        lambda s: s.dispatch(quantize=ty.Quantize.FP8_UE8M0),
    ),
    ("quantize", "None", "FP8", lambda s: s.dispatch(), lambda s: s.dispatch(quantize=FP8)),
    (
        "quantize",
        "FP8",
        "FP8_POW2",
        lambda s: s.cached(quantize=FP8),
        lambda s: s.cached(quantize=ty.Quantize.FP8_POW2),
    ),
    (
        "capacity",
        "50",
        "60",
        lambda s: s.dispatch(capacity=50, **STATIC),
        lambda s: s.dispatch(capacity=60, **STATIC),
    ),
    (
        "capacity",
        "None",
        "60",
        lambda s: s.dispatch(**STATIC),
        lambda s: s.dispatch(capacity=60, **STATIC),
    ),
    ("scales", "1", "2", lambda s: s.quantized(), lambda s: s.quantized(2)),
    (
        "scale",
        "torch.float32",
        "torch.int32",
        lambda s: s.quantized(),
        lambda s: s.quantized(dtype=torch.int32),
    ),
    (
        "dtype",
        "torch.bfloat16",
        "torch.float8_e4m3fn",
        lambda s: s.dispatch(),
        lambda s: s.quantized(),
    ),
    ("call", "dispatch", "cached dispatch", lambda s: s.dispatch(), lambda s: s.cached()),
    ("call", "dispatch", "combine", lambda s: s.dispatch(), lambda s: s.combine()),
    ("call", "cached dispatch", "combine", lambda s: s.cached(), lambda s: s.combine()),
    (
        "weighted",
        "False",
        "True",
        lambda s: s.combine(s.major),
        lambda s: s.combine(s.major, weighted=True),
    ),
    (
        "weights",
        "False",
        "True",
        lambda s: s.combine(),
        lambda s: s.combine(reduce_weights=s.flat.topk_weights),
    ),
    (
        "call",
        "combine",
        "cached dispatch",
        lambda s: s.combine(s.major, weighted=True),
        lambda s: s.combine(s.major, weighted=True, topk_weights=s.inputs.topk_weights),
    ),
]


@distributed_test(world_size=WORLD_SIZES)
def test_calls(ranks: Ranks) -> None:
    """The last rank differs from the others."""
    complaints: list[str] = []
    failed_rank = ranks.world_size - 1
    scene = Scene.of(ranks)
    for what, first, second, right, wrong in CALLS:
        call = wrong if ranks.rank == failed_rank else right
        words = [what, f"rank 0 says {first}", f"rank {failed_rank} says {second}"]
        error = error_of(lambda call=call, scene=scene: call(scene))
        why = complaint(error, ty.Mismatch, words)
        if not anyone(ranks, bool(why)):
            why = complaint(error_of(lambda scene=scene: assert_works(ranks, scene.ep)), None, ())
        if anyone(ranks, bool(why)):
            complaints.append(f"{what} ({first}, {second}): {why}")
            scene.ep.close()
            scene = Scene.of(ranks)
    scene.ep.close()
    assert not complaints, "\n".join(complaints)


@distributed_test(world_size=WORLD_SIZES)
def test_construction(ranks: Ranks) -> None:
    complaints: list[str] = []
    failed_rank = ranks.world_size - 1
    for name, value in SIZES.items():
        mine = value + 1 if ranks.rank == failed_rank else value
        error = error_of(lambda name=name, mine=mine: make(ranks, **{name: mine}))
        words = [
            f"ranks disagree on {name}: rank 0 says {value}, rank {failed_rank} says {value + 1}"
        ]
        complaints.append(complaint(error, ty.Mismatch, words))
        meet(ranks)
    error = error_of(
        lambda: make(ranks, engine="auto" if ranks.rank == failed_rank else "collective")
    )
    complaints.append(
        complaint(
            error, ty.Mismatch, ["engine: rank 0 says collective", f"rank {failed_rank} says auto"]
        )
    )
    meet(ranks)
    with make(ranks) as ep:
        assert_works(ranks, ep)
    assert not any(complaints), "\n".join(filter(None, complaints))


@distributed_test(world_size=2)
def test_ranks_may_differ_in_what_is_their_own(ranks: Ranks) -> None:
    """Timeout, async, out and bias are each rank's own business."""
    inputs, mine = Inputs.of(ranks), ranks.rank == 0
    with make(ranks, timeout=2.0 + ranks.rank) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx, async_op=mine, return_hook=not mine)
        want = ep.combine(recv.x, recv.handle)
        out = inputs.x.clone() if mine else None
        got = ep.combine(recv.x, recv.handle, out=out, bias=None if mine else inputs.x)
        # Want is exact: 0, x or 2x.
        assert torch.equal(got, want if mine else (want.float() + inputs.x.float()).bfloat16())
        assert not mine or got is out
        again = ep.combine(recv.x, recv.handle, async_op=not mine)
        assert torch.equal(again if mine else again.x, want)


def picks(ranks: Ranks, how: str) -> torch.Tensor:
    """8 experts on 2 ranks, 5 tokens: "few" rows cross the wire, "many", or other tokens, but as
    many as "few".
    """
    far, near = torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6])
    lower, upper = (near, far) if ranks.rank else (far, near)
    rows = {
        "few": [lower, lower, lower, lower, upper],
        "other": [upper, *[lower] * 4],
        "many": [upper] * 5,
    }[how]
    return torch.stack(rows).to(ranks.device)


@pytest.mark.parametrize("second", ["few", "many", "other"])
@pytest.mark.parametrize("what", ["combine", "cached dispatch"])
@distributed_test(world_size=2)
def test_handles_of_different_dispatches(ranks: Ranks, what: str, second: str) -> None:
    """Rows would be of other sizes than the peer expects, or of other tokens: found before they
    move.
    """
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        first = "many" if second == "few" else "few"
        received = [ep.dispatch(inputs.x, picks(ranks, how)) for how in (first, second)]
        recv = received[ranks.rank]

        def call() -> object:
            return (
                ep.combine(recv.x, recv.handle)
                if what == "combine"
                else ep.dispatch(inputs.x, handle=recv.handle)
            )

        error = error_of(call)
        meet(ranks)
        check(error, ty.Mismatch, "ranks disagree on", "handle", "rank 0 says", "rank 1 says")
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_a_backward_on_one_rank_alone(ranks: Ranks) -> None:
    """Rank 1's rows need no gradient, so its next dispatch meets rank 0's backward of a combine,
    which says what to look at.
    """
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        rows = recv.x.detach().requires_grad_(ranks.rank == 0)
        y = ep.combine(rows, recv.handle)
        if ranks.rank == 0:
            error, hint = error_of(lambda: y.sum().backward()), "this is a backward"
        else:
            error, hint = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx)), ""
        meet(ranks)
        said = "rank 0 says cached dispatch (or the backward of a combine), rank 1 says dispatch"
        check(error, ty.Mismatch, said, hint)
        assert_works(ranks, ep)


@distributed_test(world_size=2)
def test_a_handle_of_another_rank(ranks: Ranks) -> None:
    """Handles can be pickled. Objects have the same numbers on ranks that made as many; workers may
    have served other tests before, so this one's number is given to the handle."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        sent: list[Any] = [recv.handle]
        dist.broadcast_object_list(sent, 0, group=ranks.group)
        given = replace(sent[0], owner=recv.handle.owner)
        error = error_of(lambda: ep.combine(recv.x, given))
        meet(ranks)
        why = "this handle belongs to rank 0: combine with the object that dispatched, on its rank"
        check(error, ValueError if ranks.rank == 1 else ty.PeerError, why)
        assert_works(ranks, ep)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "async"])
@distributed_test(world_size=3)
def test_one_rank_is_one_call_ahead(ranks: Ranks, asynchronous: bool) -> None:
    """Rank 1 skips a combine: its next dispatch meets the others' combine. All raise, and all go on
    together.
    """
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx)
        recv.wait()
        if ranks.rank == 1:
            error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx, async_op=asynchronous))
        else:
            error = error_of(lambda: ep.combine(recv.x, recv.handle, async_op=asynchronous))
        meet(ranks)
        check(
            error,
            ty.Mismatch,
            "rank 0 says combine (or the backward of a dispatch), rank 1 says dispatch",
        )
        assert_works(ranks, ep)


@distributed_test(world_size=3)
def test_a_rank_that_missed_calls_is_told_by_their_number(ranks: Ranks) -> None:
    """Calls are counted, so that rows of one call never pass for those of another."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        ep._calls.engine._calls += ranks.rank == 2
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx))
        meet(ranks)
    check(error, ty.Mismatch, "rank 0 says #0, rank 2 says #1")


@distributed_test(world_size=4)
def test_two_ranks_are_wrong_in_different_ways(ranks: Ranks) -> None:
    """Each of them gets its own error, the others the first of the two; nobody waits."""
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        options = {1: {"layout": "flat"}, 3: {"expert_alignment": 0}}.get(ranks.rank, {})
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx, **options))
        meet(ranks)
        kind, words = {1: (ValueError, "layout"), 3: (ValueError, "expert_alignment")}.get(
            ranks.rank, (ty.PeerError, "rank 1 refused its side of this call: layout ('flat')")
        )
        check(error, kind, words)
        assert_works(ranks, ep)
