"""Rates out of measured times: least squares of relative errors, a few numbers per kind of call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.planner.model import predict
from tokenyard.planner.rates import LEGS, Leg, Rates
from tokenyard.planner.record import Point, read

_linalg: Any = torch.linalg

_ROUNDS, _NUDGE = 40, 1e-4


def rates_from(path: Path, base: Rates) -> Rates:
    """``base`` with those kinds of call fitted again of which ``path`` has times for at least two
    batch sizes.

    What one program does is fitted if there are at least two numbers of SMs, and kept otherwise.

    Raises:
        ValueError: ``path`` is no record, or has no kind of call with two batch sizes.
    """
    points = read(path)
    by_leg = {leg: [point for point in points if point.leg == leg] for leg in LEGS}
    fitted = {
        leg: fit(leg, mine, base)
        for leg, mine in by_leg.items()
        if len({point.work.tokens for point in mine}) > 1
    }
    if not fitted:
        raise ValueError(
            f"rates ({path}) must have times for two numbers of tokens: bench with --tokens "
            f"256,4096"
        )
    return replace(base, **fitted, source=f"{path.name}: {', '.join(fitted)}; else {base.source}")


def fit(leg: str, points: Sequence[Point], base: Rates) -> Leg:
    """The leg under which the model comes closest to ``points``, all of that leg."""
    start: Leg = getattr(base, leg)
    free = [start.fixed_us, start.link_gbs]
    if start.program_gbs is not None and len({point.work.sms for point in points}) > 1:
        free.append(start.program_gbs)

    def leg_of(logs: Tensor) -> Leg:
        return Leg(*[float(value) for value in logs.exp()], *start[len(free) :])

    def errors(logs: Tensor) -> Tensor:
        rates = replace(base, **{leg: leg_of(logs)})
        ratios = [predict(leg, point.work, rates).us / point.us for point in points]
        return torch.tensor(ratios, dtype=torch.float64).log()

    return leg_of(_least_squares(errors, torch.tensor(free, dtype=torch.float64).log()))


def _least_squares(errors: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where the squares of ``errors`` are least, by damped Gauss-Newton steps from ``start``."""
    at, damping = start, 1e-3
    identity, seen = torch.eye(len(at), dtype=torch.float64), errors(at)
    for _ in range(_ROUNDS):
        jacobian = torch.stack(
            [(errors(at + _NUDGE * identity[n]) - seen) / _NUDGE for n in range(len(at))], 1
        )
        step: Tensor = _linalg.solve(jacobian.T @ jacobian + damping * identity, -jacobian.T @ seen)
        there = errors(at + step)
        if there.square().sum() < seen.square().sum():
            at, seen, damping = at + step, there, damping / 3
        else:
            damping *= 4
    return at
