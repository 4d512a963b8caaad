"""How likely it is that a token goes to a group of experts. Exact; nothing is drawn but which
experts are popular.

A token picks K distinct experts, one after the other, each among those left with a chance in
proportion to its popularity. Equivalently every expert e rings after an exponential time of rate
``popularity[e]``, and the first K are picked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

SKEWS = ("uniform", "zipf")

_STEP, _EARLIEST = 0.25, -38.0
"""Of the trapezoid rule over the logarithm of time: it converges exponentially; tested to 1e-9."""


def popularity(skew: str, experts: int, seed: int = 0) -> list[float]:
    """Chances of the experts for a single pick.

    Args:
        skew: ``uniform``, or ``zipf``: the n-th most popular expert in proportion to ``1 / n``.
        seed: of which expert is the n-th.
    """
    if skew == "uniform":
        return [1 / experts] * experts
    if skew != "zipf":
        raise ValueError(f"skew {skew!r} is unknown; use one of {', '.join(SKEWS)}")
    chances = [1 / n for n in range(1, experts + 1)]
    random.Random(seed).shuffle(chances)
    total = sum(chances)
    return [chance / total for chance in chances]


def reach(chances: Sequence[float], bounds: Sequence[int], topk: int) -> list[float]:
    """Probability that one of ``topk`` picks is among experts ``bounds[i] .. bounds[i + 1] - 1``,
    for each ``i``.

    >>> reach([0.25] * 4, [0, 1, 4], 2)
    [0.5, 1.0]
    """
    experts = len(chances)
    if min(chances) == max(chances):
        sizes = [end - begin for begin, end in pairwise(bounds)]
        return [1 - math.comb(experts - size, topk) / math.comb(experts, topk) for size in sizes]
    return _reach_weighted(torch.tensor(chances, dtype=torch.float64), bounds, topk)


def _reach_weighted(rates: Tensor, bounds: Sequence[int], topk: int) -> list[float]:
    """A group of rate W is reached if it rings before K others did: the integral of ``W exp(-W t)
    P(others by t < K)``.
    """
    latest = math.log(80.0 / float(rates.min()))
    times = torch.arange(_EARLIEST, latest, _STEP, dtype=torch.float64).exp()
    before = _counts(rates, bounds, times, topk)
    after = _counts(rates.flip(0), [len(rates) - bound for bound in reversed(bounds)], times, topk)[
        ::-1
    ]
    reached: list[float] = []
    for group, (begin, end) in enumerate(pairwise(bounds)):
        rate = rates[begin:end].sum()
        fewer = (before[group] * after[group + 1].cumsum(1).flip(1)).sum(1)
        reached.append(float((rate * times * (-rate * times).exp() * fewer).sum() * _STEP))
    return reached


def _counts(rates: Tensor, bounds: Sequence[int], times: Tensor, most: int) -> list[Tensor]:
    """For each bound: ``[times, most]``, the chance that exactly n < ``most`` of the experts before
    it have rung.
    """
    counts = torch.zeros(len(times), most, dtype=torch.float64)
    counts[:, 0] = 1
    found: list[Tensor] = []
    for begin, end in zip([0, *bounds], bounds, strict=False):
        for rate in rates[begin:end]:
            rung = -torch.expm1(-rate * times)[:, None]
            counts = counts * (1 - rung) + torch.nn.functional.pad(counts[:, :-1], (1, 0)) * rung
        found.append(counts)
    return found
