"""The store that torch's symmetric memory gets, over processes of different age. What torch does in
C++ (``StoreExchange``, of torch 2.11 and of 2.13) is played here: mapping itself takes GPUs
(``tests/gpu/test_admit_gpu.py``).
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

import tokenyard as ty
from recovering import store_of_test
from tokenyard.memory.cuda import RendezvousStore
from tokenyard.testing import Ranks, distributed_test

MEMBERS = [0, 4, 5]


class StoreExchange:
    """Numbered per process. ``store``: one of C++, which calls ours as torch does."""

    def __init__(self, made: int) -> None:
        self.number = made

    def keys(self, size: int) -> list[str]:
        self.number += 1
        return [f"CUDASymmetricMemory/{self.number - 1}/{place}" for place in range(size)]

    def gather(self, store: dist.Store, place: int, size: int, value: str) -> list[bytes]:
        keys = self.keys(size)
        store.set(keys[place], value)
        return store.multi_get(keys)

    def gather_before(self, store: dist.Store, place: int, size: int, value: str) -> list[bytes]:
        """As torch 2.11 does."""
        keys, values = self.keys(size), [value.encode()] * size
        store.set(keys[place], value)
        for peer in range(size):
            if peer != place:
                store.wait([keys[peer]])
                values[peer] = store.get(keys[peer])
        return values

    def barrier(self, store: dist.Store, size: int) -> None:
        store.barrier(self.keys(1)[0].removesuffix("/0"), size)


def in_cpp(ranks: Ranks, part: str, members: list[int], timeout: float) -> dist.Store:
    """Ours, as C++ sees it. (It calls a Python object that must live.)"""
    mine = dist.PrefixStore(part, store_of_test(ranks))
    store = RendezvousStore(mine, MEMBERS[ranks.rank], members, timeout)
    _ALIVE.append(store)
    return dist.PrefixStore("torch", store)


_ALIVE: list[dist.Store] = []


@distributed_test(world_size=3)
def test_processes_of_different_age_meet(ranks: Ranks) -> None:
    """And would not in a plain store. Again and again, all and a part of them."""
    exchange, place = StoreExchange(made=(0, 41, 7)[ranks.rank]), ranks.rank
    plain = dist.PrefixStore("plain", store_of_test(ranks))
    keys = exchange.keys(3)
    plain.set(keys[place], "here")
    with pytest.raises(dist.DistStoreError):
        plain.wait(keys, timedelta(milliseconds=300))
    for number in range(3):
        store = in_cpp(ranks, f"all/{number}", MEMBERS, 600.0)
        for gather in (exchange.gather, exchange.gather_before, exchange.gather):
            want = [f"{number} of {peer}".encode() for peer in range(3)]
            assert gather(store, place, 3, f"{number} of {place}") == want
        exchange.barrier(store, 3)
        if place != 1:
            store = in_cpp(ranks, f"some/{number}", [0, 5], 600.0)
            assert exchange.gather(store, place // 2, 2, str(place)) == [b"0", b"2"]
            exchange.barrier(store, 2)


@distributed_test(world_size=3)
def test_a_rank_that_does_not_come_is_named(ranks: Ranks) -> None:
    """By what C++ hands on; a barrier does not know who."""
    exchange = StoreExchange(made=10 * ranks.rank)
    if ranks.rank != 1:
        with pytest.raises(ty.PeerTimeout, match=r"rank \d waited 0.3 s for rank 4 to map") as lost:
            exchange.gather(in_cpp(ranks, "a", MEMBERS, 0.3), ranks.rank, 3, "here")
        assert lost.value.rank == 4
        with pytest.raises(ty.PeerTimeout, match="for all ranks to map") as lost:
            exchange.barrier(in_cpp(ranks, "b", MEMBERS, 0.3), 3)
        assert lost.value.rank == -1
