"""Bugs of tasks that engines nvlink and twolevel have in common: see ``mutations.py``."""

from __future__ import annotations

from edits import drop, drop_barrier, insert, move, rewrite
from mutations import mutation

_ROOM, _LESS_ROOM = "tl.maximum(rows_ - ring_.slots, 0)", "tl.maximum(rows_ - ring_.slots - 1, 0)"
_DRAINED, _NOT_DRAINED = f"base_ + {_ROOM}", "base_ + rows_ - ring_.slots"
_COUNTED, _NOT_COUNTED = "tl.store(at_, base_ + _ - _)", "tl.store(at_, base_)"
_UNORDERED = "tl.atomic_add(at_, count_, mask=mask_, sem='relaxed', scope='sys')"
_REDUCE = "reduce_turn|reduce"
TAGS = "peer_word(_, 'tags', ...)"
TAKEN, UPTO = "taken_ = upto_", "upto_ = tl.where(...)"
"""Rows taken up to now, and with those of the tokens that are summed."""

WORKERS = {
    "worker: tasks begin where those of the last call ended": mutation(
        "wrong epoch", "two_scheduler", drop("tl.store(done_in(...), ...)", "begin_tasks")
    ),
    "worker: published twice": mutation(
        "flag before data",
        "two_scheduler",
        drop("tl.store(_, tl.zeros_like(_), ...)", "flush_signals"),
    ),
    "worker: what is owed is added without order": mutation(
        "release",
        "two_scheduler",
        rewrite("add_release(at_, count_, mask_)", _UNORDERED, "flush_signals"),
    ),
}

TASKS = {
    "dispatch: a round's end forgets what is owed": mutation(
        "last chunk", "two_dispatch", drop("flush_signals(...)", "two_dispatch_kernel", nth=0)
    ),
    "dispatch: a kernel ends without publishing": mutation(
        "last chunk", "two_dispatch", drop("flush_signals(...)", "two_dispatch_kernel", nth=-1)
    ),
    "own rows: no barrier between progress read and noted": mutation(
        "barrier", "two_dispatch", drop_barrier("own_turn")
    ),
    "receiver: no barrier behind a look": mutation(
        "barrier", "two_dispatch", drop_barrier("receive_turn")
    ),
    "sender: one slot too many": mutation(
        "credit before read", "two_dispatch", rewrite(_ROOM, _LESS_ROOM, "send_turn")
    ),
    "sender: ring not drained": mutation(
        "reused too early",
        "two_dispatch",
        rewrite(_DRAINED, _NOT_DRAINED, "send_turn"),
        within=30,
        hint=7,
    ),
    "receiver: rows taken not counted": mutation(
        "wrong epoch", "two_dispatch", rewrite(_COUNTED, _NOT_COUNTED, "receive_turn")
    ),
    "combine: a round's end forgets what is owed": mutation(
        "last chunk", "two_combine", drop("flush_signals(...)", "two_combine_kernel", nth=0)
    ),
    "combine: a kernel ends without publishing": mutation(
        "last chunk", "two_combine", drop("flush_signals(...)", "two_combine_kernel", nth=-1)
    ),
    "reducer: no barrier behind its look": mutation(
        "barrier", "two_combine", drop_barrier(_REDUCE, behind="look_at_all(...)")
    ),
    "reducer: last row not awaited": mutation(
        "last chunk",
        "two_combine",
        rewrite("tl.max(at_ - low_ + 1, axis=0)", "tl.max(at_ - low_, axis=0)", _REDUCE),
    ),
    "reducer: credit before read": mutation(
        "credit before read",
        "two_combine",
        drop("add_release(...)", _REDUCE),
        insert(
            "add_release(heads, upto_ - taken_, near & (upto_ > taken_))",
            TAKEN,
            _REDUCE,
            where=(UPTO,),
            first=True,
        ),
    ),
    "call barrier: before its tag": mutation(
        "flag before data",
        "two_headers",
        move("add_release(...)", f"tl.store({TAGS}, ..., mask=_)", "announce_call_to_all"),
        within=30,
    ),
    "call barrier: of the last call": mutation(
        "wrong epoch",
        "two_headers",
        rewrite("call_ + 1 + (rank_ * 0)", "call_ + (rank_ * 0)", "all_are_here"),
    ),
}
