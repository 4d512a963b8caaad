"""A call that is like an earlier good one is not checked again: what only looks like it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenyard as ty
from tokenyard import validation

pytest.importorskip("triton")
SIZES = {"num_experts": 8, "hidden": 256, "num_topk": 2, "max_tokens_per_rank": 4}
X, PICKS = torch.zeros(4, 256, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
WEIGHTS = torch.ones(4, 2)
BAD: dict[str, dict[str, Any]] = {
    "a number for a flag": {"exact": 1},
    "a flag for a number": {"expert_alignment": True},
    "a fraction": {"expert_alignment": 1.0},
    "what cannot be compared": {"layout": []},
    "another dtype": {"x": X.long()},
    "another shape": {"topk_idx": PICKS[:3]},
    "other dimensions": {"x": X.unsqueeze(0)},
    "a view that negates": {"x": torch._neg_view(X)},  # pyright: ignore
    "sparse weights": {"topk_weights": WEIGHTS.to_sparse()},
    "no tensor": {"topk_idx": PICKS.tolist()},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_only_like_a_good_call_is_refused(name: str) -> None:
    from recorded import recorded_object

    ep, _ = recorded_object(**SIZES)
    good: dict[str, Any] = {"x": X, "topk_idx": PICKS, "topk_weights": WEIGHTS}
    with ep, torch.no_grad():
        for _ in range(2):
            ep.dispatch(**good)
        with pytest.raises(ValueError):
            ep.dispatch(**(good | BAD[name]))


def test_rows_of_another_handle_are_refused() -> None:
    from recorded import recorded_object

    (ep, _), (other, _) = recorded_object(**SIZES), recorded_object(**SIZES)
    with ep, other, torch.no_grad():
        known, foreign = ep.dispatch(X, PICKS), other.dispatch(X, PICKS)
        for _ in range(2):
            ep.combine(known.x, known.handle)
            ep.dispatch(X, handle=known.handle)
        for wrong in (
            lambda: ep.combine(known.x, foreign.handle),
            lambda: ep.combine(known.x.long(), known.handle),
            lambda: ep.combine(known.x, known.handle, weighted=True),
            lambda: ep.dispatch(X[:3], handle=known.handle),
            lambda: ep.dispatch(X, PICKS, handle=known.handle),
            lambda: ep.dispatch(X, handle=known.handle, exact=False),
        ):
            with pytest.raises(ValueError):
                wrong()


def test_few_good_calls_are_kept() -> None:
    from recorded import recorded_object

    ep, _ = recorded_object(**SIZES)
    with ep, torch.no_grad():
        for tokens in range(validation.MOST_KEPT + 2):
            picks = torch.zeros(tokens, 2, dtype=torch.int64)
            ep.dispatch(torch.zeros(tokens, 256, dtype=torch.bfloat16), picks)
        assert 0 < len(ep._validation._good) <= validation.MOST_KEPT  # pyright: ignore


def test_calls_are_counted_until_the_object_is_closed() -> None:
    from recorded import recorded_object

    ep, _ = recorded_object(**SIZES)
    counted = {"dispatch": 3, "cached dispatch": 2, "combine": 1}
    with ep, torch.no_grad():
        known = ep.dispatch(X, PICKS)
        ep.dispatch(X, PICKS)
        assert ep.stats().calls == {"dispatch": 2}
        ep.dispatch(X, PICKS, exact=False, layout=ty.Layout.EXPERT_MAJOR)
        ep.dispatch(X, handle=known.handle)
        ep.dispatch(X, handle=known.handle)
        ep.combine(known.x, known.handle)
    assert ep.stats().calls == counted
