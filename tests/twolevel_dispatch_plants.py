"""Bugs of the two-level dispatch: see ``twolevel_plants.py``."""

from __future__ import annotations

from plants import Plant

_CREDIT = "            credit(account, mine, source, rest_at(R, P, C, W, FAR), head, owed.to(tl.int64))\n"
_EARLY = """            credit(
                net_bytes(state, node, R, G, C), mine, source, rest_at(R, P, C, W, FAR), net_head(home, c, G, C, FAR),
                n.to(tl.int64),
            )
"""
_OWED = "owe(state, task, c, me % P, peer_base(peers, source) + head, owed.to(tl.int64), None, R, R // P, C)"
_EARLY_ADD = """            add_release(
                words(peer_base(peers, source) + net_head(home, c, G, C, FAR)), n.to(tl.int64), None
            )
"""
_MOVED = "            moved, ok = n * 0, True\n"

DISPATCH_PLANTS = {
    # two_dispatch.py
    "dispatch: a round's end forgets what is owed": Plant(
        "last chunk", "two_dispatch", (("                if place == LAST:", "                if place > LAST:"),)
    ),
    "dispatch: a kernel ends without publishing": Plant(
        "last chunk",
        "two_dispatch",
        (
            (
                "            before = left\n        publish(state, worker, c, TASKS, WORKERS, R, G, C)\n",
                "            before = left\n",
            ),
        ),
    ),
    "own rows: no barrier between progress read and noted": Plant(
        "barrier",
        "two_dispatch",
        (("    left = hi - lo - i\n    tl.debug_barrier()\n", "    left = hi - lo - i\n"),),
    ),
    "receiver: no barrier behind a look": Plant(
        "barrier",
        "two_dispatch",
        (
            (
                "        seen = load_acquire(tail_of(mine, s, c, R, C))\n        tl.debug_barrier()\n",
                "        seen = load_acquire(tail_of(mine, s, c, R, C))\n",
            ),
        ),
    ),
    "forwarder: no barrier behind its looks": Plant(
        "barrier",
        "two_forward",
        (
            (
                "            rooms = look_at_all(heads, beside)\n            tl.debug_barrier()\n",
                "            rooms = look_at_all(heads, beside)\n",
            ),
        ),
    ),
    "sender: one slot too many": Plant(
        "credit before read",
        "two_dispatch",
        (("base + tl.maximum(i + n - Q, 0)", "base + tl.maximum(i + n - Q - 1, 0)"),),
    ),
    "sender: ring not drained": Plant(
        "reused too early",
        "two_dispatch",
        (("base + tl.maximum(i + n - Q, 0)", "base + i + n - Q"),),
        within=30,
        hint=7,
    ),
    "receiver: rows taken not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (("tl.store(taken_from(state, s, c, R, C), base + hi - lo)", "tl.store(taken_from(state, s, c, R, C), base)"),),
    ),
    "network sender: one slot too many": Plant(
        "credit before read",
        "two_dispatch",
        (("tl.maximum(i + n - NQ, 0)", "tl.maximum(i + n - NQ - 1, 0)"),),
    ),
    "network sender: last chunk dropped": Plant(
        "last chunk",
        "two_dispatch",
        (
            (
                "                put(peers, account, mine, to, there",
                "                if left > n:\n                  put(peers, account, mine, to, there",
            ),
        ),
    ),
    "network sender: tail without its row, mapped": Plant(
        "flag before data",
        "two_dispatch",
        (("peer_base(peers, to) + tail, n.to(tl.int64),", "peer_base(peers, to) + tail, n.to(tl.int64) + (i == 0),"),),
        part="peers",
    ),
    "network sender: ring not drained": Plant(
        "reused too early",
        "two_dispatch",
        (("base + tl.maximum(i + n - NQ, 0)", "base + i + n - NQ"),),
        within=30,
    ),
    "network sender: rows not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (
            (
                "tl.store(net_sent_to(state, node, c, R, G, C), base + hi - lo)",
                "tl.store(net_sent_to(state, node, c, R, G, C), base)",
            ),
        ),
    ),
    "forwarder: credit before read": Plant(
        "credit before read",
        "two_forward",
        ((_CREDIT, ""), (_MOVED, _EARLY + _MOVED)),
    ),
    "forwarder: credit before read, mapped": Plant(
        "credit before read",
        "two_forward",
        (
            (_OWED, "head += 0"),
            (_MOVED, _EARLY_ADD + _MOVED),
            ("import TIMED_OUT, give_up,", "import TIMED_OUT, add_release, give_up,"),
        ),
        part="peers",
    ),
    "forwarder: a credit too many": Plant(
        "credit before read",
        "two_forward",
        (
            (
                "rest_at(R, P, C, W, FAR), head, owed.to(tl.int64))",
                "rest_at(R, P, C, W, FAR), head, owed.to(tl.int64) + 1)",
            ),
        ),
    ),
    "forwarder: last credits kept": Plant(
        "last chunk",
        "two_forward",
        (("tl.where(last, i1, i1 // CREDIT * CREDIT)", "i1 // CREDIT * CREDIT"),),
        part="long",
    ),
    "forwarder: one slot too many": Plant(
        "credit before read", "two_forward", (("counts + more - Q, 0)", "counts + more - Q - 1, 0)"),)
    ),
    "forwarder: rings not drained": Plant(
        "reused too early",
        "two_forward",
        (("sent + tl.maximum(counts + more - Q, 0)", "sent + counts + more - Q"),),
        within=30,
    ),
    "forwarder: rows sent not counted": Plant(
        "wrong epoch",
        "two_forward",
        (("tl.store(sent_at, sent + counts, mask=beside)", "tl.store(sent_at, sent, mask=beside)"),),
    ),
    "forwarder: rows taken not counted": Plant(
        "wrong epoch",
        "two_forward",
        (
            (
                "tl.store(net_taken_from(state, node, c, R, G, C), base + hi - lo)",
                "tl.store(net_taken_from(state, node, c, R, G, C), base)",
            ),
        ),
    ),
    "forwarder: tail without its rows": Plant(
        "flag before data",
        "two_forward",
        (
            (
                "(counts - before).to(tl.int64)",
                "(counts - before + (counts > 0).to(tl.int32) * (i0 == 0).to(tl.int32)).to(tl.int64)",
            ),
        ),
    ),
    "forwarder: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_forward",
        (("tl.store(put_at, counts.to(tl.int64), mask=near)", "tl.store(put_at, counts.to(tl.int64) * 0, mask=near)"),),
    ),
}
"""By name."""
