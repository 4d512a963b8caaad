"""Ranks as forked processes over shared memory: ``python memory_ranks.py`` runs every scenario and
prints outcomes as JSON.

A program of its own because Triton decides at import whether kernels are interpreted.
``test_memory_shared.py`` reads what it prints: ``{scenario: {"ranks": {rank: value or error},
"left": [names]}}``.
"""

from __future__ import annotations

import glob
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist

import shared_memory
from memory_calls import launch
from memory_kernels import (
    REGION_BYTES,
    count_up,
    double,
    everybody,
    fail,
    fail_beside_waiting,
    widths,
)
from shared_memory import SharedMemory
from tokenyard.kernels.sync import (
    COUNTER,
    EXPECTED,
    GIVEN_UP,
    PEER,
    PHASE,
    RANK,
    SEEN,
    STATE_WORDS,
    STATUS,
    STATUS_WORDS,
    TIMEOUT_NS,
)
from tokenyard.launch import LOOPBACK, local_store
from tokenyard.testing.interpreter import patched_language

shared_memory.PREFIX = f"tokenyard-test-{os.getpid()}-"
TIMEOUT = 1.0
SCENARIOS: dict[str, tuple[int, Callable[[SharedMemory], object]]] = {}


def state_of(memory: SharedMemory) -> tuple[torch.Tensor, torch.Tensor]:
    state, status = memory.host_words(STATE_WORDS), memory.host_words(STATUS_WORDS)
    state[RANK.value], state[TIMEOUT_NS.value], state[STATUS.value] = (
        memory.rank,
        int(TIMEOUT * 1e9),
        status.data_ptr(),
    )
    return state, status


def scenario(
    world_size: int,
) -> Callable[[Callable[[SharedMemory], object]], Callable[[SharedMemory], object]]:
    def add(body: Callable[[SharedMemory], object]) -> Callable[[SharedMemory], object]:
        SCENARIOS[body.__name__] = world_size, body
        return body

    return add


@scenario(3)
def programs_wait_for_each_other(memory: SharedMemory) -> object:
    """Three epochs and a launch that uses their result, queued without waiting between."""
    R, W = memory.world_size, 4  # noqa: N806
    region = memory.allocate(REGION_BYTES)
    clean = not region.local.any().item()
    state, status = state_of(memory)
    out = memory.empty(5, W, dtype=torch.int64)
    for epoch in (1, 2, 3):
        arguments = (region.addresses.data_ptr(), state.data_ptr(), out.data_ptr(), epoch)
        launch(memory, everybody, 2, *arguments, num_warps=4, R=R, W=W)
    launch(memory, double, 1, out.data_ptr(), W - 1, 3, num_warps=4, W=W)
    came = memory.wait_until(lambda: int(out[4, 0]) > 0, 10)
    memory.settle()
    return [clean, came, out.tolist(), status.tolist()[0], int(state[GIVEN_UP.value])]


@scenario(1)
def integers_are_int64(memory: SharedMemory) -> object:
    out = memory.empty(2, dtype=torch.int64)
    launch(memory, widths, 1, out.data_ptr(), 1, 1 << 50, num_warps=4)
    memory.settle()
    return out.tolist()


@scenario(2)
def atomics_are_atomic(memory: SharedMemory) -> object:
    region = memory.allocate(16)
    launch(memory, count_up, 2, int(region.addresses[0]), 200, num_warps=4, W=16)
    memory.settle()
    memory._meeting.exchange("the end")
    return int(region.local.view(torch.int64)[0])


@scenario(3)
def a_rank_dies_before_its_launch(memory: SharedMemory) -> object:
    region = memory.allocate(REGION_BYTES)
    state, status = state_of(memory)
    out = memory.empty(4, 4, dtype=torch.int64)
    if memory.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    launch(
        memory,
        everybody,
        2,
        region.addresses.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        1,
        num_warps=4,
        R=3,
        W=4,
    )
    memory.settle()
    found = status.tolist()
    return [
        found[0],
        {"phase": found[PHASE], "peer": found[PEER], "counter": found[COUNTER]},
        found[EXPECTED],
        found[SEEN],
    ]


@scenario(2)
def a_rank_dies_before_allocating(memory: SharedMemory) -> object:
    if memory.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    memory.allocate(REGION_BYTES)
    return "allocated"


