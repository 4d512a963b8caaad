"""Bugs of the two-level engine's combine in place: see ``twolevel_mutations.py``."""

from __future__ import annotations

from edits import Edit, both, change, drop, drop_barrier, first_of, insert, move, rewrite
from mutations import mutation
from nvlink_mutations import RELAXED
from twolevel_in_place_mutations import COUNTED, HERE, NOT_COUNTED, NOT_LAST, ROWS

PULLER = {
    "puller: rows of ranks that are not there": mutation(
        "flag before data",
        "two_pull",
        rewrite("(room_ >= want_) & ready_", "room_ >= want_", "combine_turn"),
        part="pulls",
        hint=6,
    ),
    "puller: no barrier behind its look": mutation(
        "barrier", "two_pull", drop_barrier("combine_turn"), part="pulls peers"
    ),
    "puller: one slot too many": mutation(
        "credit before read",
        "two_pull",
        rewrite(
            "tl.maximum(rows_ - slots_, 0)", "tl.maximum(rows_ - slots_ - 1, 0)", "combine_turn"
        ),
        part="pulls",
        hint=2,
    ),
    "puller: put before its rows": mutation(
        "flag before data",
        "two_pull",
        first_of(
            both(
                move("sum_chunk(...)", "left_ -= n_", "combine_turn", keep=True),
                change("sum_chunk(..., n=n_)", "combine_turn", nth=0, n_="n_ * 0"),
            ),
            move("put_chunk(...)", ROWS, "combine_turn", along=True),
        ),
        part="pulls",
    ),
    "puller: tail without its row, mapped": mutation(
        "flag before data",
        "two_pull",
        change(
            "put_chunk(..., n=n_)",
            "combine_turn",
            where=("_, _, i_ = rows_of_turn(...)",),
            n_="n_ + (i_ == 0)",
        ),
        part="pulls peers",
    ),
    "puller: last row dropped": mutation(
        "last chunk",
        "two_pull",
        first_of(
            rewrite(HERE, NOT_LAST, "combine_turn", where=("n_ = tl.minimum(left_, _)",)),
            rewrite(
                HERE,
                "row_ + lane_ < n_ - (link.done + n_ == link.end - link.begin).to(tl.int32)",
                "sum_chunk",
            ),
        ),
        part="pulls",
    ),
    "puller: rows sent not counted": mutation(
        "wrong epoch", "two_pull", rewrite(COUNTED, NOT_COUNTED, "combine_turn"), part="pulls"
    ),
    "puller: landings of the next channel": mutation(
        "wrong row",
        "two_pull",
        change(
            "first_forwarded(..., k_, channel=channel_)",
            "combine_turn",
            channel_="(channel_ + 1) % k_.channels",
        ),
        part="pulls channels",
    ),
}

_REDUCE = "reduce_turn|reduce"
_TAKEN, _UPTO = "taken_ = upto_", "upto_ = tl.where(far_, ...)"
_EARLY_ADD = """add_release(
    words(
        tl.load(words(peers) + node * P + local, mask=far_, other=0) + net_head(home, c, G, C, FAR)
    ),
    upto_ - taken_, far_ & (upto_ > taken_),
)"""
_EARLY_ADD_TO_PEERS = """add_release(
    words(
        tl.load(
            words(peers.regions) + node * P + peers.rank % P, mask=far_, other=0
        ) + net_head(home, c, k)
    ),
    upto_ - taken_, far_ & (upto_ > taken_),
)"""


def _added_early(text: str) -> Edit:
    return insert(text, _TAKEN, _REDUCE, where=(_UPTO,), first=True)


