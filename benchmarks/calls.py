"""Kinds of calls that suites measure, as data, and the bars of this project.

Bars are goals that this project has set itself; they are no limits of the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import tokenyard as ty
from tokenyard.testing.baselines import (
    GATHER,
    PLAIN_EXCHANGE,
    SCATTER,
    instead_of_combine,
    instead_of_dispatch,
)
from tokenyard.testing.cases import Case
from tokenyard.testing.checked_calls import COMBINE, Batch, Call, engine_calls, share

FRESH, PLAIN, DIRECT, BACK, BACK_IN_PLACE = "new routing", "bf16", "view", "combine", "pull"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call: what it changes in a case, and what it may take on :data:`BARS_RANKS`.

    ``cached``: a dispatch whose routing is known. ``combine``: no dispatch.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    bar_us: float | None = None
    cached: bool = True
    combine: bool = False


CAST = {"quantize": "fp8", "cast_before": True}
KINDS = {
    FRESH: Kind("dispatch BF16, new routing", cached=False),
    PLAIN: Kind("dispatch BF16", bar_us=470),
    "fp8": Kind("dispatch FP8", CAST, bar_us=245),
    "fused": Kind("dispatch BF16, FP8 on the wire", {"quantize": "fp8"}, bar_us=280),
    "major": Kind("dispatch FP8, expert-major", {**CAST, "layout": "expert_major"}, bar_us=330),
    DIRECT: Kind("dispatch BF16, in place", {"in_place": True}, bar_us=465),
    "view8": Kind("dispatch FP8, in place", {**CAST, "in_place": True}, bar_us=245),
    BACK: Kind("combine BF16", bar_us=470, combine=True),
    BACK_IN_PLACE: Kind("combine BF16, in place", {"in_place": True}, bar_us=475, combine=True),
}
IN_PLACE = (DIRECT, "view8", BACK_IN_PLACE)
IN_PLACE_ENGINES = ("nvlink", "twolevel")
BARS_RANKS = 4
"""Bars are for the wire traffic of this many ranks; fewer move less."""

SMS_BARS_US = {DIRECT: {8: 560.0, 24: 490.0}, PLAIN: {24: 500.0}, BACK: {24: 560.0}}
"""What these may take with so many SMs."""

NEW_ROUTING_BAR_US = 45.0
"""What a new routing may add."""


@dataclass(frozen=True, slots=True)
class SuiteCall(Call):
    """A call with its kind of :data:`KINDS`.

    Attributes:
        prepare: brings an input to where ``run`` reads it, before a result is checked.
        bar_us: what it should at most take, in microseconds.
    """

    kind: str = ""
    prepare: Callable[[int], Any] | None = None
    bar_us: float | None = None

    @classmethod
    def of(cls, call: Call, **known: Any) -> SuiteCall:
        """``call`` with what is known besides."""
        same = {each.name: getattr(call, each.name) for each in fields(Call)}
        return cls(**{**same, **known})

    def attempt(self, number: int, truth: Any) -> None:
        if self.prepare is not None:
            self.prepare(number)
        Call.attempt(self, number, truth)


def rows_of(case: Case) -> Case:
    """What is moved, whoever moves it."""
    plain: dict[str, Any] = {"engine": "", "sms": None, "rings": None, "topology": None}
    return replace(case, in_place=False, cast_before=False, **plain)


def library_calls(
    ep: ty.ExpertParallel,
    case: Case,
    batches: Sequence[Batch],
    kinds: Sequence[str],
    another: Callable[[], ty.ExpertParallel] | None = None,
    bars: Mapping[str, float | None] | None = None,
) -> list[SuiteCall]:
    """Of ``kinds`` those that the engine can do. Collective.

    ``another``: makes an object for combines in place, which need symmetric memory that no dispatch
    overwrites. ``bars``: what kinds may take, us.
    """
    calls: list[SuiteCall] = []
    for name in kinds:
        kind = KINDS[name]
        if name in IN_PLACE and ep.engine not in IN_PLACE_ENGINES:
            continue
        found = engine_calls(ep, replace(case, **kind.changes), batches)
        fresh, cached, combine = found
        call = combine if kind.combine else cached if kind.cached else fresh
        bar = (bars or {}).get(name)
        call = SuiteCall.of(call, name=kind.name, kind=name, bar_us=bar, note="")
        if name == BACK_IN_PLACE:
            assert another is not None
            call = _pulling(call, another(), batches)
        calls.append(call)
    return calls


def _pulling(call: SuiteCall, ep: ty.ExpertParallel, batches: Sequence[Batch]) -> SuiteCall:
    """A combine by ``ep`` in place, of the rows that ``call`` combines."""
    received = [ep.dispatch(each.x, *each.picks) for each in batches]
    full = [recv.x * share(ep.rank) for recv in received]
    handles = [recv.handle for recv in received]
    longest = max(handles, key=lambda handle: handle.num_rows)
    view = ep.empty_for_combine(longest, in_place=True).zero_()
    rows = [view[: handle.num_rows] for handle in handles]

    def prepare(number: int) -> Any:
        return rows[number].copy_(full[number])

    def run(number: int) -> Any:
        return ep.combine(rows[number], handles[number], in_place=True)

    return replace(call, run=run, prepare=prepare, ep=ep)


def collectives(
    case: Case, batches: Sequence[Batch], *, fp8: bool = False, gathers: bool = True
) -> list[SuiteCall]:
    """What anybody could use instead, of BF16 rows; ``fp8``: there of FP8 rows as well."""
    plain, cast = rows_of(case), replace(rows_of(case), quantize="fp8")
    moved = {
        "BF16": [*instead_of_dispatch(plain, batches), *instead_of_combine(plain, batches)],
        "FP8": instead_of_dispatch(cast, batches) if fp8 else [],
    }
    names = (PLAIN_EXCHANGE, *((GATHER, SCATTER) if gathers else ()))
    return [_of(rows, e) for rows, calls in moved.items() for e in calls if e.name in names]


def _of(rows: str, call: Call) -> SuiteCall:
    back = " back" if (call.name, call.phase) == (PLAIN_EXCHANGE, COMBINE) else ""
    return SuiteCall.of(call, name=f"{call.name}{back} {rows}")
