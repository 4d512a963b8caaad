"""What is asked of an engine, and the engine that was chosen for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tokenyard.config import Config
from tokenyard.engines.base import Engine
from tokenyard.engines.known import AUTO
from tokenyard.stats import Stats


class Request(NamedTuple):
    """What the caller wants; the same on every rank except ``device``."""

    engine: str = AUTO
    device: torch.device | None = None
    buffer_bytes: int | None = None
    num_sms: int | None = None
    spare_sms: int | None = None
    once_per_node: bool | None = None
    no_grid: str = ""  # why ranks form no grid; empty if they do (``Config.topology``)

    def sms(self, most_sms: int) -> tuple[int, bool]:
        """Multiprocessors for calls, and whether they are all but the spared, half at most."""
        room = most_sms - min(self.spare_sms or 0, most_sms // 2)
        num_sms = min(self.num_sms or room, room)
        return num_sms, num_sms == room


class Choice(NamedTuple):
    """An engine still to be made, its device (None: host and CUDA tensors alike), and why.

    ``again``: the same among the members of another epoch (``Config.absent``), which meet in the
    epoch's store; None if the engine cannot go on without a rank. Collective. ``request``: for
    which; of a smallest GPU with ``most_sms`` multiprocessors.
    """

    make: Callable[[Stats], Engine]
    device: torch.device | None
    why: str
    again: Callable[[Config, dist.Store], Choice] | None = None
    request: Request = Request()
    most_sms: int = 0

    def terms(self) -> dict[str, Any]:
        """What a process that joins has to know of it, as JSON can hold it."""
        return {"request": self.request._replace(device=None)._asdict(), "most_sms": self.most_sms}
