"""Times out of the JSON that ``tokenyard bench --json`` or the suite ``nvlink`` writes, each beside
its workload; and rates out of times: least squares of relative errors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenyard.engines.known import COLLECTIVE
from tokenyard.planner.model import predict
from tokenyard.planner.rates import CALLS, CallRates, Rates
from tokenyard.planner.workload import H200_SMS, Dtype, Workload

_linalg: Any = torch.linalg

_ROUNDS, _NUDGE = 40, 1e-4

SUITE_CALLS: dict[str, tuple[str, Dtype]] = {
    "bf16": ("dispatch", "bf16"),
    "fp8": ("dispatch", "fp8"),
    "view": ("in_place", "bf16"),
    "view8": ("in_place", "fp8"),
    "combine": ("combine", "bf16"),
}
"""Rows of the suite ``nvlink`` that a plan speaks of, by their kind."""

SWEEP_CALLS = {
    ("tokenyard nvlink", "cached dispatch"): "dispatch",
    ("tokenyard nvlink", "combine"): "combine",
    ("tokenyard collective", "cached dispatch"): COLLECTIVE,
    ("tokenyard collective", "combine"): "collective_back",
}
"""Rows of a sweep, by name and phase."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured time: the field ``call`` of ``Rates`` that it tells about, the work, and the
    median of the slowest rank in us, on the device's clock if there is one."""

    call: str
    work: Workload
    us: float


def read(path: Path) -> list[Point]:
    """Times of this library in a record: uniform routing, bf16 or rows that came as FP8, layout
    flat. One node is assumed: records do not say which ranks share one. ValueError: there are none.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        rows = [_flat(row) for row in record["rows"]]
        ranks, most_sms = len(record["devices"]), _most_sms(rows)
        points = [point for row in rows if (point := _point(row, ranks, most_sms))]
    except (OSError, KeyError, TypeError, ValueError) as wrong:
        raise ValueError(
            f"rates ({path}) must be a file of tokenyard bench --json or of suite nvlink "
            f"({type(wrong).__name__}: {wrong})"
        ) from wrong
    if not points:
        raise ValueError(
            f"rates ({path}) has no time of engine nvlink or collective with uniform routing and "
            f"layout flat: run tokenyard bench --skew uniform --layout flat --json FILE"
        )
    return points


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the fields of its case, which the first schema calls a job."""
    case = row.get("case") or row.get("job")
    if case is None or row.get("network"):
        raise ValueError("records of other suites, such as twolevel, have no rates of links")
    return {**row, **case}


def _most_sms(rows: list[dict[str, Any]]) -> int:
    """What calls without a limit had; if none tells, those of an H200, or as many as asked."""
    told = [(row.get("section") or "sms", row["sms"]) for row in rows if row["sms"] is not None]
    asked = [H200_SMS, *(sms for _, sms in told)]
    return max((sms for section, sms in told if section != "sms"), default=max(asked))


def _point(row: dict[str, Any], ranks: int, most_sms: int) -> Point | None:
    call, dtype = SUITE_CALLS.get(row.get("kind") or "", (None, "bf16"))
    if not row.get("kind") and row["quantize"] == "none":
        call = SWEEP_CALLS.get((row["name"], row["phase"]))
    clock = row["device"] or row["wall"]
    usual = (row["skew"], row["layout"], row["dtype"]) == ("uniform", "flat", "bf16")
    if call is None or clock is None or not usual:
        return None
    if not 0 < clock["median"] < math.inf:
        raise ValueError(f"a time of {clock['median']} us")
    given = {name: row[name] for name in ("tokens", "hidden", "experts", "topk")}
    given["sms"] = min(row["sms"] or most_sms, most_sms)
    if row.get("rings") is not None:
        given["buffer_bytes"] = row["rings"]
    work = Workload(nodes=1, gpus_per_node=ranks, dtype=dtype, most_sms=most_sms, **given)
    return Point(call, work, clock["median"])


# Rates out of them


def rates_from(path: Path, base: Rates) -> Rates:
    """``base`` with those calls fitted again of which ``path`` has times for two batch sizes or
    more. What one program does is fitted to two numbers of SMs or more, and kept otherwise.
    ValueError: none."""
    points = read(path)
    by_call: dict[str, list[Point]] = {call: [] for call in CALLS}
    for point in points:  # a dispatch to heaps tells of those in place
        in_heap = predict(point.call, point.work, base).in_heap
        by_call["in_place" if in_heap else point.call].append(point)
    fitted = {
        call: fit(call, mine, base)
        for call, mine in by_call.items()
        if len({point.work.tokens for point in mine}) > 1
    }
    if not fitted:
        raise ValueError(
            f"rates ({path}) must have times for two numbers of tokens: bench with --tokens "
            f"256,4096"
        )
    return replace(base, **fitted, source=f"{path.name}: {', '.join(fitted)}; else {base.source}")


def fit(call: str, points: Sequence[Point], base: Rates) -> CallRates:
    """Rates of ``call`` with which the model comes closest to ``points``, which all tell of it."""
    start: CallRates = getattr(base, call)
    free = [start.fixed_us, start.link_gbs]
    if start.program_gbs is not None and len({point.work.sms for point in points}) > 1:
        free.append(start.program_gbs)

    def leg_of(logs: Tensor) -> CallRates:
        return CallRates(*[float(value) for value in logs.exp()], *astuple(start)[len(free) :])

    def errors(logs: Tensor) -> Tensor:
        rates = replace(base, **{call: leg_of(logs)})
        ratios = [predict(point.call, point.work, rates).us / point.us for point in points]
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
