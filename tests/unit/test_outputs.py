"""Outputs of engines with kernels: what a call makes for kernels to fill, and how much work
that is.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tokenyard as ty
from recorded import recorded_object
from tokenyard import Layout
from tokenyard.config import Config
from tokenyard.engines.outputs import CallPlan, Outputs, known_of
from tokenyard.engines.signatures import Signature, signature_of
from tokenyard.handle import Arrived, Spec
from tokenyard.header import DISPATCH, CallKind
from tokenyard.rows import Payload

RANKS, EXPERTS, TOP, MOST, HIDDEN, TOKENS = 2, 6, 3, 5, 64, 4
CONFIG = Config(
    num_experts=EXPERTS,
    hidden=HIDDEN,
    num_topk=TOP,
    max_tokens_per_rank=MOST,
    rank=0,
    world_size=RANKS,
    timeout=1.0,
)
SPECS = {
    "flat": Spec(layout=Layout.FLAT, exact=False),
    "padded": Spec(layout=Layout.EXPERT_PADDED, exact=False),
    "major": Spec(layout=Layout.EXPERT_MAJOR, exact=False, capacity=21, expert_alignment=2),
}


def _signature(spec: Spec, *, weighted: bool) -> Signature:
    payload = Payload(torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16), None)
    return signature_of(CallKind(DISPATCH, payload, spec, None, weighted), CONFIG)


def _outputs() -> Outputs:
    return Outputs(CONFIG, torch.device("cpu"), lambda tokens, rows: tokens + rows)


def _rows(spec: Spec) -> int:
    if spec.layout is Layout.EXPERT_PADDED:
        return CONFIG.num_local_experts * CONFIG.padded_rows
    return CONFIG.padded_rows if spec.capacity is None else spec.capacity


def _call(outputs: Outputs, signature: Signature) -> tuple[CallPlan, Arrived]:
    counted = outputs.counted(signature, TOKENS, 8)
    return outputs.results(signature, counted, CONFIG.padded_rows, _rows(signature.spec))


class _Count(TorchDispatchMode):
    """Counts what torch is asked for, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def _fills(plan: CallPlan, arrived: Arrived) -> list[tuple[torch.Tensor, int]]:
    """Outputs of a static call, and the number that an unwritten place holds."""
    holes = [(plan.slots, -1), (plan.picks, 0), (plan.gather, -1)]
    return [*holes, (arrived.topk_idx, -1), (arrived.weights, 0), (arrived.source, -1)]


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_static_tables_begin_with_holes_in_every_call(spec: Spec, weighted: bool) -> None:
    """Also behind a call whose outputs were written full; shapes and strides stay those of the
    first.
    """
    outputs, signature = _outputs(), _signature(spec, weighted=weighted)
    first = _fills(*_call(outputs, signature))
    shapes = [(output.shape, output.stride(), output.dtype) for output, _ in first]
    for _ in range(3):
        made = _fills(*_call(outputs, signature))
        assert [(output.shape, output.stride(), output.dtype) for output, _ in made] == shapes
        for output, hole in made:
            assert (output == hole).all()
            output.fill_(77)
        for at, (output, _) in enumerate(made):  # none lies over another
            output.fill_(at)
        assert all((output == at).all() for at, (output, _) in enumerate(made))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_static_call_fills_its_tables_in_one_go(spec: Spec) -> None:
    """They cost more host time than exact shapes while every output was filled by a launch of its
    own.
    """
    outputs, signature = _outputs(), _signature(spec, weighted=True)
    _call(outputs, signature)
    with _Count() as count:
        _call(outputs, signature)
    no_work = {"empty", "new_empty", "as_strided", "view", "detach"}
    assert [name for name in count.seen if name.split(".")[0] not in no_work] == ["clone"]


def test_tables_first_made_in_inference_mode_serve_autograd() -> None:
    outputs, signature = _outputs(), _signature(SPECS["flat"], weighted=True)
    with torch.inference_mode():
        _call(outputs, signature)
    for output, _ in _fills(*_call(outputs, signature)):
        assert not output.is_inference()


