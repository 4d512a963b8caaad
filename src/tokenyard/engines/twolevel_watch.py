"""What a kernel of the two-level engine gave up on: which role waited at which ring, and
for whom.
"""

from __future__ import annotations

from typing import cast

from tokenyard.engines.status import StatusMonitor
from tokenyard.engines.twolevel_ground import TwoGround
from tokenyard.header import COMBINE
from tokenyard.kernels import sync, two_region

_ROOMS, _PARTS = cast("int", two_region.ON_ROOMS.value), cast("int", two_region.ON_PARTS.value)


class TwoWatch(StatusMonitor):
    """Rings inside are named after the source or owner of their rows
    (``docs/reference/twolevel.md``), network rings after the node.
    """

    _ground: TwoGround

    def _named(self, phase: int, peer: int, counter: int) -> tuple[int, str, str]:
        grid, me = self._ground.grid, self._config.rank
        home, local, channels = grid.node_of(me), grid.local_of(me), self._ground.shape.channels
        combines = self._now.op == COMBINE

        def inner(index: int) -> tuple[int, str]:
            """Who is at the other end of an inner ring, and whose rows it takes if they are
            another's.
            """
            other = grid.rank_at(home, grid.local_of(index))
            return other, "" if other == index else f" of rank {index}"

        if phase == two_region.ON_BOTH.value:  # a reducer: ranks of its node, then nodes
            if peer >= grid.world_size:
                node = peer - grid.world_size
                return (
                    grid.rank_at(node, local),
                    "its node's sums",
                    f"network tails[{node}, {counter}] (reducer)",
                )
            return peer, "its rows", f"tails[{peer}, {counter}] (reducer)"
        if phase == two_region.ON_NET_ROWS.value:
            return (
                grid.rank_at(peer, local),
                "its rows",
                f"network tails[{peer}, {counter}] (forwarder)",
            )
        if phase == two_region.ON_NET_ROOM.value:
            role = "combiner" if combines else "network sender"
            return (
                grid.rank_at(peer, local),
                "room for rows",
                f"network heads[{peer}, {counter}] ({role})",
            )
        if phase in (_ROOMS, _PARTS):  # peer: of my node; counter: which node's ring
            node, channel = divmod(counter, channels)
            ring, other = grid.rank_at(node, peer), grid.rank_at(home, peer)
            if phase == _ROOMS:
                return other, "room for rows", f"heads[{ring}, {channel}] (forwarder)"
            return other, "its rows", f"tails[{ring}, {channel}] (combiner)"
        if phase in (sync.ON_ROWS.value, sync.ON_ROOM.value):
            other, whose = inner(peer)
            if phase == sync.ON_ROWS.value:
                return other, f"rows{whose}", f"tails[{peer}, {counter}] (receiver)"
            return other, f"room for rows{whose}", f"heads[{peer}, {counter}] (sender)"
        return super()._named(phase, peer, counter)
