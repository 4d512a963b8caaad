"""Bugs of the nvlink engine: see ``mutations.py``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from edits import change, drop, drop_barrier, first_of, move, rewrite, shorten
from mutations import mutated, mutation
from task_mutations import TAGS, TASKS, WORKERS
from twolevel_in_place_mutations import END_IN_PLACE, NEAR_ROWS

ENDS = "combine: a kernel ends without publishing"
RELAXED, WHOLE_GPU = "'relaxed'", "'gpu'"

SYNC = {
    "no barrier before a release": mutation("barrier", "sync", drop_barrier("add_release")),
    "release without order": mutation(
        "release", "sync", change("tl.atomic_add(..., sem=sem_)", "add_release", sem_=RELAXED)
    ),
    "release for this GPU only": mutation(
        "release", "sync", change("tl.atomic_add(..., scope=all_)", "add_release", all_=WHOLE_GPU)
    ),
    "plain load for an acquire": mutation(
        "acquire", "sync", rewrite("tl.atomic_add(at_, 0, ...)", "tl.load(at_)", "load_acquire")
    ),
    "plain loads for acquires": mutation(
        "acquire",
        "sync",
        rewrite(
            "tl.atomic_add(at_, 0, ..., mask=mask_)",
            "tl.load(at_, mask=mask_, other=0)",
            "look_at_all",
        ),
    ),
    "no barrier behind a wait": mutation("barrier", "sync", drop_barrier("wait_at_least")),
    "no barrier behind a wait for all": mutation("barrier", "sync", drop_barrier("wait_for_all")),
}

GUESS = {
    "dispatch: rows fly whatever the plan says": mutation(
        "guess",
        "two_dispatch",
        rewrite("(go_ == 0) & (forced_ == 0)", "(forced_ != 0) & (forced_ == 0)"),
        part="guesses",
    ),
}

HEAP = {
    "heap: rows fly whatever the plan says": mutation(
        "guess",
        "two_direct",
        rewrite("tl.load(go_of(plan_, k_)) == 0", "tl.load(go_of(plan_, k_)) < 0"),
        part="heap",
    ),
    "heap: metadata is unpacked whatever the plan says": mutation(
        "guess",
        "direct",
        rewrite("tl.load(go_of(plan_, k_)) > 0", "tl.load(go_of(plan_, k_)) >= 0"),
        part="heap",
    ),
    "heap: one rank's block is enough": mutation(
        "guess",
        "exchange",
        rewrite("tl.where(least_ > 0, 2, 0)", "tl.where(least_ > 0, 2, 2)"),
        part="heap",
    ),
    "heap: a block too early": mutation(
        "wrong row",
        "two_direct",
        rewrite("place_.to(tl.int64) * 256 - 256", "place_.to(tl.int64) * 256 - 512"),
        part="heap",
    ),
    "heap: scales stay where they came": mutation(
        "wrong row",
        "direct",
        rewrite(
            "copy_words(from_, to_, (a0_ + begin_) * S_, (a0_ + end_) * S_, most_, 1)",
            "copy_words(from_, to_, (a0_ + begin_) * S_, (a0_ + begin_) * S_, most_, 1)",
        ),
        part="heap",
    ),
    "told: rows for scales": mutation(
        "wrong row",
        "two_direct",
        rewrite("tl.where(moves_, mine_ + scales_at_, 0)", "tl.where(moves_, mine_, 0)"),
        part="told",
    ),
    "told: rows fly whatever others have": mutation(
        "guess",
        "two_direct",
        rewrite("tl.min(places_) > 0", "tl.min(places_) >= 0"),
        part="told",
    ),
    "told: nobody looks whether rows have moved": mutation(
        "guess",
        "two_dispatch",
        rewrite("scales_at_ != 0", "scales_at_ >= 0"),
        part="told",
    ),
}

_PARITY, _ONE_PARITY = "(call_ % 2).to(tl.int32)", "(call_ * 0).to(tl.int32)"

CALL_BARRIER = {
    "call barrier: one half only": mutation(
        "reused too early",
        "region",
        rewrite("tags_ + parity_ * ranks_ + peer_", "tags_ + peer_", "peer_word"),
        part="barriers",
        within=30,
    ),
    "push: of the last call": mutation(
        "wrong epoch",
        "call_barrier",
        rewrite("call_ + 1 + (rank_ * 0)", "call_ + (rank_ * 0)", "all_in_call"),
        part="receives",
    ),
    "push: call barrier before its tag": mutation(
        "flag before data",
        "call_barrier",
        move("add_release(...)", f"tl.store({TAGS}, ...)", "announce_call", along=True),
        part="receives",
    ),
}

PLAN = {
    "places stored while threads still load them": mutation(
        "barrier", "plan", drop_barrier("settle_tile", nth=0)
    ),
    "plan: one half only": mutation(
        "reused too early", "plan", rewrite(_PARITY, _ONE_PARITY), part="plans", within=40, hint=5
    ),
    "plan: no barrier before a ticket": mutation(
        "barrier",
        "plan",
        first_of(
            drop_barrier("plan_kernel", before="tl.atomic_add(..., sem='release')"),
            drop_barrier("count_channel", nth=-1),
        ),
        hint=1,
    ),
    "plan: ticket without order": mutation(
        "release",
        "plan",
        change("tl.atomic_add(..., sem=sem_, scope='gpu')", sem_=RELAXED),
        hint=1,
    ),
    "plan: tickets of the last call": mutation(
        "wrong epoch",
        "plan",
        change("wait_at_least(_, want_, ...) >= want_", "plan_kernel", want_="want_ - C"),
        hint=2,
    ),
    "plan: arrivals of the last call": mutation(
        "wrong epoch",
        "plan",
        rewrite("want_ + (rank_ * 0)", "want_ - C + (rank_ * 0)", "plan_kernel"),
    ),
    "plan: arrival before the header": mutation(
        "flag before data",
        "plan|exchange",
        move("add_release(...)", "send_headers(...)", "plan_kernel|exchange"),
    ),
    "verdict: nonce before the headers": mutation(
        "flag before data",
        "exchange",
        move("tl.atomic_xchg(..., sem='release')", "tell_host(...)", "validate"),
    ),
}

_WANTED = "call_ + chunk_ * 0"

PUSH = {
    "push: landings not waited for": mutation(
        "reused too early",
        "push",
        rewrite("all_in_call(...)", "True", "push_kernel"),
        part="pushes",
        hint=1,
    ),
    "push: flag before data": mutation(
        "flag before data",
        "push",
        move("raise_release(...)", "sum_chunk(...)", "push_rows"),
        part="pushes",
    ),
    "push: flag before sums by expert": mutation(
        "flag before data",
        "push",
        move("raise_release(...)", "sum_chunk(...)", "push_rows"),
        part="receives",
    ),
    "push: last row of a chunk of sums dropped": mutation(
        "last chunk",
        "push",
        rewrite("j_ < n_", "j_ < n_ - 1", where=("result_rows(_, first_ + j_, ...)",)),
        part="receives",
    ),
    "push: many result rows taken for few": mutation(
        "wrong row",
        "push",
        rewrite("tl.max(index_, axis=0) < 0", "True", "are_few"),
        part="receives",
    ),
    "push: flag before weights": mutation(
        "flag before data",
        "push",
        move("raise_release(...)", "copy_words(floats(...) + row_ * picks_, ...)", "push_rows"),
        part="receives",
    ),
    "push: weights of the next row": mutation(
        "wrong row",
        "push",
        rewrite("floats(base_ + at_) + back_ * picks_", "floats(base_ + at_) + back_", "push_rows"),
        part="receives",
    ),
    "push: rows not waited for": mutation(
        "flag before data", "push", rewrite("landed(...)", "True", "sum_rows"), part="pushes"
    ),
    "push: no barrier before the flag": mutation(
        "barrier", "sync", drop_barrier("raise_release"), part="pushes"
    ),
    "push: flag without order": mutation(
        "release",
        "sync",
        change("tl.atomic_max(..., sem=sem_)", "raise_release", sem_=RELAXED),
        part="pushes",
    ),
    "push: flag of the last call": mutation(
        "wrong epoch", "push", rewrite(_WANTED, "call_ - 1 + chunk_ * 0", "landed"), part="pushes"
    ),
    "push: flag of any call": mutation(
        "wrong epoch", "push", rewrite(_WANTED, "1 + chunk_ * 0", "landed"), part="pushes"
    ),
    "push: flag of another chunk": mutation(
        "wrong row",
        "push",
        change(
            "raise_release(landed_of(..., chunk=chunk_), ...)", "push_rows", chunk_="chunk_ ^ 1"
        ),
        part="pushes",
    ),
    "push: first chunk waited for only": mutation(
        "wrong row",
        "push",
        rewrite(
            "chunk_ <= high_[:, None]",
            "(chunk_ == tl.min(chunk_, axis=1)[:, None]) & (chunk_ <= high_[:, None])",
            "landed",
        ),
        part="pushes",
    ),
    "push: last chunk dropped": mutation(
        "last chunk",
        "push",
        rewrite("(tl.max(n_) + chunk_ - 1) // chunk_", "(tl.max(n_) - 1) // chunk_", "push_rows"),
        part="pushes",
    ),
    "push: last piece dropped": mutation(
        "last chunk", "push", shorten("landed(...)", "sum_rows"), part="pushes"
    ),
    "push: places of the last piece": mutation(
        "wrong row",
        "push",
        rewrite("(i_ + _) // parts_", "i_ // parts_", "sum_rows"),
        part="pushes",
    ),
    "push: rows behind one's own": mutation(
        "wrong row",
        "plan|exchange",
        rewrite("to_[None, :] != source_[:, None]", "(source_ >= 0)[:, None]", "complete"),
        part="pushes",
    ),
    "push: the first to leave counts the call": mutation(
        "wrong epoch",
        "push",
        rewrite("left_ % all_ == all_ - 1", "left_ % all_ == 0", "leave"),
        part="pushes",
        within=30,
    ),
    "push: call not counted": mutation(
        "wrong epoch",
        "push",
        rewrite("left_ % all_ == all_ - 1", "left_ % all_ == all_", "leave"),
        part="pushes",
    ),
}

MUTATIONS = {
    **SYNC,
    **GUESS,
    **TASKS,
    # a sender with a program of its own publishes behind each chunk
    ENDS: TASKS[ENDS]._replace(part="alone"),
    **WORKERS,
    **CALL_BARRIER,
    **PLAN,
    **NEAR_ROWS,
    **END_IN_PLACE,
    "buffers: call counted before its end": mutation(
        "wrong epoch",
        "two_in_place",
        move("count_call(...)", "peer_word(peer_base(...), 'dones', ...)", "end_in_place"),
        part="pushes",
        within=20,
    ),
    **PUSH,
    **HEAP,
}
"""By name."""

LIES = {
    "a row too many": mutation(
        "lie",
        "plan|exchange",
        change(
            "tl.where(_, total_[:, None], _[None, :])",
            "send_headers",
            where=("to_ // near_ == me_ // near_",),
            total_="tl.where(me_ == 1, total_ + 1, total_)",
        ),
    ),
}
"""What rank 1 tells the others, by name."""


STAND_IN = {
    "stand-in: a call without its tag": mutation(
        "wrong epoch", "stand_in", drop(f"tl.store({TAGS}, ...)", "join_call_kernel")
    ),
    "stand-in: a plan in the other half": mutation(
        "wrong epoch",
        "stand_in",
        rewrite("(call_ % 2).to(tl.int32)", "((call_ + 1) % 2).to(tl.int32)", "join_plan_kernel"),
    ),
    "stand-in: nothing in place": mutation(
        "last chunk",
        "stand_in",
        drop("raise_to(peer_word(_, 'dones', ...), ...)", "join_call_kernel"),
    ),
    "stand-in: a tag in the other half": mutation(
        "wrong epoch",
        "stand_in",
        rewrite("(call_ % 2).to(tl.int32)", "((call_ + 1) % 2).to(tl.int32)", "join_call_kernel"),
    ),
    "stand-in: a plan without a header": mutation(
        "wrong row", "stand_in", drop("tl.store(_, said_[None, :] + _, ...)", "join_plan_kernel")
    ),
    "stand-in: a plan without its tag": mutation(
        "wrong epoch", "stand_in", drop("tl.store(_ + 1, ...)", "join_plan_kernel")
    ),
    "stand-in: one call behind": mutation(
        "wrong epoch",
        "stand_in",
        rewrite("call_ + 1 + none_", "call_ + none_", "join_call_kernel"),
    ),
}
"""Of what survivors write for ranks that are gone: ``recover_simulated.bug`` shows them."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, engines launch kernels with the bug ``name``; "" for copies without one."""
    return mutated((MUTATIONS | LIES | STAND_IN)[name] if name else None)
