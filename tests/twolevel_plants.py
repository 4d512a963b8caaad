"""Bugs of the two-level engine: see ``plants.py``. ``part``: which of ``twolevel_cases.REHEARSALS`` shows one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvlink_plants import PLANTS as NVLINK_PLANTS
from nvlink_plants import _moved
from plants import Plant, planted_in

_CREDIT = """                owed = tl.where(left == 0, i1, i1 // CREDIT * CREDIT) - i0 // CREDIT * CREDIT
                if owed > 0:
                    credit(
                        peers, net_bytes(state, node, R, G, C), mine, source, rest_at(R, P, C, W, FAR),
                        net_head(home, c, G, C, FAR), owed.to(tl.int64), NET,
                    )  # fmt: skip
"""
_EARLY = """            credit(
                peers, net_bytes(state, node, R, G, C), mine, source, rest_at(R, P, C, W, FAR), net_head(home, c, G, C, FAR),
                n.to(tl.int64), NET,
            )
"""

PLANTS = {
    # two_net.py
    "put: bytes not published": Plant(
        "release",
        "two_net",
        (
            (
                "    add_release(account, num_bytes, None)  # what the program has stored, the network reads\n",
                "",
            ),
        ),
    ),
    "put: no fence": Plant("flag before data", "two_net", (("    nvshmem_fence()\n", ""),), part="long", within=20),
    "put between peers: flag before data": Plant(
        "flag before data",
        "two_net",
        _moved("        add_release(words(base + counter), count, None)", "        for at in range(0, n, _BLOCK):\n"),
        part="peers",
    ),
    # two_turns.py
    "worker: tasks begin where those of the last call ended": Plant(
        "wrong epoch",
        "two_turns",
        (("tl.store(done_in(state, task, channel, R, G, C), tl.full((), 0, tl.int64))", "task += 0"),),
    ),
    # two_dispatch.py
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
        "two_dispatch",
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
                "put(\n                peers, net_bytes",
                "if left > n:\n              put(\n                peers, net_bytes",
            ),
        ),
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
        "two_dispatch",
        ((_CREDIT, ""), ("            moved, ok = n * 0, True\n", f"{_EARLY}            moved, ok = n * 0, True\n")),
    ),
    "forwarder: a credit too many": Plant(
        "credit before read",
        "two_dispatch",
        (
            (
                "net_head(home, c, G, C, FAR), owed.to(tl.int64), NET,",
                "net_head(home, c, G, C, FAR), owed.to(tl.int64) + 1, NET,",
            ),
        ),
    ),
    "forwarder: last credits kept": Plant(
        "last chunk",
        "two_dispatch",
        (("tl.where(left == 0, i1, i1 // CREDIT * CREDIT)", "i1 // CREDIT * CREDIT"),),
        part="long",
    ),
    "forwarder: one slot too many": Plant(
        "credit before read", "two_dispatch", (("counts + more - Q, 0)", "counts + more - Q - 1, 0)"),)
    ),
    "forwarder: rings not drained": Plant(
        "reused too early",
        "two_dispatch",
        (("sent + tl.maximum(counts + more - Q, 0)", "sent + counts + more - Q"),),
        within=30,
    ),
    "forwarder: rows sent not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (("tl.store(sent_at, sent + counts, mask=beside)", "tl.store(sent_at, sent, mask=beside)"),),
    ),
    "forwarder: rows taken not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (
            (
                "tl.store(net_taken_from(state, node, c, R, G, C), base + hi - lo)",
                "tl.store(net_taken_from(state, node, c, R, G, C), base)",
            ),
        ),
    ),
    "forwarder: tail without its rows": Plant(
        "flag before data",
        "two_dispatch",
        (
            (
                "(counts - before).to(tl.int64)",
                "(counts - before + (counts > 0).to(tl.int32) * (i0 == 0).to(tl.int32)).to(tl.int64)",
            ),
        ),
    ),
    "forwarder: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_dispatch",
        (("tl.store(put_at, counts.to(tl.int64), mask=near)", "tl.store(put_at, counts.to(tl.int64) * 0, mask=near)"),),
    ),
    # two_combine.py
    "combiner: no barrier behind its looks": Plant(
        "barrier",
        "two_combine",
        (
            (
                "        tails = look_at_all(tail_of(mine, node * P + q, c, R, C), others)\n        tl.debug_barrier()\n",
                "        tails = look_at_all(tail_of(mine, node * P + q, c, R, C), others)\n",
            ),
        ),
    ),
    "reducer: no barrier behind its look": Plant(
        "barrier",
        "two_combine",
        (
            (
                "        found = look_at_all(words(tails), awaited)\n        tl.debug_barrier()\n",
                "        found = look_at_all(words(tails), awaited)\n",
            ),
        ),
    ),
    "combiner: one slot too many": Plant(
        "credit before read",
        "two_combine",
        (("tl.maximum(end - NQ, 0)", "tl.maximum(end - NQ - 1, 0)"),),
    ),
    "combiner: last chunk dropped": Plant(
        "last chunk", "two_combine", (("if i == end:", "if (i == end) & (end < hi - lo):"),)
    ),
    "combiner: a chunk is put before its end": Plant(
        "flag before data",
        "two_combine",
        (("            if i == end:\n", "            if i > i0:\n"),),
        part="long",
        within=20,
    ),
    "combiner: last row not awaited": Plant(
        "last chunk", "two_combine", (("tl.max(at + 1, axis=0)", "tl.max(at, axis=0)"),)
    ),
    "combiner: credit before read": Plant(
        "credit before read",
        "two_combine",
        (
            ("            add_release(heads, taken - before, others & (taken > before))\n", ""),
            (
                "                own = a0 + tl.sum(tl.where((q == me % P)[None, :], at, 0), axis=1)\n",
                "                add_release(heads, upto - taken, others & (upto > taken))\n"
                "                own = a0 + tl.sum(tl.where((q == me % P)[None, :], at, 0), axis=1)\n",
            ),
        ),
    ),
    "combiner: ring not drained": Plant(
        "reused too early", "two_combine", (("base + tl.maximum(end - NQ, 0)", "base + end - NQ"),), within=30
    ),
    "combiner: rows taken not counted": Plant(
        "wrong epoch",
        "two_combine",
        (("tl.store(bases_at, bases + taken, mask=others)", "tl.store(bases_at, bases, mask=others)"),),
    ),
    "combiner: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_combine",
        (
            (
                "            tl.store(taken_at, taken, mask=others)",
                "            tl.store(taken_at, taken * 0, mask=others)",
            ),
        ),
    ),
    "reducer: last row not awaited": Plant(
        "last chunk",
        "two_combine",
        (("tl.max(places - lows[None, :] + 1, axis=0)", "tl.max(places - lows[None, :], axis=0)"),),
    ),
    "reducer: credit before read": Plant(
        "credit before read",
        "two_combine",
        (
            ("            add_release(heads, taken - before, near & (taken > before))\n", ""),
            (
                "                beside = place_of(plan, t, T, D, C)[:, None] + home * P + q[None, :]\n",
                "                add_release(heads, upto - taken, near & (upto > taken))\n"
                "                beside = place_of(plan, t, T, D, C)[:, None] + home * P + q[None, :]\n",
            ),
        ),
    ),
    "reducer: a network credit too many": Plant(
        "credit before read",
        "two_combine",
        (
            (
                "owed += tl.where(far, taken - before, 0)",
                "owed += tl.where(far & (taken > before), taken - before + 1, 0)",
            ),
        ),
    ),
    "reducer: credits of an earlier turn forgotten": Plant(
        "last chunk",
        "two_combine",
        (("            tl.store(owed_at, owed, mask=far)", "            tl.store(owed_at, owed * 0, mask=far)"),),
        part="long",
        within=20,
    ),
    "reducer: network rows taken not counted": Plant(
        "wrong epoch",
        "two_combine",
        (("tl.store(far_at, bases + taken, mask=far)", "tl.store(far_at, bases, mask=far)"),),
    ),
    # two_letters.py, two_region.py
    "letters: one half only": Plant(
        "reused too early",
        "two_region",
        (("((outbox * 2 + half) * R + peer)", "((outbox * 2 + half * 0) * R + peer)"),),
        part="plans",
        within=40,
    ),
    "letters: bounds of the rank for those of the node": Plant(
        "wrong epoch", "two_letters", (("hist + c * HIST + R + to // P,", "hist + c * HIST + to,"),)
    ),
    # sync.py, under roles that nvlink lacks
    **{
        name: NVLINK_PLANTS[name]
        for name in (
            "no barrier before a release",
            "release without order",
            "plain load for an acquire",
            "plain loads for acquires",
        )
    },
}
"""By name."""


HURRIED = Plant(
    "deadline",
    "two_turns",
    (
        ("since + tl.load(words(state) + TIMEOUT_NS) + grace_ns", "since + 200 + grace_ns // 1000000"),
        ("SPINS = tl.constexpr(16)", "SPINS = tl.constexpr(2)"),
    ),
)
"""Workers whose deadlines pass while counters arrive."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, engines launch kernels with the bug ``name``, or ``hurried``; "" for copies without one."""
    plant = HURRIED if name == "hurried" else PLANTS[name] if name else None
    with planted_in("tokenyard.engines.launches", plant), planted_in("tokenyard.engines.twolevel_launches", plant):
        yield
