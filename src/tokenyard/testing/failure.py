"""Turn what happened on every rank into one verdict."""

from __future__ import annotations

from collections.abc import Iterable
from unittest import SkipTest

from tokenyard.testing.job import Ending, Outcome


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
