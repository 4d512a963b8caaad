"""Engine nvlink on ranks that are processes over shared memory, as its programs are: ``python
memory_nvlink.py`` prints outcomes.

Nothing is simulated but the kernels' language: programs run at the same time, and memory is as weak
as the host's is. A program of its own for the reasons of ``memory_ranks.py``, and with the same
JSON. Tests in ``test_memory_nvlink.py``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
import torch._dynamo  # a second, here instead of in every rank
import torch.distributed as dist

import tokenyard as ty
from cases import Case, check_combined, check_received, dispatch, rows_to_combine
from memory_ranks import run
from shared_memory import SharedMemory
from tokenyard.launch import local_store
from tokenyard.testing import Ranks
from tokenyard.testing.interpreter import patched_language

PATIENCE = 1000.0
"""Seconds that a rank waits where nobody dies: a busy machine must not look like it."""
TIMEOUT = 15.0
SMALL = {"num_tokens": 6, "num_topk": 2, "num_experts": 4}


class SharedGroup:
    """Ranks of one object as ``ExpertParallel`` takes them
    (``tokenyard.memory.symmetric.MemoryGroup``).
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def rank(self) -> int:
        return self._memory.rank

    def size(self) -> int:
        return self._memory.world_size

    def open_store(self) -> dist.Store:
        return dist.PrefixStore("object", self._memory._meeting._store)

    def open_memory(self, timeout: float, members: Any = None) -> SharedMemory:
        return self._memory


def ranks_of(memory: SharedMemory) -> Ranks:
    return Ranks(memory.rank, memory.world_size, memory.device, "nvlink", SharedGroup(memory))


def flat_there_and_back_in_place_too(memory: SharedMemory) -> object:
    """Fresh, back, cached into a view, and back out of views."""
    ranks, case = ranks_of(memory), Case(memory.world_size, hidden=24, **SMALL)
    want = case.combined(ranks.rank).x
    with case.make(ranks, timeout=PATIENCE, buffer_bytes=1 << 16) as ep:
        check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
        rows = rows_to_combine(recv, case, ranks.rank)
        check_combined(ep.combine(rows, recv.handle), case, ranks.rank, want)
        view = ep.dispatch(case.x[ranks.rank], handle=recv.handle, in_place=True).x
        assert torch.equal(view, case.expected[ranks.rank].x)
        check_combined(
            ep.combine(view.copy_(rows), recv.handle, in_place=True), case, ranks.rank, want
        )
        ep.check()
    return "fine"


def cast_rows_by_expert_of_static_shapes(memory: SharedMemory) -> object:
    """Cast in the send, merged by the plan, weighted on the way back."""
    layout, mode = ty.Layout.EXPERT_MAJOR, ty.Quantize.FP8
    case = Case(
        memory.world_size,
        hidden=132,
        layout=layout,
        exact=False,
        quantize=mode,
        expert_alignment=2,
        **SMALL,
    )
    ranks = ranks_of(memory)
    with case.make(ranks, timeout=PATIENCE, buffer_bytes=1 << 16) as ep:
        check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
        got = ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle, weighted=True)
        check_combined(got, case, ranks.rank, case.combined(ranks.rank, weighted=True).x)
        ep.check()
    return "fine"


def a_rank_dies_before_its_combine(memory: SharedMemory) -> object:
    """What the survivor is told."""
    ranks, case = ranks_of(memory), Case(memory.world_size, hidden=24, **SMALL)
    ep = case.make(ranks, timeout=TIMEOUT, buffer_bytes=1 << 16)
    check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ep.combine(rows_to_combine(recv, case, ranks.rank), recv.handle)
        ep.check()
    except ty.PeerTimeout as error:
        return [str(error), error.rank]
    return "not told"


def results_outlive_their_object(_: SharedMemory) -> object:
    """Rows in place are read once object, memory and garbage are gone: by whether the object was
    closed, what came of it.
    """
    case, found = Case(1, hidden=1024, **SMALL), {}
    for end in ("dropped", "closed"):
        x, memory = rows_left_in_place(case, end == "closed")
        gc.collect()
        assert memory() is None
        try:
            found[end] = "fine" if torch.equal(x, case.expected[0].x) else "other rows"
        except RuntimeError as error:  # a torch that can forbid it, does
            found[end] = f"RuntimeError: {error}"
    return found


def rows_left_in_place(case: Case, close: bool) -> tuple[torch.Tensor, weakref.ref[SharedMemory]]:
    """What a dispatch of an object that goes right away has left in memory of its own, and whether
    that is still there.
    """
    memory = SharedMemory(dist.HashStore(), 0, 1, PATIENCE, patched_language)
    ep = case.make(ranks_of(memory), timeout=PATIENCE, buffer_bytes=1 << 18)
    x = dispatch(ranks_of(memory), ep, case, in_place=True).x
    memory.settle()
    if close:
        ep.close()
    return x, weakref.ref(memory)


SCENARIOS: dict[str, tuple[int, Callable[[SharedMemory], object]]] = {
    "flat_there_and_back_in_place_too": (2, flat_there_and_back_in_place_too),
    "cast_rows_by_expert_of_static_shapes": (2, cast_rows_by_expert_of_static_shapes),
    "a_rank_dies_before_its_combine": (2, a_rank_dies_before_its_combine),
    "results_outlive_their_object": (1, results_outlive_their_object),
}

if __name__ == "__main__":
    store = local_store()
    outcomes = {}
    for name in sys.argv[1:] or SCENARIOS:
        started = time.monotonic()
        outcomes[name] = run(name, *SCENARIOS[name], store.port, PATIENCE)
        print(f"{name}: {time.monotonic() - started:.2f} s", file=sys.stderr)
    print(json.dumps(outcomes))
