"""Bugs of the low-latency engine: see ``mutations.py``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from edits import Edit, change, drop, drop_barrier, insert, move, rewrite, shorten
from mutations import Mutation, mutated, mutation
from nvlink_mutations import RELAXED, WHOLE_GPU

_FLAG, _SUM_FLAG = "tl.atomic_max(...)", "tl.atomic_max(..., sem='release')"
_READY = "tl.atomic_xchg(words(_) + READY, ...)"
_PARITY, _ONE_PARITY = "(call_ % 2).to(tl.int32)", "(call_ % 1).to(tl.int32)"


def _mutation(kind: str, *edits: Edit, **options: Any) -> Mutation:
    return mutation(kind, "low", *edits, **options)


def _far(kind: str, *edits: Edit, **options: Any) -> Mutation:
    """Ranks are far from each other."""
    return _mutation(kind, *edits, part="far", **options)


def _rail(kind: str, *edits: Edit, **options: Any) -> Mutation:
    """Rows cross once per node."""
    return _mutation(kind, *edits, part="rail", **options)


def _instead(kind: str, pattern: str, inside: str, **changes: str) -> Mutation:
    return _mutation(kind, change(pattern, inside, **changes))


PUBLISHED = {
    "dispatch: no barrier before the flag": _mutation(
        "barrier", drop_barrier("send_piece", before=_FLAG)
    ),
    "dispatch: flag without order": _instead(
        "release", "tl.atomic_max(..., sem=sem_)", "send_piece", sem_=RELAXED
    ),
    "dispatch: flag for this GPU only": _instead(
        "release", "tl.atomic_max(..., scope=all_)", "send_piece", all_=WHOLE_GPU
    ),
    "dispatch: flag before the row": _mutation(
        "flag before data",
        move(_FLAG, "store_part(...)", "send_piece", along=True),
    ),
    "combine: no barrier before the flag": _mutation(
        "barrier", drop_barrier("send_sum", before=_SUM_FLAG)
    ),
    "combine: flag without order": _instead(
        "release", "tl.atomic_max(..., sem=sem_)", "send_sum", sem_=RELAXED
    ),
    "combine: flag for this GPU only": _instead(
        "release", "tl.atomic_max(..., scope=all_)", "send_sum", all_=WHOLE_GPU
    ),
    "combine: flag before the sum": _mutation(
        "flag before data", move(_SUM_FLAG, "sum_rows(...)", "send_sum", along=True)
    ),
    "table: no barrier before READY": _mutation("barrier", drop_barrier("lead", before=_READY)),
    "table: READY without order": _instead(
        "release", "tl.atomic_xchg(words(_) + READY, ..., sem=sem_)", "lead", sem_=RELAXED
    ),
    "table: READY before the table": _mutation(
        "flag before data", move(_READY, "tl.minimum(value_in(_), _)", "lead")
    ),
}

_READY_SEEN = "tl.atomic_add(words(_) + READY, 0, ..., sem=sem_)"

WAITED_FOR = {
    "plain load for an acquire": _mutation(
        "acquire",
        rewrite(
            "tl.min(tl.atomic_add(flags_, 0, ...))", "tl.min(tl.load(flags_))", "wait_flag", times=2
        ),
    ),
    "one piece waited for": _instead(
        "acquire", "flag_ + tl.arange(0, pieces_)", "wait_flag", pieces_="1"
    ),
    "plain loads for acquires": _mutation(
        "acquire",
        rewrite(
            "tl.atomic_add(flags_, 0, mask=mask_, sem='acquire', scope='sys')",
            "tl.load(flags_, mask=mask_, other=0)",
            "wait_flags",
            times=4,
        ),
    ),
    "READY seen without order": _mutation(
        "acquire", change(_READY_SEEN, "wait_ready", times=2, sem_=RELAXED)
    ),
    "no barrier behind a flag": _mutation("barrier", drop_barrier("wait_flag")),
    "no barrier behind flags": _mutation("barrier", drop_barrier("wait_flags")),
    "no barrier behind READY": _mutation("barrier", drop_barrier("wait_ready")),
}

WHICH_CALL = {
    "dispatch: flags of the last but one": _mutation(
        "wrong epoch",
        rewrite("want_ = 2 * call_", "want_ = 2 * call_ - 4", "receive_slot"),
    ),
    "combine: flags of the last but one": _mutation(
        "wrong epoch",
        change("wait_flags(..., want=want_)", "add_rows", want_="want_ - 4"),
        rewrite("seen_ == wanted_ + 1", "seen_ >= wanted_ - 3", "add_rows"),
    ),
    "notes of the last but one": _mutation(
        "wrong epoch",
        rewrite(
            "here_ & (least_ >= call_) & (call_in(_) >= call_)",
            "here_ & (least_ >= call_ - 2)",
            "have_come",
        ),
    ),
    "weights of the last but one": _mutation(
        "wrong epoch",
        rewrite("look(at_, in_) >> 32 != sign_", "look(at_, in_) < 0", "wait_weights", times=2),
    ),
    "calls not counted in combine": _instead(
        "wrong epoch", "tl.store(epoch_of(...), call_)", "low_combine_kernel", call_="call_ - 1"
    ),
}

WRITTEN_AGAIN = {
    "one half only": _mutation(
        "reused too early", rewrite(_PARITY, _ONE_PARITY, "next_call"), hint=2
    ),
    "combine: peers not waited for": _mutation(
        "reused too early",
        rewrite("pid_ == all_ - 1", "pid_ == all_", "low_combine_kernel"),
        within=40,
    ),
}

SENT = {
    "dispatch: last piece dropped": _mutation(
        "last token", shorten("send_piece(...)", "low_dispatch_kernel")
    ),
    "combine: last slot dropped": _mutation(
        "last token", shorten("send_sum(...)", "low_combine_kernel")
    ),
}

_PACKED = "tl.atomic_add(at_, 0, ..., sem=sem_)"
_ONE_STAGE = rewrite(
    "packed_of(base_, parity_, ...)",
    "packed_of(base, parity * 0, rank, row, row_bytes, sizes)",
    "staged_of",
)

FAR = {
    "far: counted before it is packed": _far("barrier", drop_barrier("count_packed"), hint=1),
    "far: counted without order": _far(
        "release", change("tl.atomic_add(..., sem=sem_)", "count_packed", sem_=RELAXED)
    ),
    "far: seen packed without order": _far(
        "acquire", change(_PACKED, "wait_packed", times=2, sem_=RELAXED)
    ),
    "far: put before all is packed": _far(
        "flag before data", rewrite("packed_ < want_", "packed_ < want_ - 1", "wait_packed")
    ),
    "far: what is packed not counted anew": _far(
        "wrong epoch", drop("tl.store(at_, tl.zeros_like(_))", "wait_packed")
    ),
    "far: rows of the last but one": _far(
        "wrong epoch",
        rewrite("with_call(call_.number, _)", "with_call(call_.number - 2, 0)", "wait_row"),
    ),
    "far: last row dropped": _far(
        "last token",
        rewrite(
            "rows_.to(tl.int64) * bytes_",
            "tl.maximum(rows_ - 1, 0).to(tl.int64) * bytes_",
            "put_rows",
        ),
    ),
    "far: last sum dropped": _far(
        "last token",
        rewrite("rows_ * k_.sum_bytes", "tl.maximum(rows_ - 1, 0) * k_.sum_bytes", "put_sums"),
    ),
    "far: last weights dropped": _far(
        "last token",
        rewrite("rows_ * (8 * topk_)", "tl.maximum(rows_ - 1, 0) * (8 * topk_)", "put_weights"),
    ),
    "far: all chunks counted as the first": _far(
        "flag before data",
        rewrite("ROWS + number_ // k_.chunk_rows", "ROWS + number_ * 0", "send_piece"),
    ),
    "far: all sums counted as those of the first chunk": _far(
        "flag before data", rewrite("ROWS + t_ // k_.chunk_rows", "ROWS + t_ * 0", "send_sum")
    ),
    "far: signal of another chunk": _far(
        "flag before data",
        change("arrival_of(..., message=message_)", "put_rows", message_="ROWS + (chunk ^ 1)"),
    ),
    "far: rows of all chunks seen with the first": _far(
        "acquire", rewrite("(chunk_ < own_) & _ & _", "own_ < 0", "wait_row")
    ),
    "far: sums of all chunks seen with the first": _far(
        "acquire", rewrite("_ & (first_ > 0)", "here & (first_ < 0)", "wait_chunks")
    ),
    "far: last chunk of rows dropped": _far(
        "last token",
        rewrite("tl.cdiv(most_, in_)", "tl.cdiv(most_ - 1, in_)", "low_dispatch_kernel"),
    ),
    "far: last chunk of sums dropped": _far(
        "last token",
        rewrite("tl.cdiv(most_, in_)", "tl.cdiv(most_ - 1, in_)", "low_combine_kernel", nth=0),
    ),
    "far: staging with one half only": _far("reused too early", _ONE_STAGE, within=40, hint=16),
}
"""Of puts; the verb's own are in ``twolevel_mutations.py``."""

