"""What crosses the pipe to a rank: a :class:`Job` goes in, an :class:`Outcome` comes back. Those of
all ranks make one verdict (:func:`judge`)."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import SkipTest

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a test body runs; the body's ``ranks`` parameter.

    Attributes:
        device: to put tensors on. engine: name of the engine under test.
        group: of all ranks: a process group kept from test to test, or a
            :class:`tokenyard.memory.symmetric.MemoryGroup`.
    """

    rank: int
    world_size: int
    device: torch.device
    engine: str
    group: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A test body and its arguments, in words that another process understands.

    Attributes:
        module, path: name under which pytest imported the test module, and its file.
        qualname: of the body inside its module.
        code: of that module, see :func:`tokenyard.testing.modules.code_of`.
        engine: name of the engine under test.
        arguments: pickled value of each argument, without ``ranks``.
        sys_path: where the test process finds its modules.
    """

    module: str
    path: str
    qualname: str
    code: bytes = field(repr=False)
    engine: str
    arguments: dict[str, bytes]
    sys_path: list[str]


class Ending(enum.Enum):
    """How a body ended on one rank; what explains most comes first. ``DIED``: by exit or SIGKILL,
    which may be on purpose; ``CRASHED``: by any other signal."""

    FAILED = 0
    CRASHED = 1
    DIED = 2
    STUCK = 3
    SKIPPED = 4
    PASSED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a body ended on one rank. ``error``: the exception's text, the reason of a skip, or how
    the process ended. ``stack``: where; may be empty."""

    ending: Ending
    error: str = ""
    stack: str = ""


class RankFailure(AssertionError):
    """A test body failed; the message names the ranks and carries their tracebacks."""


def is_fine(outcome: Outcome, may_die: bool) -> bool:
    return outcome.ending is Ending.PASSED or (outcome.ending is Ending.DIED and may_die)


def judge(outcomes: dict[int, Outcome], may_die: tuple[int, ...]) -> None:
    """Return if every rank passed (or died as it may); raise :class:`RankFailure` otherwise, or
    ``unittest.SkipTest`` if all ranks skip."""
    __tracebackhide__ = True
    fine = {rank for rank, outcome in outcomes.items() if is_fine(outcome, rank in may_die)}
    if len(fine) == len(outcomes):
        return
    if all(outcome.ending is Ending.SKIPPED for outcome in outcomes.values()):
        raise SkipTest("; ".join(sorted({outcome.error for outcome in outcomes.values()})))
    raise RankFailure(_describe(outcomes, fine))


def _describe(outcomes: dict[int, Outcome], fine: set[int]) -> str:
    """A line that sums up, then each distinct stack once with the ranks that it belongs to."""
    bad = sorted(outcomes.keys() - fine, key=lambda rank: (outcomes[rank].ending.value, rank))
    errors = _group((_text(outcomes[rank]), rank) for rank in bad)
    lines = [
        "; ".join(
            f"{_ranks(ranks)} of {len(outcomes)}: {text.splitlines()[0]}"
            for text, ranks in errors.items()
        )
    ]
    for stack, ranks in _group((outcomes[rank].stack, rank) for rank in bad).items():
        errors = _group((_text(outcomes[rank]), rank) for rank in ranks)
        texts = [
            text if len(errors) == 1 else f"{_ranks(of)}: {text}" for text, of in errors.items()
        ]
        is_traceback = outcomes[ranks[0]].ending is Ending.FAILED
        first, second = (stack.splitlines(), texts) if is_traceback else (texts, stack.splitlines())
        lines += ["", f"--- {_ranks(ranks)}", *first, *second]
    for text, ranks in _group((_text(outcomes[rank]), rank) for rank in sorted(fine)).items():
        lines += ["", f"--- {_ranks(ranks)}", text]
    return "\n".join(lines)


def _text(outcome: Outcome) -> str:
    if outcome.ending is Ending.SKIPPED:
        return f"skipped ({outcome.error}), but not every rank did"
    return outcome.error or outcome.ending.name.lower()


def _group(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for text, rank in pairs:
        groups.setdefault(text, []).append(rank)
    return groups


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
