"""Bugs of the two-level engine: see ``mutations.py``. ``part``: which of
``twolevel_cases.REHEARSALS`` shows one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from edits import change, drop, drop_barrier, first_of, insert, move, rewrite
from mutations import mutated, mutation
from nvlink_mutations import SYNC
from task_mutations import TAKEN, TASKS, UPTO, WORKERS
from twolevel_dispatch_mutations import DISPATCH_MUTATIONS
from twolevel_in_place_mutations import IN_PLACE
from twolevel_pull_mutations import PULL_MUTATIONS

NETWORK = {
    "put: bytes not published": mutation("release", "two_net", drop("add_release(...)", "nvshmem")),
    "put: no fence": mutation(
        "flag before data",
        "two_net",
        drop("nvshmem_fence()", "nvshmem"),
        part="long",
        within=20,
        hint=2,
    ),
    "put between peers: flag before data": mutation(
        "flag before data",
        "two_net",
        move("add_release(...)", "for _ in range(...): ...", "put"),
        part="peers",
    ),
}

_REDUCE = "reduce_turn|reduce"

COMBINER = {
    "combiner: no barrier behind its looks": mutation(
        "barrier", "two_combine", drop_barrier("combine_turn", behind="look_at_all(...)")
    ),
    "combiner: one slot too many": mutation(
        "credit before read",
        "two_combine",
        rewrite("tl.maximum(end_ - slots_, 0)", "tl.maximum(end_ - slots_ - 1, 0)", "combine_turn"),
        hint=7,
    ),
    "combiner: last chunk dropped": mutation(
        "last chunk",
        "two_combine",
        first_of(
            rewrite(
                "i_ == end_",
                "(i_ == end_) & (end_ < rows_)",
                "combine_turn",
                where=("end_ = tl.minimum(_, rows_)",),
            ),
            rewrite(
                "i_ == end_",
                "(i_ == end_) & (end_ < link.end - link.begin)",
                "end_combine",
                where=("(end_ - _).to(_)",),
            ),
        ),
    ),
    "combiner: a chunk is put before its end": mutation(
        "flag before data",
        "two_combine",
        rewrite("i_ == end_", "i_ > begin_", "combine_turn", where=("(i_ - begin_).to(_)",)),
        part="long",
        within=20,
    ),
    "combiner: tail of the whole chunk, mapped": mutation(
        "flag before data",
        "two_combine",
        rewrite(
            "(i_ - begin_).to(tl.int64)",
            "(end_ - begin_).to(tl.int64)",
            "combine_turn",
            where=("i_ == end_",),
        ),
        part="long peers",
        within=20,
    ),
    "combiner: last row not awaited": mutation(
        "last chunk",
        "two_combine",
        rewrite("tl.max(at_ + 1, axis=0)", "tl.max(at_, axis=0)", "combine_turn"),
    ),
    "combiner: credit before read": mutation(
        "credit before read",
        "two_combine",
        drop("defer_signal(..., count=taken_ - _, mask=_ & (taken_ > _))", "combine_turn"),
        insert(
            "tl.atomic_add(heads, upto_ - taken_, mask=others & (upto_ > taken_), sem='release')",
            TAKEN,
            "combine_turn",
            where=(UPTO,),
            first=True,
        ),
    ),
    "combiner: ring not drained": mutation(
        "reused too early",
        "two_combine",
        rewrite("base_ + tl.maximum(end_ - slots_, 0)", "base_ + end_ - slots_", "combine_turn"),
        within=30,
    ),
    "combiner: rows taken not counted": mutation(
        "wrong epoch",
        "two_combine",
        change("tl.store(_, _ + taken_, mask=_)", "combine_turn", taken_="taken_ * 0"),
    ),
    "combiner: rows of an earlier turn forgotten": mutation(
        "wrong epoch",
        "two_combine",
        first_of(
            change(
                "tl.store(_, taken_, mask=_)",
                "combine_turn",
                where=(TAKEN, UPTO),
                taken_="taken_ * 0",
            ),
            change("tl.store(moved_of(...), taken_, mask=_)", "end_combine", taken_="taken_ * 0"),
        ),
    ),
}

_FAR = "tl.where(far_, taken_ - before_, 0)"

REDUCER = {
    "reducer: a network credit too many": mutation(
        "credit before read",
        "two_combine",
        rewrite(_FAR, "tl.where(far_ & (taken_ > before_), taken_ - before_ + 1, 0)", _REDUCE),
    ),
    "reducer: credits of an earlier turn forgotten": mutation(
        "last chunk",
        "two_combine",
        change(
            "tl.store(_, deferred_, mask=_)",
            _REDUCE,
            where=("deferred_ = return_network_credits(...)",),
            deferred_="deferred_ * 0",
        ),
        part="long",
        within=20,
    ),
    "reducer: network rows taken not counted": mutation(
        "wrong epoch",
        "two_combine",
        change("tl.store(_, _ + taken_, mask=far_)", _REDUCE, where=(_FAR,), taken_="taken_ * 0"),
    ),
}

NODE_HEADERS = {
    "node headers: one half only": mutation(
        "reused too early",
        "two_region",
        rewrite("outbox_ * 2 + half_", "outbox_ * 2 + half_ * 0", "node_header_at"),
        part="plans",
        within=40,
        hint=1,
    ),
    "node headers: bounds of the rank for those of the node": mutation(
        "wrong epoch",
        "two_headers",
        rewrite("row_ + ranks_ + to_ // near_", "row_ + to_", "put_node_headers"),
    ),
}

MUTATIONS = {
    **NETWORK,
    **WORKERS,
    **TASKS,
    **DISPATCH_MUTATIONS,
    **IN_PLACE,
    **PULL_MUTATIONS,
    **COMBINER,
    **REDUCER,
    **NODE_HEADERS,
    # under roles that nvlink lacks
    **{
        name: SYNC[name]
        for name in (
            "no barrier before a release",
            "release without order",
            "plain load for an acquire",
            "plain loads for acquires",
        )
    },
}
"""By name."""

HURRIED = mutation(
    "deadline",
    "two_scheduler",
    rewrite("since_ + tl.load(_) + grace_", "since_ + 200 + grace_ // 1000000", "next_step"),
    change("SPINS = tl.constexpr(n_)", n_="2"),
)
"""Workers whose deadlines pass while counters arrive."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, engines launch kernels with the bug ``name``, or ``hurried``; "" for copies without
    one.
    """
    return mutated(HURRIED if name == "hurried" else MUTATIONS[name] if name else None)
