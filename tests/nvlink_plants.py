"""Bugs of the nvlink engine: see ``plants.py``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from plants import Plant, planted_in
from tokenyard.engines.nvlink import NvlinkEngine


def _moved(line: str, before: str) -> tuple[tuple[str, str], ...]:
    """``line`` (with its indent) goes to stand before ``before``, indented like that."""
    indent = before[: len(before) - len(before.lstrip())]
    return (line + "\n", ""), (before, f"{indent}{line.strip()}\n{before}")


_DONES = """            dones = done_of(bases, me, k.ranks, k.channels)
            one = tl.full((k.rank_bins,), 1, tl.int64)
"""
_WRITES = "            for t0 in range(pid * k.rows_sent, num_tokens, k.writers * k.rows_sent):\n"

PLANTS = {
    # sync.py: every kernel's flags
    "no barrier before a release": Plant(
        "barrier",
        "sync",
        (
            (
                "    tl.debug_barrier()\n    tl.atomic_add(counter, count, mask=mask, "
                'sem="release"',
                '    tl.atomic_add(counter, count, mask=mask, sem="release"',
            ),
        ),
    ),
    "release without order": Plant(
        "release",
        "sync",
        (
            (
                'count, mask=mask, sem="release", scope="sys")',
                'count, mask=mask, sem="relaxed", scope="sys")',
            ),
        ),
    ),
    "release for this GPU only": Plant(
        "release",
        "sync",
        (
            (
                'count, mask=mask, sem="release", scope="sys")',
                'count, mask=mask, sem="release", scope="gpu")',
            ),
        ),
    ),
    "plain load for an acquire": Plant(
        "acquire",
        "sync",
        (
            (
                '    return tl.atomic_add(counter, 0, sem="acquire", scope="sys")',
                "    return tl.load(counter)",
            ),
        ),
    ),
    "plain loads for acquires": Plant(
        "acquire",
        "sync",
        (
            (
                'tl.atomic_add(counters, 0, mask=mask, sem="acquire", scope="sys")',
                "tl.load(counters, mask=mask, other=0)",
            ),
        ),
    ),
    "places stored while threads still load them": Plant(
        "barrier",
        "plan",
        (
            (
                "    # several threads load one place of a small tile: all of them before one "
                "stores it\n    tl.debug_barrier()\n",
                "",
            ),
        ),
    ),
    "no barrier behind a wait": Plant(
        "barrier",
        "sync",
        (
            (
                "                give_up(state, TIMED_OUT, phase, peer, number, want, seen)\n    "
                "tl.debug_barrier()\n",
                "                give_up(state, TIMED_OUT, phase, peer, number, want, seen)\n",
            ),
        ),
    ),
    "no barrier behind a wait for all": Plant(
        "barrier",
        "sync",
        (
            (
                "            seen = tl.minimum(seen, wants - 1)\n    tl.debug_barrier()\n",
                "            seen = tl.minimum(seen, wants - 1)\n",
            ),
        ),
    ),
    # dispatch.py
    "dispatch: flag before data": Plant(
        "flag before data",
        "dispatch",
        _moved(
            "            add_release(tail, count.to(tl.int64), None)", "            send_chunk("
        ),
    ),
    "dispatch: flag before what rides along": Plant(
        "flag before data",
        "dispatch",
        (
            (
                'begin, count, first, k: tl.constexpr):\n    """Pack',
                'begin, count, first, tail, k: tl.constexpr):\n    """Pack',
            ),
            (
                "send_chunk(payload, order, ring, i, count, begin, k)",
                "send_chunk(payload, order, ring, i, count, begin, tail, k)",
            ),
            *_moved(
                "            add_release(tail, count.to(tl.int64), None)",
                "    if k.row.metadata_words or (k.row.scale_words and not k.cast.mode):\n",
            ),
        ),
    ),
    "dispatch: credit before what rode along is read": Plant(
        "credit before read",
        "dispatch",
        (
            (
                'begin, count, first, k: tl.constexpr):\n    """Place',
                'begin, count, first, head, k: tl.constexpr):\n    """Place',
            ),
            (
                "source, ring, taken, count, first, k)",
                "source, ring, taken, count, first, head, k)",
            ),
            *_moved(
                "            add_release(head, count.to(tl.int64), None)",
                "    if not k.placing.by_expert and (row.scale_words or k.placing.fresh):\n",
            ),
        ),
    ),
    "dispatch: credit before read": Plant(
        "credit before read",
        "dispatch",
        _moved(
            "            add_release(head, count.to(tl.int64), None)", "            receive_chunk("
        ),
    ),
    "dispatch: one slot too many": Plant(
        "credit before read",
        "dispatch",
        (("+ count - k.ring.slots\n", "+ count - k.ring.slots - 1\n"),),
    ),
    "dispatch: last chunk dropped": Plant(
        "last chunk",
        "dispatch",
        (("in range(begin, end, k.ring.chunk):", "in range(begin, end - 1, k.ring.chunk):"),),
    ),
    "dispatch: ring not drained": Plant(
        "reused too early",
        "dispatch",
        (
            (
                "    ok = wait_at_least(head, want, peers.state, ON_ROOM, to, channel) >= want  # "
                "the ring is drained\n",
                "    ok = True\n",
            ),
        ),
        within=30,
        hint=1,
    ),
    "dispatch: rows sent not counted": Plant(
        "wrong epoch", "dispatch", (("sent + end - begin)", "sent)"),)
    ),
    "dispatch: rows taken not counted": Plant(
        "wrong epoch", "dispatch", (("base + total)", "base)"),)
    ),
    # combine.py
    "combine: flag before data": Plant(
        "flag before data",
        "combine",
        _moved(
            "            add_release(tail, count.to(tl.int64), None)",
            "            send_sums_chunk(\n",
        ),
    ),
    "combine: credit before read": Plant(
        "credit before read",
        "combine",
        (
            ("                add_release(heads, taken - freed, remote & (taken > freed))\n", ""),
            (
                "            _add_rows(",
                "            add_release(heads, upto - taken, remote & (upto > taken))\n"
                "            _add_rows(",
            ),
        ),
    ),
    "combine: one slot too many": Plant(
        "credit before read",
        "combine",
        (("+ count - k.ring.slots\n", "+ count - k.ring.slots - 1\n"),),
    ),
    "combine: last chunk dropped": Plant(
        "last chunk",
        "combine",
        (("in range(begin, end, k.ring.chunk):", "in range(begin, end - 1, k.ring.chunk):"),),
    ),
    "combine: last row not awaited": Plant(
        "last chunk",
        "combine",
        (("tl.max(places - lows[None, :] + 1, axis=0)", "tl.max(places - lows[None, :], axis=0)"),),
    ),
    "combine: ring not drained": Plant(
        "reused too early",
        "combine",
        (
            (
                "    ok = wait_at_least(head, want, peers.state, ON_ROOM, source, channel) >= "
                "want\n    for i",
                "    ok = True\n    for i",
            ),
        ),
        within=30,
        hint=6,
    ),
    "combine: rows taken not counted": Plant(
        "wrong epoch",
        "combine",
        (("tl.store(bases_at, bases + taken,", "tl.store(bases_at, bases,"),),
    ),
    # greet.py
    "greeting: one half only": Plant(
        "reused too early",
        "greet",
        (
            ("half = (call % 2).to(tl.int32)", "half = 0"),
            ("tag_of(mine, (call % 2).to(tl.int32), r,", "tag_of(mine, 0, r,"),
        ),
        part="greetings",
        within=30,
    ),
    "greeting: of the last call": Plant(
        "wrong epoch",
        "greet",
        (("want = call + 1 + (r * 0)", "want = call + (r * 0)"),),
    ),
    "greeting: before its tag": Plant(
        "flag before data",
        "greet",
        _moved(
            "    hellos = hello_of(bases, me, ranks, channels)\n"
            "    add_release(hellos, tl.full((bins,), 1, tl.int64), r < ranks)",
            "    tl.store(tag_of(bases, half, me, ranks, channels), tag + (r * 0), mask=r < ranks)\n",
        ),
    ),
    # plan.py
    "plan: one half only": Plant(
        "reused too early",
        "plan",
        (("half = (call % 2).to(tl.int32)", "half = (call * 0).to(tl.int32)"),),
        part="plans",
        within=40,
        hint=5,
    ),
    "plan: no barrier before a ticket": Plant(
        "barrier",
        "plan",
        (("    tl.debug_barrier()\n    return ranks", "    return ranks"),),
        hint=1,
    ),
    "plan: ticket without order": Plant(
        "release",
        "plan",
        (
            (
                'tl.atomic_add(words(state) + TICKETS, 1, sem="release", scope="gpu")',
                'tl.atomic_add(words(state) + TICKETS, 1, sem="relaxed", scope="gpu")',
            ),
        ),
        hint=1,
    ),
    "plan: tickets of the last call": Plant(
        "wrong epoch",
        "plan",
        (
            (
                "if wait_at_least(words(state) + TICKETS, want, state, ON_PLAN, me, TICKETS) >= "
                "want:",
                "if wait_at_least(words(state) + TICKETS, call * C, state, ON_PLAN, me, TICKETS) "
                ">= call * C:",
            ),
        ),
        hint=2,
    ),
    "plan: arrivals of the last call": Plant(
        "wrong epoch", "plan", (("want + (r * 0)", "call * C + (r * 0)"),)
    ),
    "plan: arrival before the header": Plant(
        "flag before data",
        "exchange",
        _moved(
            "    add_release(arrival_of(bases, me, R, C), tl.full((k.rank_bins,), 1, tl.int64), near)",
            "    if c == C - 1:\n",
        ),
    ),
    # verdict.py
    "verdict: nonce before the headers": Plant(
        "flag before data",
        "verdict",
        _moved(
            '        tl.atomic_xchg(words(header_out), nonce, sem="release", scope="sys")',
            "        doubts = _tell_host(",
        ),
    ),
    # rows that fly before the host knows the counts
    "dispatch: rows fly whatever the plan says": Plant(
        "guess",
        "dispatch",
        (
            (
                "(go == 0) & (forced == 0)",
                "(forced != 0) & (forced == 0)",
            ),
        ),
        part="guesses",
    ),
    # direct.py
    "direct: views not waited for": Plant(
        "reused too early",
        "direct",
        (
            (
                "        if greeted(regions, state, tag, k.ranks, k.channels, k.rank_bins):",
                "        if num_tokens >= 0:",
            ),
        ),
        part="views",
        hint=2,
    ),
    "direct: done before the rows": Plant(
        "flag before data",
        "direct",
        (
            ("            add_release(dones, one, r < k.ranks)\n", ""),
            (_DONES, ""),
            (_WRITES, f"{_DONES}            add_release(dones, one, r < k.ranks)\n{_WRITES}"),
        ),
        part="views",
    ),
    "direct: writers of the last call": Plant(
        "wrong epoch",
        "direct",
        (("(calls + 1) * k.writers + (r * 0)", "calls * k.writers + (r * 0)"),),
        part="views",
    ),
    # push.py
    "push: landings not waited for": Plant(
        "reused too early",
        "push",
        (
            (
                "        if greeted(regions, state, tag, k.ranks, k.channels, k.rank_bins):",
                "        if num_tokens >= 0:",
            ),
        ),
        part="pushes",
    ),
    "push: flag before data": Plant(
        "flag before data",
        "push",
        _moved(
            "            raise_release(landed_of(base, me, i, k.chunks), call)",
            "            _copy(source",
        ),
        part="pushes",
    ),
    "push: rows not waited for": Plant(
        "flag before data",
        "push",
        (
            (
                "        if ok:\n            ok = _landed(",
                "        if num_tokens < 0:\n            ok = _landed(",
            ),
        ),
        part="pushes",
    ),
    "push: no barrier before the flag": Plant(
        "barrier",
        "sync",
        (
            (
                "    tl.debug_barrier()\n    tl.atomic_max(counter, value",
                "    tl.atomic_max(counter, value",
            ),
        ),
        part="pushes",
    ),
    "push: flag without order": Plant(
        "release",
        "sync",
        (('counter, value, sem="release"', 'counter, value, sem="relaxed"'),),
        part="pushes",
    ),
    "push: flag of the last call": Plant(
        "wrong epoch",
        "push",
        (("    want = call + chunk * 0", "    want = call - 1 + chunk * 0"),),
        part="pushes",
    ),
    "push: flag of any call": Plant(
        "wrong epoch",
        "push",
        (("    want = call + chunk * 0", "    want = 1 + chunk * 0"),),
        part="pushes",
    ),
    "push: flag of another chunk": Plant(
        "wrong row",
        "push",
        (
            (
                "raise_release(landed_of(base, me, i, k.chunks), call)",
                "raise_release(landed_of(base, me, i ^ 1, k.chunks), call)",
            ),
        ),
        part="pushes",
    ),
    "push: first chunk waited for only": Plant(
        "wrong row",
        "push",
        (
            (
                "tl.reshape(chunk <= high[:, None],",
                "tl.reshape((chunk == low[:, None]) & (chunk <= high[:, None]),",
            ),
        ),
        part="pushes",
    ),
    "push: last chunk dropped": Plant(
        "last chunk",
        "push",
        (
            (
                "chunks = (tl.max(counts) + CHUNK - 1) // CHUNK",
                "chunks = (tl.max(counts) - 1) // CHUNK",
            ),
        ),
        part="pushes",
    ),
    "push: last piece dropped": Plant(
        "last chunk",
        "push",
        (("in range(first, pieces, k.reducers)", "in range(first, pieces - 1, k.reducers)"),),
        part="pushes",
    ),
    "push: places of the last piece": Plant(
        "wrong row",
        "push",
        (("_places(plan, (i + k.reducers) // PARTS", "_places(plan, i // PARTS"),),
        part="pushes",
    ),
    "push: rows behind one's own": Plant(
        "wrong row",
        "exchange",
        (
            (
                "(d < me)[None, :] & (d[None, :] != s[:, None])",
                "(d < me)[None, :] & (s >= 0)[:, None]",
            ),
        ),
        part="pushes",
    ),
    "push: the first to leave counts the call": Plant(
        "wrong epoch",
        "push",
        (("% programs == programs - 1", "% programs == 0"),),
        part="pushes",
        within=30,
    ),
    "push: call not counted": Plant(
        "wrong epoch",
        "push",
        (("% programs == programs - 1", "% programs == programs"),),
        part="pushes",
    ),
}
"""By name."""


LIES = {
    "a row too many": Plant(
        "lie",
        "exchange",
        (
            (
                "total[:, None], said[None, :])",
                "tl.where(me == 1, total + 1, total)[:, None], said[None, :])",
            ),
        ),
    ),
}
"""What rank 1 tells the others, by name."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, engines launch kernels with the bug ``name``; "" for copies without one."""
    return planted_in(NvlinkEngine, (PLANTS | LIES)[name] if name else None)
