"""A process that takes the place of a rank that is gone (``newcomer PORT RANK AT WORLD_SIZE``): it
makes good calls with the others, then kills itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import tokenyard as ty
from recovering import die, ten_good_calls
from tokenyard.testing import Ranks


def main(port: str, rank: str, at: str, world_size: str) -> None:
    """Join, make good calls, die."""
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    ep = ty.ExpertParallel.join(store, int(rank), at, timeout=600.0)
    me = Ranks(int(rank), int(world_size), torch.device("cpu"), "collective", None)
    assert ep.epoch == 2 and ep.world_size == int(world_size)
    ten_good_calls(me, ep, ())
    ep.warmup()
    die()


if __name__ == "__main__":
    main(*sys.argv[1:])
