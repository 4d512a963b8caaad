"""A process that takes the place of a rank that is gone (``newcomer PORT RANK AT WORLD_SIZE
[EPOCH [DEVICE]]``): it makes good calls with the others, then kills itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import tokenyard as ty
from recovering import die, ten_good_calls
from tokenyard.testing import Ranks


def main(
    port: str, rank: str, at: str, world_size: str, epoch: str = "2", device: str = "cpu"
) -> None:
    """Join, make good calls, die. On a GPU that is warm before it tells the others."""
    here = torch.device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
        torch.zeros(1, device=here)
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
    store.set(f"newcomer/{at}", "is here")
    ep = ty.ExpertParallel.join(store, int(rank), at, device=here, timeout=600.0)
    me = Ranks(int(rank), int(world_size), here, ep.engine, None)
    assert ep.epoch == int(epoch) and ep.world_size == int(world_size)
    ten_good_calls(me, ep, ())
    ep.warmup()
    die()


if __name__ == "__main__":
    main(*sys.argv[1:])
