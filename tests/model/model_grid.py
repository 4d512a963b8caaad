"""All ranks of an object of engine twolevel, put together from the roles of
``model_twolevel.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from model_rings import Bug, Call, Flow, Kernels, Post, call_barrier, post, receive, share
from model_twolevel import (
    Far,
    chunks,
    combine_far,
    forward,
    reduce_both,
    send_far,
    send_near,
    wire,
    wire_of_tags,
)


class Grid:
    """The ranks, which make ``calls`` one behind the other.

    Args:
        grid: nodes, and ranks of each.
        cells, far_cells: of an inner ring, and of a network ring and its staging.
        channels: of all calls.
        barriers: whether they run.
        owners: only tokens of these ranks go out and come back; none: of all.
        mapped: writers store into network rings, and put only tags.
        bug: what is wrong.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        *,
        grid: tuple[int, int],
        cells: int,
        far_cells: int,
        channels: int = 1,
        barriers: bool = False,
        owners: Sequence[int] = (),
        mapped: bool = False,
        bug: str = "",
    ) -> None:
        self._nodes, self._locals, self._channels, self._bug = (
            range(grid[0]),
            range(grid[1]),
            range(channels),
            Bug(bug),
        )
        ranks, self._mapped = range(grid[0] * grid[1]), mapped
        self._kernels = Kernels(len(ranks))
        inner, far = (
            product(ranks, self._nodes, self._locals, self._channels),
            product(ranks, self._nodes, self._channels),
        )
        self._inner = {
            (x, m, w, c): self._kernels.ring(f"({m}, {w}, {c}) inside rank {x}", cells)
            for x, m, w, c in inner
        }
        self._far = {
            (x, m, c): (
                self._kernels.ring(f"({m}, {c}) of rank {x} and the network", far_cells),
                self._kernels.machine.memory(f"staging for ({m}, {c}) of rank {x}", far_cells),
                self._kernels.machine.counter(f"puts for ({m}, {c}) of rank {x}"),
            )
            for x, m, c in far
            if m != x // grid[1]
        }
        self._puts = dict.fromkeys(self._far, 0)
        self._begun = [0 for _ in ranks]
        for number, call in enumerate(calls):
            for owner, c in product(owners or ranks, self._channels):
                (self._combine if call.combine else self._dispatch)(number, call, owner, c)
            self._begun = [
                begun + len(tokens) for begun, tokens in zip(self._begun, call.routing, strict=True)
            ]
        if barriers:
            self._barriers(len(calls), ranks)
        self.machine = self._kernels.built()

    def _rank(self, node: int, local: int) -> int:
        return node * len(self._locals) + local

    def _rows(self, call: Call, owner: int, c: int, to: Sequence[int] = ()) -> list[int]:
        """Rows of tokens of ``owner`` in channel ``c``, those for any of the ranks ``to``; in token
        order.
        """
        tokens = call.routing[owner]
        mine = share(len(tokens), len(self._channels), c)
        return [
            1 + self._begun[owner] + t for t in mine if not to or set(to).intersection(tokens[t])
        ]

    def _near(self, call: Call, owner: int, c: int, at: tuple[int, int, int], to: int) -> Flow:
        """Rows of ``owner`` for rank ``to``, or back from it, through the inner ring ``at`` (rank,
        node, local rank).
        """
        return self._kernels.flow(self._inner[(*at, c)], self._rows(call, owner, c, [to]))

    def _far_flow(
        self, number: int, call: Call, at: tuple[int, int, int], rows: Sequence[int]
    ) -> Far:
        """Rows through the network ring ``at`` (rank, node, channel), and what carries them."""
        ring, staging, posted = self._far[at]
        flow = self._kernels.flow(ring, rows)
        if self._mapped:
            return Far(flow, flow, posted, 0)
        far = Far(flow, flow._replace(ring=ring._replace(cells=staging)), posted, self._puts[at])
        puts = len(chunks(rows, call.far_chunk, self._bug))
        self._puts[at] += puts
        writer = self._rank(at[1], at[0] % len(self._locals))
        for only in range(puts) if self._bug("no fence") else (None,):
            name = f"call {number} wire to {at[0]}, channel {at[2]}" + (
                "" if only is None else f", put {only}"
            )
            self._kernels.wire(writer, name, partial(wire, far, call, self._bug, only))
        return far

    def _dispatch(self, number: int, call: Call, owner: int, c: int) -> None:
        m, w = divmod(owner, len(self._locals))
        add, name, bug = partial(self._kernels.add, call=number), f"channel {c}", self._bug
        for n, q in product(self._nodes, self._locals):
            if n == m and q != w:
                to = self._rank(n, q)
                flow = self._near(call, owner, c, (to, m, w), to)
                add(
                    owner,
                    name=f"sender to {to}, {name}",
                    program=partial(send_near, flow, call, bug),
                )
                add(
                    to,
                    name=f"receiver of {owner}, {name}",
                    program=partial(receive, flow, call, bug),
                )
        for n in self._nodes:
            if n != m:
                via, to = self._rank(n, w), [self._rank(n, q) for q in self._locals]
                far = self._far_flow(number, call, (via, m, c), self._rows(call, owner, c, to))
                others = [x for x in to if x != via]
                near = [self._near(call, owner, c, (x, m, w), x) for x in others]
                add(
                    owner,
                    name=f"network sender to {via}, {name}",
                    program=partial(send_far, far, call, bug),
                )
                add(
                    via,
                    name=f"forwarder of {owner}, {name}",
                    program=partial(forward, far, near, call, bug),
                )
                for x, flow in zip(others, near, strict=True):
                    add(
                        x,
                        name=f"receiver of {owner}, {name}",
                        program=partial(receive, flow, call, bug),
                    )

    def _combine(self, number: int, call: Call, owner: int, c: int) -> None:
        m, v = divmod(owner, len(self._locals))
        add, name, bug = partial(self._kernels.add, call=number), f"channel {c}", self._bug
        beside: list[Flow] = []
        back: list[Far] = []
        for n in self._nodes:
            at = self._rank(n, v)
            flows = [
                self._near(call, owner, c, (at, m, w), self._rank(n, w))
                for w in self._locals
                if w != v
            ]
            for w, flow in zip((w for w in self._locals if w != v), flows, strict=True):
                program = partial(send_near, flow, call, bug)
                add(self._rank(n, w), name=f"sender for {owner} to {at}, {name}", program=program)
            if n == m:
                beside = flows
                continue
            rows = self._rows(call, owner, c, [self._rank(n, w) for w in self._locals])
            far = self._far_flow(number, call, (owner, n, c), rows)
            add(
                at,
                name=f"combiner for {owner}, {name}",
                program=partial(combine_far, far, flows, call, bug),
            )
            back.append(far)
        program = partial(reduce_both, beside, back, self._rows(call, owner, c), call, bug)
        add(owner, name=f"reducer, {name}", program=program)

    def _barriers(self, calls: int, ranks: range) -> None:
        machine = self._kernels.machine
        to: dict[int, list[Post]] = {rank: [] for rank in ranks}
        of: dict[int, list[Post]] = {rank: [] for rank in ranks}
        for a, b in product(ranks, ranks):
            if a == b:
                continue
            sent = arrived = post(machine, f"of {a} to {b}")
            if a // len(self._locals) != b // len(self._locals):
                sent = post(machine, f"of {a} to be put to {b}")
                self._kernels.wire(
                    a,
                    f"wire of tags to {b}",
                    partial(wire_of_tags, calls, sent, arrived, self._bug),
                )
            to[a].append(sent)
            of[b].append(arrived)
        for call, rank in product(range(calls), ranks):
            self._kernels.add(
                rank, call, "barrier", partial(call_barrier, call, to[rank], of[rank], self._bug)
            )
