"""What is made inside ``torch.inference_mode()`` and kept serves calls outside of it too,
differentiable ones included.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import moe
import tokenyard as ty
from cases import Case, dispatch
from test_dispatch_combine import ENGINES, layouts, shapes
from test_gradients import Layer, check_grads, loss
from tokenyard.config import Config
from tokenyard.engines.base import DispatchArguments
from tokenyard.engines.collective import CollectiveEngine
from tokenyard.engines.group_transport import GroupTransport
from tokenyard.engines.outputs import Outputs
from tokenyard.engines.signatures import signature_of
from tokenyard.handle import Spec
from tokenyard.header import DISPATCH, CallKind
from tokenyard.rows import Payload
from tokenyard.stats import Stats
from tokenyard.testing import Ranks, assert_close, distributed_test

FLAT = Spec(layout=ty.Layout.FLAT, exact=False)


def config_of(rank: int, size: int) -> Config:
    return Config(
        num_experts=4,
        hidden=8,
        num_topk=2,
        max_tokens_per_rank=4,
        rank=rank,
        world_size=size,
        timeout=60.0,
    )


@shapes
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_an_object_first_used_inside_trains_outside(
    ranks: Ranks, layout: ty.Layout, exact: bool
) -> None:
    case = Case(ranks.world_size, dtype=torch.float32, layout=layout, exact=exact)
    layer = Layer(case, ranks)
    with case.make(ranks) as ep:
        for inside in (True, False, True):
            with torch.inference_mode() if inside else nullcontext():
                recv = dispatch(ranks, ep, case)
                ep.combine(recv.x, recv.handle)
        check_grads(
            layer,
            moe.run(
                ep, layer.x, layer.idx, layer.weights, layer.experts, layout=layout, exact=exact
            ),
        )


@shapes
@layouts
@distributed_test(world_size=2, engine=ENGINES)
def test_a_handle_made_inside_is_differentiated_outside(
    ranks: Ranks, layout: ty.Layout, exact: bool
) -> None:
    """Autograd keeps no inference tensors, of which the handle consists; routing decided under
    inference is common.
    """
    case = Case(
        ranks.world_size, dtype=torch.float32, layout=layout, exact=exact, routing="duplicates"
    )
    weighted = layout is not ty.Layout.FLAT
    grads = []
    with case.make(ranks) as ep:
        for inside in (False, True):
            layer = Layer(case, ranks)
            with torch.inference_mode() if inside else nullcontext():
                handle = dispatch(ranks, ep, case).handle
            rows = ep.dispatch(layer.x, handle=handle).x
            loss(ep.combine(rows * rows, handle, weighted=weighted)).backward()
            grads.append([layer.x.grad])
            if weighted:
                given = {"weighted": True, "topk_weights": layer.weights}
                loss(ep.combine(rows.detach(), handle, **given)).backward()
                grads[-1].append(layer.weights.grad)
    for outside, made_inside in zip(*grads, strict=True):
        assert torch.isfinite(outside).all() and outside.any()
        assert_close(made_inside, outside, relative=0.0, what="gradient of x or weights")


@pytest.mark.parametrize("first", ["inside", "outside"])
@distributed_test(world_size=2)
def test_a_bad_id_is_remembered_in_either_mode(ranks: Ranks, first: str) -> None:
    """Where the host does not wait (a backend other than gloo), the first bad id stays on the
    device until ``check()``.
    """
    engine = CollectiveEngine(
        config_of(ranks.rank, 2),
        GroupTransport(ranks.group, ranks.device, "gloo"),
        Stats.zeros(ranks.rank, 2),
    )
    x = torch.ones(2, 8, device=ranks.device)
    good = torch.tensor([[0, 1], [2, 3]], device=ranks.device)
    bad = torch.tensor([[0, 1], [7, -1]], device=ranks.device)
    for inside, idx in (
        (first == "inside", good),
        (first != "inside", bad),
        (True, bad),
        (False, good),
    ):
        with torch.inference_mode() if inside else nullcontext():
            engine.dispatch(DispatchArguments(Payload(x, None), idx, None, FLAT, None))
    with pytest.raises(ValueError, match=r"topk_idx\[1, 0\] is 7"):
        engine.check()
    engine.check()


def test_tables_made_ahead_are_of_the_mode_of_their_call() -> None:
    """A call in another mode than the one that made them ahead makes its own."""
    config = config_of(0, 1)
    payload = Payload(torch.ones(2, 8), None)
    spec = Spec(layout=ty.Layout.FLAT, exact=True)
    signature = signature_of(CallKind(DISPATCH, payload, spec, None, True), config)
    outputs = Outputs(config, torch.device("cpu"), lambda tokens, rows: 8 * tokens + rows)
    for made_inside in (True, False):
        for used_inside in (True, False):
            with torch.inference_mode(made_inside):
                outputs.make_ahead(signature, 2, 16, 3)
                ahead = signature.ahead
            with torch.inference_mode(used_inside):
                counted = outputs.counted(signature, 2, 16)
                _, arrived = outputs.results(signature, counted, 3, 3)
            fresh = (counted.block, counted.tokens_per_expert, arrived.topk_idx, arrived.source)
            assert all(tensor.is_inference() == used_inside for tensor in fresh)
            assert (counted is ahead.counted) == (made_inside == used_inside)
