"""Bugs of the two-level engine's dispatch in place: see ``twolevel_mutations.py``."""

from __future__ import annotations

from edits import change, drop, drop_barrier, move, rewrite
from mutations import mutation

COUNTED, NOT_COUNTED = "tl.store(at_, base_ + _ - _)", "tl.store(at_, base_)"
HERE, NOT_LAST = "row_ + lane_ < n_", "row_ + lane_ < n_ - (n_ == left_).to(tl.int32)"
ROWS = "for _ in range(...): ..."

NEAR_ROWS = {
    "near rows: buffers not waited for": mutation(
        "reused too early",
        "two_direct",
        rewrite("(left_ > 0) & ready_", "left_ > 0", "near_turn"),
        part="buffers",
        hint=4,
    ),
    "near rows: no barrier between progress read and noted": mutation(
        "barrier", "two_direct", drop_barrier("near_turn"), part="buffers"
    ),
    "near rows: last row dropped": mutation(
        "last chunk",
        "two_direct",
        rewrite(HERE, NOT_LAST, "near_turn", where=("n_ = tl.minimum(left_, _)",)),
        part="buffers",
    ),
    "near rows: behind one's own": mutation(
        "wrong row",
        "two_direct",
        rewrite("tl.where(at_ >= 0, _, -1)", "at_", "near_turn"),
        part="buffers",
    ),
}

PLACER = {
    "placer: buffers not waited for": mutation(
        "reused too early",
        "two_direct",
        rewrite("(seen_ >= want_) & ready_", "seen_ >= want_", "place_turn"),
        part="buffers",
    ),
    "placer: no barrier behind its look": mutation(
        "barrier", "two_direct", drop_barrier("place_turn"), part="buffers"
    ),
    "placer: last row dropped": mutation(
        "last chunk",
        "two_direct",
        rewrite(HERE, NOT_LAST, "place_turn", where=("n_ = tl.minimum(tl.minimum(_, left_), _)",)),
        part="buffers",
    ),
    "placer: rows not waited for": mutation(
        "flag before data",
        "two_direct",
        rewrite("base_ + i_ + 1", "base_ + i_", "place_turn"),
        rewrite(
            "tl.minimum(tl.minimum(_, left_), chunk_)", "tl.minimum(left_, chunk_)", "place_turn"
        ),
        part="buffers",
        hint=4,
    ),
    "placer: credit before read": mutation(
        "credit before read",
        "two_direct",
        move("return_credits(...)", ROWS, "place_turn"),
        change(
            "return_credits(..., i0=i0_, i1=i1_, last=_ == none_)",
            "place_turn",
            where=("n_ = tl.minimum(tl.minimum(...), _)",),
            i1_="i0_ + n_",
            none_="n_",
        ),
        part="buffers",
        within=20,
    ),
    "placer: rows taken not counted": mutation(
        "wrong epoch",
        "two_direct",
        rewrite(COUNTED, NOT_COUNTED, "place_turn"),
        part="buffers",
        hint=4,
    ),
    "placer: rows of an earlier turn forgotten": mutation(
        "wrong epoch",
        "two_direct",
        change("tl.store(_, rows_.to(tl.int64), mask=_)", "place_turn", rows_="(rows_ * 0)"),
        part="buffers",
    ),
    "placer: table not written": mutation(
        "wrong row",
        "two_direct",
        drop("tl.store(_, at_, mask=_)", "place_turn", where=("at_ = tl.where(...)",)),
        part="buffers",
    ),
    "placer: landings of the next channel": mutation(
        "wrong row",
        "two_direct",
        change(
            "first_forwarded(..., k_, channel=channel_)",
            "place_turn",
            channel_="(channel_ + 1) % k_.channels",
        ),
        part="buffers channels",
    ),
    "placer: landings of the next rank": mutation(
        "wrong row",
        "two_direct",
        change(
            "first_forwarded(..., k_, q=q_)",
            "place_turn",
            q_="(q_ + 1) % k_.grid.ranks_per_node",
        ),
        part="buffers",
    ),
    "direct: done before the rows": mutation(
        "flag before data",
        "two_direct",
        move("end_in_place(...)", "while _: ...", "two_direct_kernel"),
        part="buffers",
    ),
    "direct: a round's end forgets what is owed": mutation(
        "last chunk",
        "two_direct",
        drop("flush_signals(...)", "two_direct_kernel"),
        part="buffers peers",
    ),
    "direct: workers without rows wait for nobody": mutation(
        "reused too early",
        "two_direct",
        rewrite("tl.where(ready_, 0, 1)", "0", "two_direct_kernel"),
        part="apart buffers",
        within=20,
    ),
}

END_IN_PLACE = {
    "buffers: end not waited for": mutation(
        "flag before data",
        "two_in_place",
        drop("wait_for_all(...)", "end_in_place"),
        part="buffers",
    ),
    "buffers: workers of the last call": mutation(
        "wrong epoch",
        "two_in_place",
        rewrite("(calls_ + 1) * all_", "calls_ * all_", "end_in_place"),
        part="buffers",
    ),
    "buffers: all workers but one": mutation(
        "last chunk",
        "two_in_place",
        rewrite("(calls_ + 1) * all_", "(calls_ + 1) * all_ - 1", "end_in_place"),
        part="buffers",
    ),
    "buffers: calls not counted": mutation(
        "wrong epoch",
        "two_in_place",
        change("tl.store(_ + DIRECT_CALLS, _ + one_)", "end_in_place", one_="0"),
        part="buffers",
    ),
}

NODE_HEADERS = {
    "call barrier: no barrier behind its look": mutation(
        "barrier", "two_headers", drop_barrier("all_are_here"), part="buffers"
    ),
    "first rows: without rows of earlier ranks": mutation(
        "wrong row",
        "two_headers",
        rewrite("tl.sum(_, axis=0)[:, None] + bounds_", "bounds_", "note_first_forwarded"),
        part="buffers",
    ),
    "first rows: behind the source's own rows": mutation(
        "wrong row",
        "two_headers",
        rewrite(
            "rank_ < source_",
            "rank_ <= source_",
            "note_first_forwarded",
            where=("source_ = _ * near_ + _ % near_",),
        ),
        part="buffers",
    ),
    "first rows: in the channel before": mutation(
        "wrong row",
        "two_headers",
        rewrite("tl.cumsum(rows_, 0) - rows_", "tl.cumsum(rows_, 0)", "put_node_headers", nth=-1),
        part="buffers channels",
    ),
}

IN_PLACE = {**NEAR_ROWS, **PLACER, **END_IN_PLACE, **NODE_HEADERS}
"""By name."""