RAIL = {
    "rail: last row not handed on": _rail(
        "last token", shorten("hand_on(...)", "low_dispatch_kernel")
    ),
    "rail: last sum of a node dropped": _rail(
        "last token", shorten("sum_of_node(...)", "low_combine_kernel")
    ),
    "rail: row handed on without barrier": _rail(
        "barrier", drop_barrier("hand_on", before=_FLAG), hint=3
    ),
    "rail: row handed on without order": _rail(
        "release", change("tl.atomic_max(..., sem=sem_)", "hand_on", sem_=RELAXED)
    ),
    "rail: sum handed back without order": _rail(
        "release", change("tl.atomic_max(..., sem=sem_)", "hand_back", sem_=RELAXED), hint=3
    ),
    "rail: flag before the row that is handed on": _rail(
        "flag before data",
        insert(
            "tl.atomic_max(flag_of(bases, call.parity, s, t, sizes)[:, None]"
            " + tl.arange(0, k.pieces)[None, :], (2 * call.number + goes)[:, None]"
            " + tl.zeros((sizes.rank_bins, k.pieces), tl.int64),"
            " mask=here[:, None], sem='release', scope='sys')",
            "for _ in range(0, _, block_): ...",
            "hand_on",
        ),
        within=20,
        hint=9,
    ),
    "rail: row handed on to another rank": _rail(
        "wrong rank", rewrite("(me_ + i_) % all_", "(me_ + i_ + 1) % all_", "hand_on")
    ),
    "rail: rows sent to another rail": _rail(
        "wrong rank", rewrite("me_ % P_", "(me_ + 1) % P_", "via_of")
    ),
    "rail: flag before the sum that is handed back": _rail(
        "flag before data", move(_FLAG, "sum_rows(...)", "hand_back", along=True)
    ),
    "rail: sum handed back without barrier": _rail(
        "barrier", drop_barrier("hand_back", before=_FLAG)
    ),
    "rail: all sums counted as those of the first chunk": _rail(
        "flag before data", rewrite("ROWS + t_ // k_.chunk_rows", "ROWS + t_ * 0", "sum_of_node")
    ),
    "rail: last chunk of sums dropped": _rail(
        "last token",
        rewrite("tl.cdiv(most_, in_)", "tl.cdiv(most_ - 1, in_)", "low_combine_kernel", nth=1),
    ),
    "rail: own sum written while it is read": _rail(
        "barrier", drop_barrier("add_neighbours", nth=0)
    ),
    "rail: a node's sum without its last rank": _rail(
        "last token",
        rewrite("tl.static_range(all_)", "tl.static_range(all_ - 1)", "add_neighbours"),
    ),
    "rail: sums without the last node": _rail(
        "last token",
        rewrite(
            "tl.static_range(all_ if few_ else most_)",
            "tl.static_range((all_ if few_ else most_) - 1)",
            "sum_of_nodes",
        ),
    ),
    "rail: staging with one half only": _rail("reused too early", _ONE_STAGE, within=80, hint=70),
    "rail: slots with one half only": _rail(
        "reused too early",
        rewrite("(parity_ * all_ + rank_) * most_ + _", "rank_ * most_ + token", "slot_of"),
        within=40,
        hint=4,
    ),
    "rail: neighbours not waited for": _rail(
        "wrong epoch",
        change("wait_flags(..., want=want_)", "add_neighbours", want_="want_ - 4"),
        rewrite(
            "look(flags_, got_) == want_ + 1", "look(flags_, got_) >= want_ - 3", "add_neighbours"
        ),
    ),
}
"""Of rows that cross once per node."""

MANY = {
    "many: a rank is gone to again": _mutation(
        "rank twice", rewrite("places_ > last_", "places_ >= last_", "next_of"), part="many"
    ),
}
"""Of ranks that are more than loops are unrolled over."""

MUTATIONS = {
    **PUBLISHED, **WAITED_FOR, **WHICH_CALL, **WRITTEN_AGAIN, **SENT, **FAR, **RAIL, **MANY,
}  # fmt: skip
"""By name."""

TORN = _mutation(
    "torn sum",
    rewrite("tl.max(doubted_.to(_)) > 0", "tl.max(doubted_.to(tl.int32)) > 1", "agree"),
)
"""Found only where ranks die: ``low_latency_failures.torn``."""
NO_FENCE = mutation("no fence", "two_net", drop("nvshmem_fence()", "nvshmem"))
"""Found only by a network that keeps back what nobody waits for: ``low_latency_far.kept_back``."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, low-latency engines launch kernels with the bug ``name``; "" for copies
    without one.
    """
    others = {each.kind: each for each in (TORN, NO_FENCE)}
    return mutated((MUTATIONS | others)[name] if name else None)