def test_a_compiled_function_takes_a_result() -> None:
    """What a call has made are plain attributes: a graph that is not to break reads them."""
    ep, _ = recorded_object(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOP, max_tokens_per_rank=MOST
    )
    x, picks = torch.ones(MOST, HIDDEN), torch.zeros(MOST, TOP, dtype=torch.int64)

    def experts(recv: ty.Received) -> torch.Tensor:
        ids, weights = recv.topk_idx, recv.topk_weights
        assert ids is not None and weights is not None
        return recv.x.sum() + weights.sum() + recv.source.sum() + ids.sum()

    compiled = torch.compile(experts, fullgraph=True, backend="eager")
    with ep:
        for _ in range(3):  # from the third on there are tables made ahead
            recv = ep.dispatch(x, picks, torch.ones(MOST, TOP))
            assert compiled(recv) == 0 and recv.source.shape == (0,)  # the graph reads first


def test_a_result_is_whole_when_its_call_returns() -> None:
    """Whoever reads it first, in whatever mode, on whatever thread, makes nothing then that is
    kept: training behind a look in inference mode, say, has normal tensors."""
    ep, _ = recorded_object(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOP, max_tokens_per_rank=MOST
    )
    x, picks = torch.ones(MOST, HIDDEN), torch.zeros(MOST, TOP, dtype=torch.int64)
    with ep:
        for _ in range(3):
            recv = ep.dispatch(x, picks, torch.ones(MOST, TOP))
            whole = dict(vars(recv))
            with torch.inference_mode(), _Count() as count:
                looks = recv.topk_idx, recv.topk_weights, recv.source, recv.tokens_per_expert
            assert not count.seen and not any(look is None or look.is_inference() for look in looks)
            assert vars(recv) == whole


@pytest.mark.parametrize("exact", [True, False])
def test_a_copy_of_a_handle_points_to_its_own_plan(exact: bool) -> None:
    """Kernels are given addresses: those of a copy must last as long as the copy does."""
    ep, _ = recorded_object(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOP, max_tokens_per_rank=MOST
    )
    x, picks = torch.ones(MOST, HIDDEN), torch.zeros(MOST, TOP, dtype=torch.int64)
    with ep:
        handle = ep.dispatch(x, picks, exact=exact).handle
        original = known_of(handle.plan)
        for other in (copy.deepcopy(handle), pickle.loads(pickle.dumps(handle))):
            known = known_of(other.plan)
            assert known.route_at == other.plan.route.data_ptr() != original.route_at
            assert known.slots_at == other.plan.slots.data_ptr()
            assert known.counts.tolist() == original.counts.tolist()
            assert (known.num_tokens, known.num_rows) == (original.num_tokens, original.num_rows)
            assert (
                ep.dispatch(x, handle=other).x.shape[0] == ep.dispatch(x, handle=handle).x.shape[0]
            )


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
def test_compilers_take_handles_from_outside_of_a_graph(layout: Layout) -> None:
    """Of eager calls, of which nobody or somebody has read the plan's tensors: they are made in a
    break of the graph, where the call begins."""
    sizes = {"num_experts": 8, "hidden": HIDDEN, "num_topk": 2, "max_tokens_per_rank": 16}
    ep, _ = recorded_object(**sizes)

    def layer(x: torch.Tensor, rows: torch.Tensor, handle: ty.Handle) -> torch.Tensor:
        again = ep.dispatch(x, handle=handle)
        return ep.combine(2 * rows, handle) + ep.combine(again.x + 1, again.handle)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    with ep:
        for tokens in (3, 4, 5):
            x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
            for read in (False, True):
                idx = torch.arange(2 * tokens).view(-1, 2) % 8
                recv = ep.dispatch(x, idx, torch.ones(tokens, 2), layout=layout)
                if read:
                    assert len(tuple(recv.handle.plan)) == len(recv.handle.plan)
                before = ep.stats().calls.get("combine", 0)
                assert compiled(x, recv.x, recv.handle).shape == x.shape
                assert ep.stats().calls["combine"] == before + 2
