"""Which engine with rings an object gets, and how its work is cut into programs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tokenyard.config import Config
from tokenyard.engines.budget import shares_tasks, split_budget
from tokenyard.engines.nvlink import NvlinkEngine
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES, Tuning, nvlink_tuning
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


def choose_nvlink(
    config: Config, num_sms: int, buffer_bytes: int | None, *, all_sms: bool
) -> PeerChoice:
    """Engine nvlink with ``num_sms`` multiprocessors, ``all_sms`` or fewer than there are."""
    ranks = config.world_size
    budget = split_budget(buffer_bytes, config, all_sms=all_sms)
    # ranks that are gone are played for kernels of NvlinkEngine only (``kernels/stand_in.py``)
    if config.absent or not shares_tasks(num_sms, ranks, all_sms=all_sms):
        return PeerChoice(
            NvlinkEngine, config, nvlink_tuning(num_sms, ranks, all_sms=all_sms), *budget
        )
    config = dataclasses.replace(config, topology=Topology(1, ranks))
    return _on_grid(TaskedNvlinkEngine, config, num_sms, budget, all_sms=all_sms)


def choose_twolevel(
    config: Config, num_sms: int, buffer_bytes: int | None, *, all_sms: bool
) -> PeerChoice:
    """The same of engine twolevel; ``config.topology`` is its grid."""
    budget = DEFAULT_BUFFER_BYTES if buffer_bytes is None else buffer_bytes, 0
    return _on_grid(TwolevelEngine, config, num_sms, budget, all_sms=all_sms)


def _on_grid(
    engine: type[TwolevelEngine],
    config: Config,
    num_sms: int,
    budget: tuple[int, int],
    *,
    all_sms: bool,
) -> PeerChoice:
    grid = config.topology
    assert grid is not None
    channels = most_channels(grid, 2 * config.hidden, budget[0])
    tuning = twolevel_tuning(num_sms, grid, all_sms=all_sms, channels=channels)
    return PeerChoice(engine, config, tuning, *budget)
