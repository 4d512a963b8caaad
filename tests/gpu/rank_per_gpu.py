"""Runs a program's part on a process per GPU, over NCCL."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing


def on_each_gpu(report: Callable[[int], None], sizes: list[int]) -> None:
    """``report`` of each of the ``sizes``, on all ranks. It must be found by name in its module."""
    ranks = torch.cuda.device_count()
    store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_run_rank, (store.port, ranks, report, sizes), ranks)


def _run_rank(
    rank: int, port: int, ranks: int, report: Callable[[int], None], sizes: list[int]
) -> None:
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks)
    try:
        for tokens in sizes:
            report(tokens)
    finally:
        dist.destroy_process_group()
