"""Bugs of the two-level engine's dispatch and combine in place: see ``twolevel_plants.py``."""

from __future__ import annotations

from plants import Plant

_END = "        if step < OVER:\n            end_in_views(regions, state, k)\n"
_BEGIN = "        step, idle, since, ready = worker * 0, worker * 0, now_ns(), worker < 0\n"
_DONE_FIRST = (
    (_END, ""),
    (_BEGIN, _BEGIN + "        end_in_views(regions, state, k)\n"),
)
_WRITTEN_FIRST = (
    (_END, ""),
    (_BEGIN, _BEGIN + "        if worker >= 0:\n            end_in_views(regions, state, k)\n"),
)
_UNASKED = ("left += tl.where(ready, 0, 1)\n", "left += 0\n")
_ROWS = "            for j in range(0, n, k.rows_forwarded):\n"
_CREDITED = (
    "            return_credits(peers, mine, home, source, node, turn, i0, {i1}, {last}, k)\n"
)
_SUMS = "        if ok:\n"
_ADD_EARLY = """            theirs = words(peers.regions) + node * P + peers.rank % P
            heads = words(tl.load(theirs, mask=far, other=0) + net_head(home, c, k))
            add_release(heads, upto - taken, far & (upto > taken))
"""
_OWE_EARLY = """            early = tl.where(far, upto - taken, 0)
            return_network_credits(peers, mine, c, early, share.tokens > 0, k)
"""
_PUT = (
    "                put(peers.regions, account, mine, owner, there, here, num_bytes, tail, num, 2, "
    "True)\n"
)
_LAST = "j + b < n - (n == left).to(tl.int32)"
_STORED = "            _sum_chunk(peers, routing, starts, here, there, link, n, c, k)\n"
_PUT_EARLY = """            account = net_bytes(state, node, k.ranks, k.grid.nodes, k.channels)
            num, at = n.to(tl.int64), (i0 % net.slots).to(tl.int64) * k.row.slot_bytes
            num_bytes, tail = num * k.row.slot_bytes, net_tail(home, c, k)
            to, from_ = there + at, here + at
            put(peers.regions, account, mine, owner, to, from_, num_bytes, tail, num, 2, True)
"""

