"""Ranks of test programs, seeds, and what a machine has: DeepEP's ``deep_ep.utils.envs``."""

from __future__ import annotations

import os
import random
import re
import subprocess
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenyard.launch import LOOPBACK, backend_for

CARDS = Path("/sys/class/infiniband")
"""Where Linux tells of network cards with remote memory access."""
_state = {"local rank": 0, "local": 0, "global": 0}


def init_seed(global_seed: int) -> None:
    """Seed torch and ``random`` with ``global_seed`` plus this rank."""
    _state.update({"global": global_seed, "local": global_seed + dist.get_rank()})
    torch.manual_seed(_state["local"])
    random.seed(_state["local"])


def get_local_seed() -> int:
    """The seed of this rank."""
    return _state["local"]


def get_global_seed() -> int:
    """The seed of all ranks."""
    return _state["global"]


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on the first of each host; then a barrier."""
    if not once_in_node or _state["local rank"] == 0:
        print(s, flush=True)
    dist.barrier()


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Join the ranks of a test program that starts them itself: ``MASTER_ADDR``, ``MASTER_PORT``,
    and ``RANK`` and ``WORLD_SIZE`` counted in hosts. Returns rank, number of ranks, a group of all.

    With GPUs over NCCL where each rank has one, else over gloo; CUDA is then the default device.
    Without, over gloo on the CPU. The default dtype is BF16, as in DeepEP.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    node, nodes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    address, port = os.environ.get("MASTER_ADDR", LOOPBACK), os.environ.get("MASTER_PORT", "8361")
    _state["local rank"] = local_rank
    if device == "cuda":
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    size = nodes * num_local_ranks
    dist.init_process_group(
        backend_for(device, num_local_ranks),
        init_method=f"tcp://{address}:{port}",
        world_size=size,
        rank=node * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    init_seed(seed)
    group: Any = dist.new_group(list(range(size)))
    return dist.get_rank(), size, group


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Nothing: no engine needs NVLink. ``tokenyard doctor`` tells which GPUs reach each other."""


def check_torch_deterministic() -> None:
    """Nothing: ``fill_uninitialized_memory``, which DeepEP refuses, does no harm in one stream."""


def get_sm_read_gbs() -> float:
    """What DeepEP takes a multiprocessor of a H200 to read, GB/s."""
    return 180


def get_sm_write_gbs() -> float:
    """What DeepEP takes a multiprocessor of a H200 to write, GB/s."""
    return 45


@lru_cache
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """``factor`` times the rates of the first GPU's links, GB/s; 0 if nvidia-smi tells none."""
    command = "nvidia-smi nvlink -s -i 0"
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError:
        return 0
    return factor * sum(map(float, re.findall(r"Link \d+: ([\d.]+) GB/s", done.stdout)))


def _nic(name: str, fact: str) -> str:
    """What Linux says of a network card; empty if there is none."""
    file = CARDS / (name or os.environ.get("EP_NIC_NAME", "mlx5_0")) / fact
    with suppress(OSError):
        return file.read_text().strip()
    return ""


def check_fast_rdma_atomic_support(nic_name: str = "") -> bool:
    """Whether a network card (default: ``EP_NIC_NAME``) is of the kind with fast remote atomics."""
    return _nic(nic_name, "hca_type") == "MT4131"


def get_rdma_gbs(nic_name: str = "") -> float:
    """Rate of a network card (default: ``EP_NIC_NAME``), GB/s; 0 if there is none."""
    rate = _nic(nic_name, "ports/1/rate")
    return float(rate.split()[0]) / 8 if rate else 0
