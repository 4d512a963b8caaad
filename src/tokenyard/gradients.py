"""Formulas of derivatives: a dispatch's gradient is a combine, a combine's a cached dispatch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tokenyard.engines.plans import weights_of_rows
from tokenyard.handle import Plan, Spec
from tokenyard.routing import merge_weights
from tokenyard.rows import take_values
from tokenyard.types import Layout


class Moves(Protocol):
    """Differentiable calls along one plan. ``raw``: rows are in arrival order in any layout."""

    plan: Plan
    spec: Spec

    def combine(
        self, rows: Tensor, reduce_weights: Tensor | None = None, *, raw: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Sums ``[T, H]``, and sums of weights ``[T, K]`` (None without ``reduce_weights``)."""
        ...

    def redispatch(self, x: Tensor, *, raw: bool) -> Tensor:
        """``x [T, H]`` where its rows are."""
        ...


def of_dispatch(
    moves: Moves, rows: Tensor | None, weights: Tensor | None, topk_idx: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``x`` and ``topk_weights`` from those of received ``rows`` and ``weights``; None
    where nobody asks. ``topk_idx``: the received one, needed for weights in ``FLAT``."""
    reduce = None if weights is None else by_arrival(weights, moves.plan, moves.spec, topk_idx)
    grad_x = reduced = None
    if rows is not None:
        grad_x, reduced = moves.combine(rows, reduce, raw=False)
    elif reduce is not None:
        reduced, _ = moves.combine(reduce, raw=True)
    if reduced is None:
        return grad_x, None
    return grad_x, reduced.gather(1, moves.plan.first_pick)


def by_arrival(grad: Tensor, plan: Plan, spec: Spec, topk_idx: Tensor | None) -> Tensor:
    """Gradients of returned weights, or weights to reduce, ``[Nb, K]`` of arrived rows; else 0."""
    if spec.layout is Layout.FLAT:
        assert topk_idx is not None
        here = torch.where(topk_idx < 0, 0.0, grad)
        return take_values(here, plan.slots[:, 0], 0.0) if spec.placed else here
    values = take_values(grad, plan.slots.reshape(-1), 0.0).view(plan.slots.shape)
    shape = plan.slots.shape[0], plan.first_pick.shape[1]
    spread = torch.zeros(shape, dtype=torch.float32, device=grad.device)
    return spread.scatter_add(1, plan.picks, values)


def of_combine(
    moves: Moves, grad: Tensor, weighting: tuple[Tensor, Tensor] | None, raw: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of rows, and of weights if ``weighting`` has the rows and weights combined."""
    there = moves.redispatch(grad, raw=raw)
    if weighting is None:
        return there, None
    rows, weights = weighting
    valid = (moves.plan.gather >= 0).unsqueeze(1)
    grad_weights = torch.where(valid, rows.float() * there.float(), 0.0).sum(1)
    return (weights.unsqueeze(1) * there.float()).to(rows.dtype), grad_weights


def weights_there(moves: Moves, weights: Tensor, topk_idx: Tensor, num_rows: int) -> Tensor:
    """``weights [T, K]`` as a dispatch returns them; linear. ``topk_idx``: the received one."""
    plan, spec = moves.plan, moves.spec
    arrived = moves.redispatch(merge_weights(weights, plan.first_pick), raw=True)
    if spec.layout is not Layout.FLAT:
        return weights_of_rows(arrived, plan.slots, plan.picks, num_rows)
    if spec.placed:
        arrived = take_values(arrived, plan.gather, 0.0)
    return torch.where(topk_idx < 0, 0.0, arrived)


def weighted_tangent(
    tangent: Tensor, rows: Tensor, weights: Tensor, of_weights: Tensor, valid: Tensor
) -> Tensor:
    """Tangent of ``weights * rows`` in the dtype of the rows, 0 on rows that are not ``valid``."""
    product = weights.unsqueeze(1) * tangent.float() + of_weights.unsqueeze(1) * rows.float()
    return torch.where(valid.unsqueeze(1), product, 0.0).to(rows.dtype)