REDUCER = {
    "pulling reducer: rows of ranks that are not there": mutation(
        "flag before data",
        "two_pull",
        rewrite("(left_ > 0) & ready_", "left_ > 0", "reduce_turn|turn"),
        part="pulls",
    ),
    "pulling reducer: no barrier behind its look": mutation(
        "barrier", "two_pull", drop_barrier(_REDUCE), part="pulls"
    ),
    "pulling reducer: rows behind one's own": mutation(
        "wrong row",
        "two_pull",
        rewrite("starts_ + _.to(tl.int64) * _", "starts_", _REDUCE),
        part="pulls",
    ),
    "pulling reducer: network rows not waited for": mutation(
        "flag before data",
        "two_pull",
        rewrite("(lacking(...) == 0) & on_time_", "on_time_", _REDUCE),
        part="pulls",
    ),
    "pulling reducer: last row not awaited": mutation(
        "last chunk",
        "two_pull",
        rewrite("tl.max(at_ - low_ + 1, axis=0)", "tl.max(at_ - low_, axis=0)", _REDUCE),
        part="pulls",
    ),
    "pulling reducer: last token dropped": mutation(
        "last chunk",
        "two_pull",
        rewrite("here_ = t_ < end_", "here_ = t_ < end_ - 1", _REDUCE),
        part="pulls",
    ),
    "pulling reducer: credit before read": mutation(
        "credit before read",
        "two_pull",
        move("return_network_credits(...)", _TAKEN, _REDUCE, where=(_UPTO,), keep=True, first=True),
        change(
            "return_network_credits(..., deferred=deferred_, last=last_)",
            _REDUCE,
            where=(_TAKEN, _UPTO),
            nth=0,
            deferred_="deferred_ + tl.where(far_, upto_ - taken_, 0)",
            last_="i >= 0",
        ),
        rewrite("tl.where(_, taken_ - _, none_)", "none_", _REDUCE, nth=-1),
        part="pulls",
        within=20,
    ),
    "pulling reducer: credit before read, mapped": mutation(
        "credit before read",
        "two_pull",
        first_of(
            both(drop("tl.store(_, taken_ - _, mask=_)", _REDUCE), _added_early(_EARLY_ADD)),
            both(
                rewrite("added_ if mapped_ else _", "added_ * 0 if mapped_ else deferred", _REDUCE),
                _added_early(_EARLY_ADD_TO_PEERS),
            ),
        ),
        part="pulls peers",
        within=20,
    ),
    "pulling reducer: credits of an earlier turn forgotten": mutation(
        "last chunk",
        "two_pull",
        change(
            "tl.store(_, deferred_, mask=_)",
            _REDUCE,
            where=("deferred_ = return_network_credits(...)",),
            deferred_="deferred_ * 0",
        ),
        part="long pulls",
        within=20,
    ),
    "pulling reducer: rows of an earlier turn forgotten": mutation(
        "wrong epoch",
        "two_pull",
        change("tl.store(_, taken_, mask=_)", _REDUCE, where=(_TAKEN, _UPTO), taken_="taken_ * 0"),
        part="pulls",
    ),
    "pulling reducer: rows taken not counted": mutation(
        "wrong epoch",
        "two_pull",
        change("tl.store(_, _ + taken_, mask=_)", _REDUCE, taken_="taken_ * 0"),
        part="pulls",
    ),
}

PULL = {
    "pull: done before the reads": mutation(
        "credit before read",
        "two_pull",
        move("end_in_place(...)", "while _: ...", "two_pull_kernel"),
        part="pulls",
    ),
    "pull: a round's end forgets what is owed": mutation(
        "last chunk", "two_pull", drop("flush_signals(...)", "two_pull_kernel"), part="pulls peers"
    ),
    "pull: published twice": mutation(
        "flag before data",
        "two_pull",
        drop("tl.store(_, tl.zeros_like(_), ...)", "flush_signals"),
        part="pulls peers",
    ),
    "pull: what is owed is added without order": mutation(
        "release",
        "two_pull",
        rewrite(
            "add_release(at_, count_, mask_)",
            f"tl.atomic_add(at_, count_, mask=mask_, sem={RELAXED}, scope='sys')",
            "flush_signals",
        ),
        part="pulls peers",
    ),
    "pull: credits of reducers forgotten": mutation(
        "last chunk",
        "two_pull",
        rewrite("worker_ == 0", "worker_ < 0", "flush_signals"),
        part="long pulls peers",
    ),
}

PULL_MUTATIONS = {**PULLER, **REDUCER, **PULL}
"""By name."""
