"""Bugs of the two-level engine: see ``plants.py``. ``part``: which of ``twolevel_cases.REHEARSALS`` shows one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvlink_plants import PLANTS as NVLINK_PLANTS
from nvlink_plants import _moved
from plants import Plant, planted_in

_CREDIT = """            if (owed >= CREDIT) | (taken == total):
                credit(
                    peers, net_bytes(state, node, R, R // P, C), mine, source, rest_at(R, P, C, W, FAR),
                    net_head(home, c, R // P, C, FAR), owed.to(tl.int64), NET,
                )  # fmt: skip
                owed = owed * 0
"""
_EARLY = """        if ok:
            credit(
                peers, net_bytes(state, node, R, R // P, C), mine, source, rest_at(R, P, C, W, FAR),
                net_head(home, c, R // P, C, FAR), n.to(tl.int64), NET,
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
    # two_dispatch.py
    "network sender: one slot too many": Plant(
        "credit before read",
        "two_dispatch",
        (("want = base + (i0 - lo) + n - NQ\n", "want = base + (i0 - lo) + n - NQ - 1\n"),),
    ),
    "network sender: last chunk dropped": Plant(
        "last chunk", "two_dispatch", (("for i0 in range(lo, hi, NCHUNK):", "for i0 in range(lo, hi - 1, NCHUNK):"),)
    ),
    "network sender: ring not drained": Plant(
        "reused too early",
        "two_dispatch",
        (
            (
                "    ok = wait_at_least(head, want, state, ON_NET_ROOM, node, c) >= want\n    for",
                "    ok = True\n    for",
            ),
        ),
        within=30,
    ),
    "network sender: rows not counted": Plant(
        "wrong epoch",
        "two_dispatch",
        (("c, R, R // P, C), base + hi - lo)", "c, R, R // P, C), base)"),),
    ),
    "forwarder: credit before read": Plant(
        "credit before read",
        "two_dispatch",
        ((_CREDIT, ""), ("        before = counts\n", f"        before = counts\n{_EARLY}")),
    ),
    "forwarder: a credit too many": Plant(
        "credit before read", "two_dispatch", (("            owed += n\n", "            owed += n + 1\n"),)
    ),
    "forwarder: last credits kept": Plant(
        "last chunk", "two_dispatch", (("if (owed >= CREDIT) | (taken == total):", "if owed >= CREDIT:"),), part="long"
    ),
    "forwarder: one slot too many": Plant(
        "credit before read", "two_dispatch", (("counts + more - Q\n", "counts + more - Q - 1\n"),)
    ),
    "forwarder: rings not drained": Plant(
        "reused too early",
        "two_dispatch",
        (
            (
                "    ok = lacking(wait_for_all(heads, sent, near, state, ON_ROOMS, number), sent, near) == 0\n",
                "    ok = True\n",
            ),
        ),
        within=30,
    ),
    "forwarder: rows sent not counted": Plant(
        "wrong epoch", "two_dispatch", (("C), sent + counts, mask=near)", "C), sent, mask=near)"),)
    ),
    "forwarder: rows taken not counted": Plant(
        "wrong epoch", "two_dispatch", (("c, R, R // P, C), base + total)", "c, R, R // P, C), base)"),)
    ),
    "forwarder: tail without its rows": Plant(
        "flag before data",
        "two_dispatch",
        (
            (
                "(counts - before).to(tl.int64)",
                "(counts - before + (counts > 0).to(tl.int32) * (taken == 0).to(tl.int32)).to(tl.int64)",
            ),
        ),
    ),
    # two_combine.py
    "combiner: one slot too many": Plant(
        "credit before read",
        "two_combine",
        (("want = base + (i0 - lo) + n - NQ\n", "want = base + (i0 - lo) + n - NQ - 1\n"),),
    ),
    "combiner: last chunk dropped": Plant(
        "last chunk", "two_combine", (("for i0 in range(lo, hi, NCHUNK):", "for i0 in range(lo, hi - 1, NCHUNK):"),)
    ),
    "combiner: last row not awaited": Plant(
        "last chunk", "two_combine", (("tl.max(at + 1, axis=0)", "tl.max(at, axis=0)"),)
    ),
    "combiner: credit before read": Plant(
        "credit before read",
        "two_combine",
        _moved(
            "                add_release(heads, upto - taken, others & (upto > taken))",
            "                own = a0 + tl.sum(tl.where((q == me % P)[None, :], at, 0), axis=1)\n",
        ),
    ),
    "combiner: ring not drained": Plant(
        "reused too early",
        "two_combine",
        (
            (
                "    ok = wait_at_least(head, want, state, ON_NET_ROOM, node, c) >= want\n    taken",
                "    ok = True\n    taken",
            ),
        ),
        within=30,
    ),
    "combiner: rows taken not counted": Plant(
        "wrong epoch", "two_combine", (("C), bases + taken, mask=others)", "C), bases, mask=others)"),)
    ),
    "reducer: last row not awaited": Plant(
        "last chunk",
        "two_combine",
        (("tl.max(places - lows[None, :] + 1, axis=0)", "tl.max(places - lows[None, :], axis=0)"),),
    ),
    "reducer: credit before read": Plant(
        "credit before read",
        "two_combine",
        _moved(
            "            add_release(heads, upto - taken, near & (upto > taken))",
            "            beside = place_of(plan, t, T, D, C)[:, None] + home * P + q[None, :]\n",
        ),
    ),
    "reducer: a network credit too many": Plant(
        "credit before read",
        "two_combine",
        (("owed += tl.where(far, upto - taken, 0)", "owed += tl.where(far & (upto > taken), upto - taken + 1, 0)"),),
    ),
    "reducer: network rows taken not counted": Plant(
        "wrong epoch", "two_combine", (("C), bases + taken, mask=far)", "C), bases, mask=far)"),)
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


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, engines launch kernels with the bug ``name``; "" for copies without one."""
    plant = PLANTS[name] if name else None
    with planted_in("tokenyard.engines.launches", plant), planted_in("tokenyard.engines.twolevel_launches", plant):
        yield