VIEW_PLANTS = {
    # two_direct.py
    "placer: views not waited for": Plant(
        "reused too early",
        "two_direct",
        (("(seen >= want) & ready", "(seen >= want)"),),
        part="views",
    ),
    "near rows: views not waited for": Plant(
        "reused too early",
        "two_direct",
        (("    if (left > 0) & ready:\n", "    if left > 0:\n"),),
        part="views",
        hint=4,
    ),
    "near rows: no barrier between progress read and noted": Plant(
        "barrier",
        "two_direct",
        (
            (
                "- i0\n    tl.debug_barrier()\n    if (left > 0) & ready:",
                "- i0\n    if (left > 0) & ready:",
            ),
        ),
        part="views",
    ),
    "near rows: last row dropped": Plant(
        "last chunk",
        "two_direct",
        (
            (
                "t, here = c * share + i0 + j + b, j + b < n",
                f"t, here = c * share + i0 + j + b, {_LAST}",
            ),
        ),
        part="views",
    ),
    "near rows: behind one's own": Plant(
        "wrong row",
        "two_direct",
        (("tl.where(places >= 0, places + firsts[None, :], -1)", "places"),),
        part="views",
    ),
    "placer: no barrier behind its look": Plant(
        "barrier",
        "two_direct",
        (
            (
                "mask=near & (i0 > 0), other=0).to(tl.int32)\n        tl.debug_barrier()\n",
                "mask=near & (i0 > 0), other=0).to(tl.int32)\n",
            ),
        ),
        part="views",
    ),
    "placer: last row dropped": Plant(
        "last chunk",
        "two_direct",
        (("i, here = i0 + j + b, j + b < n\n", f"i, here = i0 + j + b, {_LAST}\n"),),
        part="views",
    ),
    "placer: rows not waited for": Plant(
        "flag before data",
        "two_direct",
        (
            ("        want = base + i0 + 1\n", "        want = base + i0\n"),
            (
                "tl.minimum(tl.minimum((seen - base).to(tl.int32) - i0, left), net.chunk)",
                "tl.minimum(left, net.chunk)",
            ),
        ),
        part="views",
        hint=4,
    ),
    "placer: credit before read": Plant(
        "credit before read",
        "two_direct",
        (
            (_CREDITED.format(i1="i1", last="left == 0"), ""),
            (_ROWS, _CREDITED.format(i1="i0 + n", last="left == n") + _ROWS),
        ),
        part="views",
        within=20,
    ),
    "placer: rows taken not counted": Plant(
        "wrong epoch",
        "two_direct",
        (
            (
                "tl.store(net_taken_from(peers.state, node, c, k), base + hi - lo)",
                "tl.store(net_taken_from(peers.state, node, c, k), base)",
            ),
        ),
        part="views",
        hint=4,
    ),
    "placer: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_direct",
        (
            (
                "tl.store(moved_at, counts.to(tl.int64), mask=near)",
                "tl.store(moved_at, counts.to(tl.int64) * 0, mask=near)",
            ),
        ),
        part="views",
    ),
    "placer: table not written": Plant(
        "wrong row",
        "two_direct",
        (("                    tl.store(entries, at, mask=inside)\n", ""),),
        part="views",
    ),
    "placer: landings of the next channel": Plant(
        "wrong row",
        "two_direct",
        (
            (
                "local, number, q, c, k.plan_ranks",
                "local, number, q, (c + 1) % k.channels, k.plan_ranks",
            ),
        ),
        part="views channels",
    ),
    "placer: landings of the next rank": Plant(
        "wrong row",
        "two_direct",
        (("local, number, q, c, k.plan_ranks", "local, number, (q + 1) % P, c, k.plan_ranks"),),
        part="views",
    ),
    "direct: done before the rows": Plant(
        "flag before data", "two_direct", _WRITTEN_FIRST, part="views"
    ),
    "direct: a round's end forgets what is owed": Plant(
        "last chunk",
        "two_direct",
        (
            (
                "            publish(state, worker, c, TASKS, k)\n            step,",
                "            step,",
            ),
        ),
        part="views peers",
    ),
    "direct: workers without rows wait for nobody": Plant(
        "reused too early", "two_direct", (_UNASKED,), part="apart views", within=20
    ),
    # two_views.py
    "views: end not waited for": Plant(
        "flag before data",
        "two_views",
        (
            (
                "            wait_for_all(dones, want, near, state, ON_END, r, MORE=False)\n",
                "            pass\n",
            ),
        ),
        part="views",
    ),
    "views: workers of the last call": Plant(
        "wrong epoch", "two_views", (("(calls + 1) * programs", "calls * programs"),), part="views"
    ),
    "views: all workers but one": Plant(
        "last chunk",
        "two_views",
        (("(calls + 1) * programs", "(calls + 1) * programs - 1"),),
        part="views",
    ),
    "views: calls not counted": Plant(
        "wrong epoch",
        "two_views",
        (("DIRECT_CALLS, calls + 1)", "DIRECT_CALLS, calls)"),),
        part="views",
    ),
    "views: call counted before its end": Plant(
        "wrong epoch",
        "two_views",
        (
            ("        count_call(state)\n", ""),
            (
                "        dones = done_of(",
                "        count_call(state)\n        dones = done_of(",
            ),
        ),
        part="apart pulls",
        within=20,
    ),
    # two_letters.py
    "greeting: no barrier behind its look": Plant(
        "barrier",
        "two_letters",
        (
            (
                "k.channels), r < k.ranks)\n    tl.debug_barrier()\n",
                "k.channels), r < k.ranks)\n",
            ),
        ),
        part="views",
    ),
    "landings: without rows of earlier ranks": Plant(
        "wrong row",
        "two_letters",
        (("(tl.sum(earlier, axis=0)[:, None] + bounds)", "bounds"),),
        part="views",
    ),
    "landings: behind the source's own rows": Plant(
        "wrong row",
        "two_letters",
        (("mask=(s < source)[:, None]", "mask=(s <= source)[:, None]"),),
        part="views",
    ),
    "landings: in the channel before": Plant(
        "wrong row",
        "two_letters",
        (
            (
                "(tl.cumsum(rows, 0) - rows).to(tl.int64), mask=c < C)",
                "tl.cumsum(rows, 0).to(tl.int64), mask=c < C)",
            ),
        ),
        part="views channels",
    ),
    # two_pull.py
    "puller: rows of ranks that are not there": Plant(
        "flag before data",
        "two_pull",
        (("(room >= want) & ready", "(room >= want)"),),
        part="pulls",
    ),
    "pulling reducer: rows of ranks that are not there": Plant(
        "flag before data",
        "two_pull",
        (("        if (rows > 0) & ready:\n", "        if rows > 0:\n"),),
        part="pulls",
    ),
    "puller: no barrier behind its look": Plant(
        "barrier",
        "two_pull",
        (
            (
                "c, k)))\n        tl.debug_barrier()\n        if reports(",
                "c, k)))\n        if reports(",
            ),
        ),
        part="pulls peers",
    ),
    "pulling reducer: no barrier behind its look": Plant(
        "barrier",
        "two_pull",
        (("c, k)), far)\n    tl.debug_barrier()\n", "c, k)), far)\n"),),
        part="pulls",
    ),
    "puller: one slot too many": Plant(
        "credit before read",
        "two_pull",
        (("tl.maximum(i0 + n - net.slots, 0)", "tl.maximum(i0 + n - net.slots - 1, 0)"),),
        part="pulls",
        hint=2,
    ),
    "puller: put before its rows": Plant(
        "flag before data",
        "two_pull",
        ((_PUT, "                pass\n"), (_STORED, _PUT_EARLY + _STORED)),
        part="pulls",
    ),
    "puller: tail without its row, mapped": Plant(
        "flag before data",
        "two_pull",
        (
            (
                "owner) + tail, num, None",
                "owner) + tail, num + (i0 == 0), None",
            ),
        ),
        part="pulls peers",
    ),
    "puller: last row dropped": Plant(
        "last chunk",
        "two_pull",
        (("inside, row = j + b < n,", f"inside, row = {_LAST},"),),
        part="pulls",
    ),
    "puller: rows sent not counted": Plant(
        "wrong epoch",
        "two_pull",
        (
            (
                "tl.store(net_sent_to(state, node, c, k), base + hi - lo)",
                "tl.store(net_sent_to(state, node, c, k), base)",
            ),
        ),
        part="pulls",
    ),
    "puller: landings of the next channel": Plant(
        "wrong row",
        "two_pull",
        (
            (
                "number, q, channel, k.plan_ranks",
                "number, q, (channel + 1) % k.channels, k.plan_ranks",
            ),
        ),
        part="pulls channels",
    ),
    "pulling reducer: rows behind one's own": Plant(
        "wrong row",
        "two_pull",
        (("rows_at = starts + firsts.to(tl.int64) * ROW", "rows_at = starts"),),
        part="pulls",
    ),
    "pulling reducer: network rows not waited for": Plant(
        "flag before data",
        "two_pull",
        (
            (
                "ok = (lacking(found, bases + upto, far) == 0) & (turn.step == ON_TIME)",
                "ok = turn.step == ON_TIME",
            ),
        ),
        part="pulls",
    ),
    "pulling reducer: last row not awaited": Plant(
        "last chunk",
        "two_pull",
        (("tl.max(places - lows[None, :] + 1, axis=0)", "tl.max(places - lows[None, :], axis=0)"),),
        part="pulls",
    ),
    "pulling reducer: last token dropped": Plant(
        "last chunk",
        "two_pull",
        (("        here = t < share.end\n", "        here = t < share.end - 1\n"),),
        part="pulls",
    ),
    "pulling reducer: credit before read": Plant(
        "credit before read",
        "two_pull",
        (
            ("else owed + tl.where(far, taken - before, 0)", "else owed"),
            (_SUMS, _SUMS + _OWE_EARLY),
        ),
        part="pulls",
        within=20,
    ),
    "pulling reducer: credit before read, mapped": Plant(
        "credit before read",
        "two_pull",
        (("owed = taken - before if", "owed = owed * 0 if"), (_SUMS, _SUMS + _ADD_EARLY)),
        part="pulls peers",
        within=20,
    ),
    "pulling reducer: credits of an earlier turn forgotten": Plant(
        "last chunk",
        "two_pull",
        (("tl.store(owed_at, owed, mask=far)", "tl.store(owed_at, owed * 0, mask=far)"),),
        part="long pulls",
        within=20,
    ),
    "pulling reducer: rows of an earlier turn forgotten": Plant(
        "wrong epoch",
        "two_pull",
        (("tl.store(taken_at, taken, mask=far)", "tl.store(taken_at, taken * 0, mask=far)"),),
        part="pulls",
    ),
    "pulling reducer: rows taken not counted": Plant(
        "wrong epoch",
        "two_pull",
        (
            (
                "tl.store(taken_from, bases + taken, mask=far)",
                "tl.store(taken_from, bases, mask=far)",
            ),
        ),
        part="pulls",
    ),
    "pull: done before the reads": Plant(
        "credit before read", "two_pull", _DONE_FIRST, part="pulls"
    ),
    "pull: a round's end forgets what is owed": Plant(
        "last chunk",
        "two_pull",
        (
            (
                "            _publish(peers, worker, c, TASKS, k)\n            step,",
                "            step,",
            ),
        ),
        part="pulls peers",
    ),
    "pull: published twice": Plant(
        "flag before data",
        "two_pull",
        (("        tl.store(counts, tl.zeros_like(count), mask=count > 0)\n", ""),),
        part="pulls peers",
    ),
    "pull: what is owed is added without order": Plant(
        "release",
        "two_pull",
        (
            (
                "        add_release(words(tl.where(r < 0, tails, heads)), count, count > 0)\n",
                '        tl.atomic_add(words(tl.where(r < 0, tails, heads)), count, mask=count > 0, sem="relaxed", scope="sys")\n',
            ),
        ),
        part="pulls peers",
    ),
    "pull: credits of reducers forgotten": Plant(
        "last chunk",
        "two_pull",
        (("(worker == 0) & k.grid.mapped", "(worker < 0) & k.grid.mapped"),),
        part="long pulls peers",
    ),
}
"""By name."""
