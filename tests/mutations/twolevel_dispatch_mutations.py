"""Bugs of the two-level dispatch: see ``twolevel_mutations.py``."""

from __future__ import annotations

from edits import change, drop, drop_barrier, guard, importing, insert, rewrite
from mutations import mutation

_ROOM, _LESS_ROOM = "tl.maximum(rows_ - ring_.slots, 0)", "tl.maximum(rows_ - ring_.slots - 1, 0)"
_DRAINED, _NOT_DRAINED = f"base_ + {_ROOM}", "base_ + rows_ - ring_.slots"
_COUNTED, _NOT_COUNTED = "tl.store(at_, base_ + _ - _)", "tl.store(at_, base_)"
_LOOP = "while _: ..."

NETWORK_SENDER = {
    "network sender: one slot too many": mutation(
        "credit before read", "two_far", rewrite(_ROOM, _LESS_ROOM, "far_turn")
    ),
    "network sender: last chunk dropped": mutation(
        "last chunk",
        "two_far",
        guard(
            "put_chunk(...)",
            "left_ > n_",
            "far_turn",
            where=("n_ = tl.minimum(left_, _)",),
        ),
    ),
    "network sender: tail without its row, mapped": mutation(
        "flag before data",
        "two_far",
        change(
            "defer_signal(..., count=count_)",
            "put_chunk",
            where=("first_.to(tl.int64) * _",),
            count_="count_ + (first_ == 0)",
        ),
        part="peers",
    ),
    "network sender: ring not drained": mutation(
        "reused too early", "two_far", rewrite(_DRAINED, _NOT_DRAINED, "far_turn"), within=30
    ),
    "network sender: rows not counted": mutation(
        "wrong epoch", "two_far", rewrite(_COUNTED, _NOT_COUNTED, "far_turn")
    ),
}

_EARLY = """return_credits(
    peers, hop.mine, hop.home, hop.peer, hop.node, turn, hop.done, hop.done + n, left == n, k
)"""
_ADD = "add_release(words(at_), count_, None)"

FORWARDER = {
    "forwarder: no barrier behind its looks": mutation(
        "barrier", "two_forward", drop_barrier("forward")
    ),
    "forwarder: credit before read": mutation(
        "credit before read",
        "two_forward",
        drop("return_credits(...)", "end_turn"),
        insert(_EARLY, _LOOP, "forward"),
    ),
    "forwarder: credit before read, mapped": mutation(
        "credit before read",
        "two_forward",
        rewrite("defer_signal(..., counter=at_, count=count_)", _ADD, "return_credits"),
        drop("return_credits(...)", "end_turn"),
        insert(_EARLY, _LOOP, "forward"),
        importing("add_release", "sync"),
        part="peers",
    ),
    "forwarder: a credit too many": mutation(
        "credit before read",
        "two_forward",
        change("credit(..., count=count_)", "return_credits", count_="count_ + 1"),
    ),
    "forwarder: last credits kept": mutation(
        "last chunk",
        "two_forward",
        rewrite("tl.where(_, _, due_)", "due_", "return_credits"),
        part="long",
    ),
    "forwarder: one slot too many": mutation(
        "credit before read", "two_forward", rewrite(_ROOM, _LESS_ROOM, "forward")
    ),
    "forwarder: rings not drained": mutation(
        "reused too early", "two_forward", rewrite(_DRAINED, _NOT_DRAINED, "forward"), within=30
    ),
    "forwarder: rows sent not counted": mutation(
        "wrong epoch",
        "two_forward",
        change("tl.store(_, sent_ + rows_, mask=_)", "end_turn", rows_="rows_ * 0"),
    ),
    "forwarder: rows taken not counted": mutation(
        "wrong epoch", "two_forward", rewrite(_COUNTED, _NOT_COUNTED, "end_turn")
    ),
    "forwarder: tail without its rows": mutation(
        "flag before data",
        "two_forward",
        rewrite(
            "(rows_ - before_).to(tl.int64)",
            "(rows_ - before_ + ((rows_ > 0) & (hop.done == 0)).to(tl.int32)).to(tl.int64)",
            "end_turn",
        ),
    ),
    "forwarder: rows of an earlier turn forgotten": mutation(
        "wrong epoch",
        "two_forward",
        change("tl.store(_, rows_.to(tl.int64), mask=_)", "end_turn", rows_="(rows_ * 0)"),
    ),
}

DISPATCH_MUTATIONS = {**NETWORK_SENDER, **FORWARDER}
"""By name."""
