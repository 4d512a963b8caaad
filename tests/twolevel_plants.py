"""Bugs of the two-level engine: see ``plants.py``. ``part``: which of ``twolevel_cases.REHEARSALS``
shows one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nvlink_plants import PLANTS as NVLINK_PLANTS
from nvlink_plants import _moved
from plants import Plant, planted_in
from tokenyard.engines.twolevel import TwolevelEngine
from twolevel_dispatch_plants import DISPATCH_PLANTS
from twolevel_view_plants import VIEW_PLANTS

PLANTS = {
    # two_net.py
    "put: bytes not published": Plant(
        "release",
        "two_net",
        (
            (
                "    add_release(account, num_bytes, None)  # what the program has stored, the "
                "network reads\n",
                "",
            ),
        ),
    ),
    "put: no fence": Plant(
        "flag before data",
        "two_net",
        (("    nvshmem_fence()\n", ""),),
        part="long",
        within=20,
        hint=2,
    ),
    "put between peers: flag before data": Plant(
        "flag before data",
        "two_net",
        _moved(
            "        add_release(words(base + counter), count, None)",
            "        for at in range(0, n, _BLOCK):\n",
        ),
        part="peers",
    ),
    # two_turns.py
    "worker: tasks begin where those of the last call ended": Plant(
        "wrong epoch",
        "two_turns",
        (
            (
                "tl.store(done_in(state, task, channel, k), tl.full((), 0, tl.int64))",
                "task += 0",
            ),
        ),
    ),
    "worker: published twice": Plant(
        "flag before data",
        "two_turns",
        (("        tl.store(at + 1, tl.zeros_like(count), mask=count > 0)\n", ""),),
    ),
    "worker: what is owed is added without order": Plant(
        "release",
        "two_turns",
        (
            (
                "        add_release(words(counter), count, count > 0)\n",
                '        tl.atomic_add(words(counter), count, mask=count > 0, sem="relaxed", '
                'scope="sys")\n',
            ),
        ),
    ),
    **DISPATCH_PLANTS,
    **VIEW_PLANTS,
    # two_combine.py
    "combine: a round's end forgets what is owed": Plant(
        "last chunk",
        "two_combine",
        (("                if place == 0:", "                if place < 0:"),),
    ),
    "combine: a kernel ends without publishing": Plant(
        "last chunk",
        "two_combine",
        (
            (
                "            before = left\n        publish(state, worker, c, TASKS, k)\n",
                "            before = left\n",
            ),
        ),
    ),
    "combiner: no barrier behind its looks": Plant(
        "barrier",
        "two_combine",
        (
            (
                "c, k.ranks, k.channels), others)\n    tl.debug_barrier()\n",
                "c, k.ranks, k.channels), others)\n",
            ),
        ),
    ),
    "reducer: no barrier behind its look": Plant(
        "barrier",
        "two_combine",
        (
            (
                "    found = look_at_all(words(tails), awaited)\n    tl.debug_barrier()\n",
                "    found = look_at_all(words(tails), awaited)\n",
            ),
        ),
    ),
    "combiner: one slot too many": Plant(
        "credit before read",
        "two_combine",
        (("tl.maximum(end - net.slots, 0)", "tl.maximum(end - net.slots - 1, 0)"),),
        hint=7,
    ),
    "combiner: last chunk dropped": Plant(
        "last chunk",
        "two_combine",
        (("if i == end:", "if (i == end) & (end < link.end - link.begin):"),),
    ),
    "combiner: a chunk is put before its end": Plant(
        "flag before data",
        "two_combine",
        (("    elif i == end:\n", "    elif i > link.done:\n"),),
        part="long",
        within=20,
    ),
    "combiner: tail of the whole chunk, mapped": Plant(
        "flag before data",
        "two_combine",
        (
            (
                "        n = (i - link.done).to(tl.int64)\n",
                "        n = (end - link.done).to(tl.int64)\n",
            ),
        ),
        part="long peers",
        within=20,
    ),
    "combiner: last row not awaited": Plant(
        "last chunk", "two_combine", (("tl.max(at + 1, axis=0)", "tl.max(at, axis=0)"),)
    ),
    "combiner: credit before read": Plant(
        "credit before read",
        "two_combine",
        (
            (
                "    owe(state, turn, q, heads, taken - before, others & (taken > before), k)\n",
                "",
            ),
            (
                "            own = a0 + tl.sum(",
                "            add_release(heads, upto - taken, others & (upto > taken))\n"
                "            own = a0 + tl.sum(",
            ),
        ),
    ),
    "combiner: ring not drained": Plant(
        "reused too early",
        "two_combine",
        (("base + tl.maximum(end - net.slots, 0)", "base + end - net.slots"),),
        within=30,
    ),
    "combiner: rows taken not counted": Plant(
        "wrong epoch",
        "two_combine",
        (
            (
                "tl.store(bases_at, bases + taken, mask=others)",
                "tl.store(bases_at, bases, mask=others)",
            ),
        ),
    ),
    "combiner: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_combine",
        (
            (
                "c, k), taken, mask=others)",
                "c, k), taken * 0, mask=others)",
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
            (
                "    add_release(heads, taken - before, credited & (taken > before))\n",
                "",
            ),
            (
                "            beside = table",
                "            add_release(heads, upto - taken, near & (upto > taken))\n"
                "            beside = table",
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
        (
            (
                "c, k), owed, mask=far)",
                "c, k), owed * 0, mask=far)",
            ),
        ),
        part="long",
        within=20,
    ),
    "reducer: network rows taken not counted": Plant(
        "wrong epoch",
        "two_combine",
        (("tl.store(far_at, bases + taken, mask=far)", "tl.store(far_at, bases, mask=far)"),),
    ),
    # two_letters.py, two_region.py
    "greeting: before its tag": Plant(
        "flag before data",
        "two_letters",
        _moved(
            "    add_release(hello_of(bases, me, R, C), tl.full((k.rank_bins,), 1, tl.int64), near)",
            "    tl.store(tag_of(bases, half, me, R, C), tag + (r * 0), mask=near)\n",
        ),
        within=30,
    ),
    "greeting: of the last call": Plant(
        "wrong epoch", "two_letters", (("want = call + 1 + (r * 0)", "want = call + (r * 0)"),)
    ),
    "letters: one half only": Plant(
        "reused too early",
        "two_region",
        (("((outbox * 2 + half) * R + peer)", "((outbox * 2 + half * 0) * R + peer)"),),
        part="plans",
        within=40,
        hint=1,
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
        (
            "since + tl.load(words(state) + TIMEOUT_NS) + grace_ns",
            "since + 200 + grace_ns // 1000000",
        ),
        ("SPINS = tl.constexpr(16)", "SPINS = tl.constexpr(2)"),
    ),
)
"""Workers whose deadlines pass while counters arrive."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, engines launch kernels with the bug ``name``, or ``hurried``; "" for copies without
    one.
    """
    plant = HURRIED if name == "hurried" else PLANTS[name] if name else None
    with planted_in(TwolevelEngine, plant):
        yield
