"""What engines with rings are made with."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tokenyard.config import Config
from tokenyard.engines.budget import heap_bytes, receive_bytes
from tokenyard.engines.tuning import Tuning, most_channels, peer_tuning, too_many
from tokenyard.engines.twolevel import NvlinkEngine, TwolevelEngine
from tokenyard.errors import NotSupported
from tokenyard.topology import Topology


class PeerChoice(NamedTuple):
    """A class of engine, and what it is made with."""

    engine: type[TwolevelEngine]
    config: Config
    tuning: Tuning
    receive_bytes: int
    heap_bytes: int


def choose_peer(
    config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool, nodes: bool
) -> PeerChoice:
    """The engine with ``num_sms`` multiprocessors, ``all_sms`` or fewer than there are.

    ``nodes``: engine twolevel, on the grid of ``config.topology``; else nvlink, for which all ranks
    are one node.
    """
    if not nodes:
        if why := too_many(config.world_size):
            raise NotSupported(why)
        config = dataclasses.replace(config, topology=Topology(1, config.world_size))
    grid = config.topology
    assert grid is not None
    channels = most_channels(grid, 2 * config.hidden, buffer_bytes)
    tuning = peer_tuning(num_sms, grid, all_sms=all_sms, channels=channels)
    if nodes:
        return PeerChoice(TwolevelEngine, config, tuning, 0, 0)
    received = receive_bytes(buffer_bytes, config)
    heap = heap_bytes(buffer_bytes, config, all_sms=all_sms)
    return PeerChoice(NvlinkEngine, config, tuning, received, heap)