@scenario(2)
def a_rank_dies_with_the_name_in_hand(memory: SharedMemory) -> object:
    """Rank 0 makes the file and dies: nobody but rank 1 can remove the name."""
    if memory.rank == 0:
        make = shared_memory._make

        def make_and_die(path: str, num_bytes: int) -> None:
            make(path, num_bytes)
            assert glob.glob(f"/dev/shm/{shared_memory.PREFIX}*") or not os.path.exists("/dev/shm")
            os.kill(os.getpid(), signal.SIGKILL)

        shared_memory._make = make_and_die
    memory.allocate(REGION_BYTES)
    return "allocated"


@scenario(2)
def a_late_rank_is_told(memory: SharedMemory) -> object:
    if memory.rank == 1:
        time.sleep(2 * TIMEOUT)
    memory.allocate(REGION_BYTES)
    return "allocated"


@scenario(2)
def sizes_differ(memory: SharedMemory) -> object:
    memory.allocate(REGION_BYTES + 16 * memory.rank)
    return "allocated"


@scenario(1)
def sizes_are_odd(memory: SharedMemory) -> object:
    memory.allocate(1000)
    return "allocated"


@scenario(2)
def memory_is_short(memory: SharedMemory) -> object:
    def full(path: str, num_bytes: int) -> None:
        open(path, "x").close()
        raise OSError(28, "No space left on device")

    shared_memory._make = full
    memory.allocate(REGION_BYTES)
    return "allocated"


@scenario(1)
def a_program_is_killed(memory: SharedMemory) -> object:
    launch(memory, fail, 3, 8, 2, num_warps=4)
    memory.settle()
    return "settled"


@scenario(1)
def a_program_is_killed_beside_others(memory: SharedMemory) -> object:
    """Those of its launch, and those queued behind it, do not outlive it."""
    never = memory.host_words(1)
    launch(memory, fail_beside_waiting, 3, 8, never.data_ptr(), num_warps=4)

    def running() -> list[int]:
        return [pid for each in memory._programs._launches for pid in each.pids]

    started = running()
    try:
        # On a busy machine the first may have failed by now.
        launch(memory, fail, 2, 8, -1, num_warps=4)
        started = running()
        memory.settle()
    except RuntimeError as error:
        alive = [pid for pid in started if os.path.exists(f"/proc/{pid}")]
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return [len(alive), str(error)]
    return "settled"


@scenario(1)
def a_program_raises(memory: SharedMemory) -> object:
    launch(memory, fail, 1, 8, -1, num_warps=4)
    memory.wait_until(lambda: False, 20)
    return "waited"


@scenario(1)
def tensors_outlive_the_object(memory: SharedMemory) -> object:
    region = memory.allocate(64)
    launch(memory, double, 1, int(region.addresses[0]), 4, 0, num_warps=4, W=4)
    memory.close()
    memory.close()
    return [int(region.local.sum()), list(memory.empty(0, 3, dtype=torch.int8).shape)]


def run(
    name: str,
    world_size: int,
    body: Callable[[SharedMemory], object],
    port: int,
    timeout: float = TIMEOUT,
) -> dict[str, object]:
    """Fork the ranks of a scenario and collect what they return or raise; a rank that was killed
    says so.

    ``timeout``: seconds that ranks wait for each other to allocate.
    """
    pipes: dict[int, tuple[int, int]] = {}
    for rank in range(world_size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            store = dist.PrefixStore(name, dist.TCPStore(LOOPBACK, port, is_master=False))
            memory = SharedMemory(store, rank, world_size, timeout, patched_language)
            try:
                outcome: object = body(memory)
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            os.write(write, json.dumps(outcome).encode())
            os._exit(0)
        os.close(write)
        pipes[rank] = pid, read
    ranks = {}
    deadline = time.monotonic() + 1000
    for rank, (pid, read) in pipes.items():
        if not select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            os.kill(pid, signal.SIGKILL)
            ranks[rank] = "hung"
        else:
            ranks[rank] = json.loads(os.read(read, 1 << 16) or b'"killed"')
        os.waitpid(pid, 0)
        os.close(read)
    return {"ranks": ranks, "left": glob.glob(f"/dev/shm/{shared_memory.PREFIX}*")}


if __name__ == "__main__":
    store = local_store()
    outcomes = {}
    for name in sys.argv[1:] or SCENARIOS:
        started = time.monotonic()
        outcomes[name] = run(name, *SCENARIOS[name], store.port)
        print(f"{name}: {time.monotonic() - started:.2f} s", file=sys.stderr)
    print(json.dumps(outcomes))
