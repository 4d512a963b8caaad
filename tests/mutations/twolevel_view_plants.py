"""Bugs of the two-level engine's dispatch in place: see ``twolevel_plants.py``."""

from __future__ import annotations

from edits import change, drop, drop_barrier, move, rewrite
from mutations import mutation

COUNTED, NOT_COUNTED = "tl.store(at_, base_ + _ - _)", "tl.store(at_, base_)"
HERE, NOT_LAST = "row_ + lane_ < n_", "row_ + lane_ < n_ - (n_ == left_).to(tl.int32)"
ROWS = "for _ in range(...): ..."

NEAR_ROWS = {
    "near rows: views not waited for": mutation(
        "reused too early",
        "two_direct",
        rewrite("(left_ > 0) & ready_", "left_ > 0", "near_turn"),
        part="views",
        hint=4,
    ),
    "near rows: no barrier between progress read and noted": mutation(
        "barrier", "two_direct", drop_barrier("near_turn"), part="views"
    ),
    "near rows: last row dropped": mutation(
        "last chunk",
        "two_direct",
        rewrite(HERE, NOT_LAST, "near_turn", where=("n_ = tl.minimum(left_, _)",)),
        part="views",
    ),
    "near rows: behind one's own": mutation(
        "wrong row",
        "two_direct",
        rewrite("tl.where(at_ >= 0, _, -1)", "at_", "near_turn"),
        part="views",
    ),
}

PLACER = {
    "placer: views not waited for": mutation(
        "reused too early",
        "two_direct",
        rewrite("(seen_ >= want_) & ready_", "seen_ >= want_", "place_turn"),
        part="views",
    ),
    "placer: no barrier behind its look": mutation(
        "barrier", "two_direct", drop_barrier("place_turn"), part="views"
    ),
    "placer: last row dropped": mutation(
        "last chunk",
        "two_direct",
        rewrite(HERE, NOT_LAST, "place_turn", where=("n_ = tl.minimum(tl.minimum(_, left_), _)",)),
        part="views",
    ),
    "placer: rows not waited for": mutation(
        "flag before data",
        "two_direct",
        rewrite("base_ + i_ + 1", "base_ + i_", "place_turn"),
        rewrite(
            "tl.minimum(tl.minimum(_, left_), chunk_)", "tl.minimum(left_, chunk_)", "place_turn"
        ),
        part="views",
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
        part="views",
        within=20,
    ),
    "placer: rows taken not counted": mutation(
        "wrong epoch",
        "two_direct",
        rewrite(COUNTED, NOT_COUNTED, "place_turn"),
        part="views",
        hint=4,
    ),
    "placer: rows of an earlier turn forgotten": mutation(
        "wrong epoch",
        "two_direct",
        change("tl.store(_, rows_.to(tl.int64), mask=_)", "place_turn", rows_="(rows_ * 0)"),
        part="views",
    ),
    "placer: table not written": mutation(
        "wrong row",
        "two_direct",
        drop("tl.store(_, at_, mask=_)", "place_turn", where=("at_ = tl.where(...)",)),
        part="views",
    ),
    "placer: landings of the next channel": mutation(
        "wrong row",
        "two_direct",
        change(
            "landing_of(..., k_, channel=channel_)",
            "place_turn",
            channel_="(channel_ + 1) % k_.channels",
        ),
        part="views channels",
    ),
    "placer: landings of the next rank": mutation(
        "wrong row",
        "two_direct",
        change(
            "landing_of(..., k_, q=q_)",
            "place_turn",
            q_="(q_ + 1) % k_.grid.ranks_per_node",
        ),
        part="views",
    ),
    "direct: done before the rows": mutation(
        "flag before data",
        "two_direct",
        move("end_in_views(...)", "while _: ...", "two_direct_kernel"),
        part="views",
    ),
    "direct: a round's end forgets what is owed": mutation(
        "last chunk", "two_direct", drop("publish(...)", "two_direct_kernel"), part="views peers"
    ),
    "direct: workers without rows wait for nobody": mutation(
        "reused too early",
        "two_direct",
        rewrite("tl.where(ready_, 0, 1)", "0", "two_direct_kernel"),
        part="apart views",
        within=20,
    ),
}

VIEWS = {
    "views: end not waited for": mutation(
        "flag before data", "two_views", drop("wait_for_all(...)", "end_in_views"), part="views"
    ),
    "views: workers of the last call": mutation(
        "wrong epoch",
        "two_views",
        rewrite("(calls_ + 1) * all_", "calls_ * all_", "end_in_views"),
        part="views",
    ),
    "views: all workers but one": mutation(
        "last chunk",
        "two_views",
        rewrite("(calls_ + 1) * all_", "(calls_ + 1) * all_ - 1", "end_in_views"),
        part="views",
    ),
    "views: calls not counted": mutation(
        "wrong epoch",
        "two_views",
        change("tl.store(_ + DIRECT_CALLS, _ + one_)", "end_in_views", one_="0"),
        part="views",
    ),
    "views: call counted before its end": mutation(
        "wrong epoch",
        "two_views",
        move("count_call(...)", "done_of(peer_base(...), ...)", "end_in_views"),
        part="apart pulls",
        within=20,
    ),
}

LETTERS = {
    "greeting: no barrier behind its look": mutation(
        "barrier", "two_letters", drop_barrier("all_are_here"), part="views"
    ),
    "landings: without rows of earlier ranks": mutation(
        "wrong row",
        "two_letters",
        rewrite("tl.sum(_, axis=0)[:, None] + bounds_", "bounds_", "note_landings"),
        part="views",
    ),
    "landings: behind the source's own rows": mutation(
        "wrong row",
        "two_letters",
        rewrite(
            "rank_ < source_",
            "rank_ <= source_",
            "note_landings",
            where=("source_ = _ * near_ + _ % near_",),
        ),
        part="views",
    ),
    "landings: in the channel before": mutation(
        "wrong row",
        "two_letters",
        rewrite("tl.cumsum(rows_, 0) - rows_", "tl.cumsum(rows_, 0)", "post_letters", nth=-1),
        part="views channels",
    ),
}

VIEW_PLANTS = {**NEAR_ROWS, **PLACER, **VIEWS, **LETTERS}
"""By name."""
