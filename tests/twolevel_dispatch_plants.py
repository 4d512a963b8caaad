"""Bugs of the two-level dispatch: see ``twolevel_plants.py``."""

from __future__ import annotations

from plants import Plant

_CREDIT = "            credit(account, mine, source, rest_at(k), head, owed.to(tl.int64))\n"
_HEAD = "net_head(hop.home, c, k)"
_EARLY = f"""    credit(
        net_bytes(state, hop.node, k.ranks, grid.nodes, k.channels), hop.mine, hop.source,
        rest_at(k), {_HEAD}, n.to(tl.int64),
    )
"""
_OWED = "            owe(peers.state, turn, counter, to, owed.to(tl.int64), None, k)\n"
_EARLY_ADD = (
    f"    add_release(words(peer_base(peers.regions, hop.source) + {_HEAD}), n.to(tl.int64), "
    f"None)\n"
)
_MOVED = "    moved, ok = n * 0, True\n"

DISPATCH_PLANTS = {
    # two_dispatch.py
    "dispatch: a round's end forgets what is owed": Plant(
        "last chunk",
        "two_dispatch",
        (("                if place == ROUND - 1:", "                if place > ROUND - 1:"),),
    ),
    "dispatch: a kernel ends without publishing": Plant(
        "last chunk",
        "two_dispatch",
        (
            (
                "= left\n        publish(state, worker, c, TASKS, k)\n",
                "= left\n",
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
                "tail_of(mine, source, turn.channel, k.ranks, k.channels))\n        tl.debug_barrier()\n",
                "tail_of(mine, source, turn.channel, k.ranks, k.channels))\n",
            ),
        ),
    ),
    "forwarder: no barrier behind its looks": Plant(
        "barrier",
        "two_forward",
        (
            (
                "    rooms = look_at_all(heads, beside)\n    tl.debug_barrier()\n",
                "    rooms = look_at_all(heads, beside)\n",
            ),
        ),
    ),
    "sender: one slot too many": Plant(
        "credit before read",
        "two_dispatch",
        (
            (
                "base + tl.maximum(i + n - k.ring.slots, 0)",
                "base + tl.maximum(i + n - k.ring.slots - 1, 0)",
            ),
        ),
    ),
    "sender: ring not drained": Plant(
        "reused too early",
        "two_dispatch",
        (("base + tl.maximum(i + n - k.ring.slots, 0)", "base + i + n - k.ring.slots"),),
        within=30,
        hint=7,
    ),
    "receiver: rows taken not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (
            (
                "tl.store(taken, base + hi - lo)",
                "tl.store(taken, base)",
            ),
        ),
    ),
    "network sender: one slot too many": Plant(
        "credit before read",
        "two_far",
        (("tl.maximum(i + n - net.slots, 0)", "tl.maximum(i + n - net.slots - 1, 0)"),),
    ),
    "network sender: last chunk dropped": Plant(
        "last chunk",
        "two_far",
        (
            (
                "            _put_chunk(peers, node, home,",
                "            if left > n:\n              _put_chunk(peers, node, home,",
            ),
        ),
    ),
    "network sender: tail without its row, mapped": Plant(
        "flag before data",
        "two_far",
        (("turn, 0, tail, count,", "turn, 0, tail, count + (first == 0),"),),
        part="peers",
    ),
    "network sender: ring not drained": Plant(
        "reused too early",
        "two_far",
        (("base + tl.maximum(i + n - net.slots, 0)", "base + i + n - net.slots"),),
        within=30,
    ),
    "network sender: rows not counted": Plant(
        "wrong epoch",
        "two_far",
        (
            (
                "tl.store(net_sent_to(state, node, c, k), base + hi - lo)",
                "tl.store(net_sent_to(state, node, c, k), base)",
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
            (_OWED, "            head += 0\n"),
            (_MOVED, _EARLY_ADD + _MOVED),
            ("    TIMED_OUT, give_up,", "    TIMED_OUT, add_release, give_up,"),
        ),
        part="peers",
    ),
    "forwarder: a credit too many": Plant(
        "credit before read",
        "two_forward",
        (
            (
                "rest_at(k), head, owed.to(tl.int64))",
                "rest_at(k), head, owed.to(tl.int64) + 1)",
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
        "credit before read",
        "two_forward",
        (("counts + more - k.ring.slots, 0)", "counts + more - k.ring.slots - 1, 0)"),),
    ),
    "forwarder: rings not drained": Plant(
        "reused too early",
        "two_forward",
        (
            (
                "sent + tl.maximum(counts + more - k.ring.slots, 0)",
                "sent + counts + more - k.ring.slots",
            ),
        ),
        within=30,
    ),
    "forwarder: rows sent not counted": Plant(
        "wrong epoch",
        "two_forward",
        (
            (
                "tl.store(sent_at, sent + counts, mask=beside)",
                "tl.store(sent_at, sent, mask=beside)",
            ),
        ),
    ),
    "forwarder: rows taken not counted": Plant(
        "wrong epoch",
        "two_forward",
        (
            (
                "c, k), hop.base + hop.end - hop.begin)",
                "c, k), hop.base)",
            ),
        ),
    ),
    "forwarder: tail without its rows": Plant(
        "flag before data",
        "two_forward",
        (
            (
                "(counts - before).to(tl.int64)",
                "(counts - before + (counts > 0).to(tl.int32) * (hop.done == 0).to(tl.int32)).to(tl.int64)",
            ),
        ),
    ),
    "forwarder: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_forward",
        (("tl.store(put_at, counts.to(tl.int64),", "tl.store(put_at, counts.to(tl.int64) * 0,"),),
    ),
}
"""By name."""
