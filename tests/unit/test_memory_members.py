"""Survivors wait for their GPUs, and map memory without a process group: what torch is told of
them. (That it maps it then takes GPUs: ``tests/gpu/test_recover_gpu.py``.)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tokenyard.engines.status import StatusMonitor
from tokenyard.errors import PeerTimeout
from tokenyard.memory.cuda import CudaMemory

MEMBERS = [0, 2, 5]


def memory_of(rank: int, store: dist.Store) -> Any:
    """Without a GPU."""
    memory: Any = object.__new__(CudaMemory)
    memory.rank, memory._members, memory._store = rank, MEMBERS, store
    memory._timeout, memory._mapped = 60.0, count()
    return memory


def test_torch_finds_ranks_and_store_of_members() -> None:
    """Each under a name of its own, as in processes; nothing stays registered."""
    store, names = dist.HashStore(), list[str]()

    def meet(local: torch.Tensor, name: str) -> tuple[int, int, list[bytes]]:
        group: Any = c10d._resolve_process_group(name)  # pyright: ignore
        names.append(name)
        theirs: Any = group.get_group_store()
        exchange = f"Exchange/{int(local)}"  # torch's number for it is the process's own
        theirs.set(f"{exchange}/{group.rank()}", f"part of {int(local)}")
        parts = [theirs.get(f"{exchange}/{place}") for place in range(group.size())]
        return group.rank(), group.size(), parts

    def member(rank: int) -> Any:
        return memory_of(rank, store)._rendezvous(meet, torch.tensor(rank))

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(member, MEMBERS))
    parts = [b"part of 0", b"part of 2", b"part of 5"]
    assert found == [(place, 3, parts) for place in range(3)]
    assert len(set(names)) == 3
    for name in names:
        with pytest.raises(RuntimeError, match="Could not resolve"):
            c10d._resolve_process_group(name)  # pyright: ignore


def test_a_torch_that_knows_groups_by_what_it_was_told() -> None:
    """Until 2.11 or so; another error is not taken for that."""
    names = list[str]()

    def meet(local: torch.Tensor, name: str) -> str:
        names.append(name)
        if len(names) == 1:
            raise RuntimeError(
                f"get_group_info: no group info associated with the group name {name}"
            )
        return "mapped"

    memory = memory_of(2, dist.HashStore())
    assert memory._rendezvous(meet, torch.tensor(0)) == "mapped"
    assert names[0] == names[1]
    with pytest.raises(RuntimeError):  # it was told: twice is refused
        torch._C._distributed_c10d._SymmetricMemory.set_group_info(names[0], 1, 3, dist.HashStore())  # pyright: ignore

    def fail(local: torch.Tensor, name: str) -> str:
        raise RuntimeError("the driver cannot")

    with pytest.raises(RuntimeError, match="the driver cannot"):
        memory._rendezvous(fail, torch.tensor(0))


def test_a_gpu_that_others_keep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """``recover()`` gives up within the timeout, says what may be, and can be called again."""
    monitor: Any = object.__new__(StatusMonitor)
    monitor._on_gpu, monitor._stop = True, lambda: None
    monitor._config = SimpleNamespace(rank=3, timeout=0.2)
    memory = SimpleNamespace(device=torch.device("cuda", 0), settle=lambda: None)
    monitor._workspace, idle = SimpleNamespace(memory=memory), Event()
    monkeypatch.setattr("torch.cuda.synchronize", lambda _: idle.wait(60))
    with pytest.raises(PeerTimeout, match=r"rank 3 waited 0.2 s in recover\(\) for its GPU.*abort"):
        monitor.drain()
    idle.set()
    monitor.drain()
