"""Virtual ranks on one GPU: ``python memory_virtual.py`` runs every scenario and prints outcomes as
JSON.

A program of its own because CUDA must start with certain variables.
``test_memory_virtual.py`` reads what it prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memory_calls import launch
from memory_kernels import REGION_BYTES, everybody, multiply_add
from one_gpu import VirtualGroup, VirtualMemory, run_virtual_ranks
from rank_threads import ThreadsFailed
from tokenyard.kernels.sync import PEER, RANK, SEEN, STATE_WORDS, STATUS, STATUS_WORDS, TIMEOUT_NS

EPOCHS, LANES = 40, 16
SCENARIOS: dict[str, tuple[int, Callable[[VirtualGroup], Any]]] = {}


def scenario(
    *world_sizes: int,
) -> Callable[[Callable[[VirtualGroup], Any]], Callable[[VirtualGroup], Any]]:
    def add(body: Callable[[VirtualGroup], Any]) -> Callable[[VirtualGroup], Any]:
        for world_size in world_sizes:
            SCENARIOS[f"{body.__name__}_{world_size}"] = world_size, body
        return body

    return add


class Exchange:
    """One rank's memory, region and state, ready to launch :func:`everybody`."""

    def __init__(self, group: VirtualGroup, timeout: float) -> None:
        self.memory = VirtualMemory(group, timeout=10.0)
        self.region = self.memory.allocate(REGION_BYTES)
        self.clean = not self.region.local.any()
        self.status = self.memory.host_words(STATUS_WORDS)
        state = torch.zeros(STATE_WORDS, dtype=torch.int64)
        state[RANK.value], state[TIMEOUT_NS.value] = group.rank(), int(timeout * 1e9)
        state[STATUS.value] = self.status.data_ptr()
        self.state = state.to(self.memory.device)
        self.out = torch.zeros(EPOCHS + 1, LANES, dtype=torch.int64, device=self.memory.device)
        self.memory.bind(everybody, 1, num_warps=4, R=group.size(), W=LANES)
        torch.cuda.current_stream().synchronize()

    def launch(self, epoch: int) -> None:
        where = (self.region.addresses.data_ptr(), self.state.data_ptr(), self.out.data_ptr())
        launch(
            self.memory, everybody, 2, *where, epoch, num_warps=4, R=self.memory.world_size, W=LANES
        )


@scenario(1, 3, 8, 16)
def exchange(group: VirtualGroup) -> Any:
    here = Exchange(group, 10.0)
    here.memory.gate()
    for epoch in range(1, EPOCHS + 1):
        here.launch(epoch)
    torch.cuda.current_stream().synchronize()
    here.memory.close()
    return [bool(here.clean), here.out.tolist(), here.status.tolist()[0], here.memory.num_sms]


@scenario(4)
def two_objects(group: VirtualGroup) -> Any:
    """Used in turns; the second is made while nothing runs."""
    first, second = Exchange(group, 10.0), Exchange(group, 10.0)
    for epoch in range(1, EPOCHS + 1):
        for each in (first, second):
            each.memory.gate()
            each.launch(epoch)
    torch.cuda.current_stream().synchronize()
    return [first.out.tolist(), second.out.tolist()]


@scenario(3)
def a_rank_launches_nothing(group: VirtualGroup) -> Any:
    here = Exchange(group, 0.5)
    here.memory.gate()
    if group.rank() == 1:
        return None
    here.launch(1)
    came = here.memory.wait_until(lambda: int(here.status[0]) == 1, 20)
    return [came, int(here.status[PEER]), int(here.status[SEEN])]


@scenario(3)
def a_rank_raises(group: VirtualGroup) -> Any:
    here = Exchange(group, 0.5)
    if group.rank() == 2:
        raise KeyError("of rank 2")
    here.memory.gate()
    return "passed"


class _Gated(torch.autograd.Function):
    """Doubles; its backward passes the gate, which it can only if all ranks' backwards run
    at once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: VirtualMemory) -> Tensor:
        ctx.memory = memory
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.memory.gate()
        return grad * 2, None


@scenario(4)
def backwards_pass_the_gate(group: VirtualGroup) -> Any:
    x = torch.ones(4, device=group.device, requires_grad=True)
    memory = VirtualMemory(group, timeout=10.0)
    _Gated.apply(x, memory).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@scenario(4)
def ranks_have_streams_of_their_own(group: VirtualGroup) -> Any:
    memory = VirtualMemory(group, timeout=10.0)
    a, b, c, out = torch.full((4, 256), 3.0, device=group.device)
    launch(memory, multiply_add, 1, *(t.data_ptr() for t in (out, a, b, c)), num_warps=4, W=256)
    return [torch.cuda.current_stream().cuda_stream, out.unique().tolist()]


def main() -> None:
    outcomes: dict[str, Any] = {}
    for name, (world_size, body) in SCENARIOS.items():
        try:
            outcomes[name] = run_virtual_ranks(world_size, body, timeout=60.0)
        except ThreadsFailed as error:
            outcomes[name] = {
                rank: f"{type(each).__name__}: {each}" for rank, each in error.errors.items()
            } or str(error)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
