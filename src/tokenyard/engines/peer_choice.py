"""Which engine with rings an object gets, and how its work is cut into programs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tokenyard.config import Config
from tokenyard.engines.budget import receive_bytes, shares_tasks
from tokenyard.engines.nvlink import NvlinkEngine
from tokenyard.engines.rings import Tuning, nvlink_tuning
from tokenyard.engines.twolevel import TaskedNvlinkEngine, TwolevelEngine
from tokenyard.engines.twolevel_workspace import most_channels, twolevel_tuning
from tokenyard.topology import Topology


class PeerChoice(NamedTuple):
    """A class of engine, and what it is made with."""

    engine: type[NvlinkEngine]
    config: Config
    tuning: Tuning
    buffer_bytes: int
    receive_bytes: int


def choose_nvlink(config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool) -> PeerChoice:
    """Engine nvlink with ``num_sms`` multiprocessors, ``all_sms`` or fewer than there are."""
    ranks, received = config.world_size, receive_bytes(buffer_bytes, config, all_sms=all_sms)
    # ranks that are gone are played for kernels of NvlinkEngine only (``kernels/stand_in.py``)
    if config.absent or not shares_tasks(num_sms, ranks, all_sms=all_sms):
        tuning = nvlink_tuning(num_sms, ranks, all_sms=all_sms)
        return PeerChoice(NvlinkEngine, config, tuning, buffer_bytes, received)
    config = dataclasses.replace(config, topology=Topology(1, ranks))
    tuning = _tuning(config, num_sms, buffer_bytes, all_sms=all_sms)
    return PeerChoice(TaskedNvlinkEngine, config, tuning, buffer_bytes, received)


def choose_twolevel(
    config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool
) -> PeerChoice:
    """The same of engine twolevel; ``config.topology`` is its grid."""
    tuning = _tuning(config, num_sms, buffer_bytes, all_sms=all_sms)
    return PeerChoice(TwolevelEngine, config, tuning, buffer_bytes, 0)


def _tuning(config: Config, num_sms: int, buffer_bytes: int, *, all_sms: bool) -> Tuning:
    """Of programs that share tasks."""
    grid = config.topology
    assert grid is not None
    channels = most_channels(grid, 2 * config.hidden, buffer_bytes)
    return twolevel_tuning(num_sms, grid, all_sms=all_sms, channels=channels)
