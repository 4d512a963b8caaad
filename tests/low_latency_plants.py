"""Bugs of the low-latency engine: see ``mutations.py``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from mutations import Mutation, mutation, planted_in
from nvlink_plants import RELAXED, WHOLE_GPU
from syntax import Edit, change, drop_barrier, move, rewrite, shorten

_FLAG, _SUM_FLAG = "tl.atomic_max(...)", "tl.atomic_max(..., sem='release')"
_READY = "tl.atomic_xchg(words(_) + READY, ...)"
_PARITY, _ONE_HALF = "(call_ % 2).to(tl.int32)", "(call_ % 1).to(tl.int32)"


def _plant(kind: str, file: str, *edits: Edit, within: int = 10) -> Mutation:
    return mutation(kind, f"low_latency_{file}", *edits, within=within)


def _instead(kind: str, file: str, pattern: str, inside: str = "", **changes: str) -> Mutation:
    return _plant(kind, file, change(pattern, inside, **changes))


PUBLISHED = {
    "dispatch: no barrier before the flag": _plant(
        "barrier", "send", drop_barrier("send_piece", before=_FLAG)
    ),
    "dispatch: flag without order": _instead(
        "release", "send", "tl.atomic_max(..., sem=sem_)", "send_piece", sem_=RELAXED
    ),
    "dispatch: flag for this GPU only": _instead(
        "release", "send", "tl.atomic_max(..., scope=all_)", "send_piece", all_=WHOLE_GPU
    ),
    "dispatch: flag before the row": _plant(
        "flag before data",
        "send",
        move(_FLAG, "cast(...)", "send_piece", along=True),
    ),
    "combine: no barrier before the flag": _plant(
        "barrier", "combine", drop_barrier("send_sum", before=_SUM_FLAG)
    ),
    "combine: flag without order": _instead(
        "release", "combine", "tl.atomic_max(..., sem=sem_)", "send_sum", sem_=RELAXED
    ),
    "combine: flag for this GPU only": _instead(
        "release", "combine", "tl.atomic_max(..., scope=all_)", "send_sum", all_=WHOLE_GPU
    ),
    "combine: flag before the sum": _plant(
        "flag before data", "combine", move(_SUM_FLAG, "for _ in range(0, _, _): ...", "send_sum")
    ),
    "table: no barrier before READY": _plant(
        "barrier", "receive", drop_barrier("make_table", before=_READY)
    ),
    "table: READY without order": _instead(
        "release", "receive", "tl.atomic_xchg(words(_) + READY, ..., sem=sem_)", sem_=RELAXED
    ),
    "table: READY before the table": _plant(
        "flag before data", "receive", move(_READY, "tl.minimum(value_in(_), _)", "make_table")
    ),
}

_READY_SEEN = "tl.atomic_add(words(_) + READY, 0, ..., sem=sem_)"

WAITED_FOR = {
    "plain load for an acquire": _plant(
        "acquire",
        "waits",
        rewrite(
            "tl.min(tl.atomic_add(flags_, 0, ...))", "tl.min(tl.load(flags_))", "wait_flag", times=2
        ),
    ),
    "one piece waited for": _instead(
        "acquire", "waits", "flag_ + tl.arange(0, pieces_)", "wait_flag", pieces_="1"
    ),
    "plain loads for acquires": _plant(
        "acquire",
        "waits",
        rewrite(
            "tl.atomic_add(flags_, 0, mask=mask_, sem='acquire', scope='sys')",
            "tl.load(flags_, mask=mask_, other=0)",
            "wait_flags",
            times=4,
        ),
    ),
    "READY seen without order": _plant(
        "acquire", "waits", change(_READY_SEEN, "wait_ready", times=2, sem_=RELAXED)
    ),
    "no barrier behind a flag": _plant("barrier", "waits", drop_barrier("wait_flag")),
    "no barrier behind flags": _plant("barrier", "waits", drop_barrier("wait_flags")),
    "no barrier behind READY": _plant("barrier", "waits", drop_barrier("wait_ready")),
}

WHICH_CALL = {
    "dispatch: flags of the last but one": _plant(
        "wrong epoch",
        "receive",
        rewrite("want_ = 2 * call_", "want_ = 2 * call_ - 4", "receive_slot"),
    ),
    "combine: flags of the last but one": _plant(
        "wrong epoch",
        "combine",
        change("wait_flags(..., want=want_)", "add_rows", want_="want_ - 4"),
        rewrite("seen_ == want_ + 1", "seen_ >= want_ - 3", "add_rows"),
    ),
    "notes of the last but one": _plant(
        "wrong epoch",
        "waits",
        rewrite(
            "here_ & (least_ >= call_) & (call_in(_) >= call_)",
            "here_ & (least_ >= call_ - 2)",
            "have_come",
        ),
    ),
    "weights of the last but one": _plant(
        "wrong epoch",
        "waits",
        rewrite("look(at_, in_) >> 32 != sign_", "look(at_, in_) < 0", "wait_weights", times=2),
    ),
    "calls not counted in combine": _instead(
        "wrong epoch", "combine", "tl.store(epoch_of(...), call_)", call_="call_ - 1"
    ),
}

WRITTEN_AGAIN = {
    "dispatch: one half only": _plant(
        "reused too early", "dispatch", rewrite(_PARITY, _ONE_HALF, "low_dispatch_kernel")
    ),
    "combine: one half only": _plant(
        "reused too early",
        "combine",
        rewrite(_PARITY, _ONE_HALF, "low_combine_kernel"),
        within=40,
    ),
    "combine: peers not waited for": _plant(
        "reused too early",
        "combine",
        rewrite("pid_ == all_ - 1", "pid_ == all_", "low_combine_kernel"),
        within=40,
    ),
}

SENT = {
    "dispatch: last piece dropped": _plant(
        "last token", "dispatch", shorten("send_piece(...)", "low_dispatch_kernel")
    ),
    "combine: last slot dropped": _plant(
        "last token", "combine", shorten("send_sum(...)", "low_combine_kernel")
    ),
}

PLANTS = {**PUBLISHED, **WAITED_FOR, **WHICH_CALL, **WRITTEN_AGAIN, **SENT}
"""By name."""

TORN = _plant(
    "torn sum",
    "waits",
    rewrite("tl.max(doubted_.to(_)) > 0", "tl.max(doubted_.to(tl.int32)) > 1", "agree"),
)
"""Found only where ranks die: ``low_latency_failures.torn``."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, low-latency engines launch kernels with the bug ``name``; "" for copies
    without one.
    """
    return planted_in((PLANTS | {TORN.kind: TORN})[name] if name else None)
