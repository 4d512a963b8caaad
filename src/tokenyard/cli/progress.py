"""Work that ranks do for a command, and how far they are."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from tokenyard import launch

T = TypeVar("T")
BEGIN = time.monotonic()


def say(text: str) -> None:
    """Print a line on stderr, once for all ranks, behind the seconds since the command began."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        with suppress(OSError):  # nobody reads it any more: no reason to stop
            print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", file=sys.stderr, flush=True)


def on_all_ranks(run: Callable[..., T], ranks: int, device: str, *arguments: object) -> T:
    """What rank 0 returns of ``run(device, *arguments)``: on a launcher's ranks, else our own."""
    if not launch.under_torchrun():
        say(f"starting {ranks} ranks")
        return launch.spawn(run, ranks, *arguments, device=device)[0]
    with launch.joined_by_launcher(device) as here:
        return run(here, *arguments)
