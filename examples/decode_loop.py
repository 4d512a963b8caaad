"""A decode loop with an MoE layer in a CUDA graph: DeepEP's low-latency calls with hooks, new
tokens and routing at every replay.

    python examples/decode_loop.py     # needs two GPUs; or: torchrun --nproc-per-node 4
    examples/decode_loop.py

Every step is compared with the dense layer, bit for bit with the same step outside the graph, and
timed.
"""

import logging
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import deep_ep, launch

MOST, HIDDEN, EXPERTS, TOPK = 64, 512, 32, 4
"""Tokens of a rank at most, channels, experts of all ranks, picks of a token."""


class Layer:
    """A routed expert layer with one shared expert; a rank computes its share of the
    experts only.
    """

    def __init__(self, device: torch.device) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        same = torch.Generator().manual_seed(0)  # every rank draws all experts, to compare with
        self.router = torch.randn(HIDDEN, EXPERTS, generator=same).to(device)
        self.shared = (torch.randn(HIDDEN, HIDDEN, generator=same) / HIDDEN**0.5).to(
            device, torch.bfloat16
        )
        self.experts = (torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=same) / HIDDEN**0.5).to(
            device, torch.bfloat16
        )
        self.mine = self.experts[rank * EXPERTS // size : (rank + 1) * EXPERTS // size]
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, size, EXPERTS)
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, num_rdma_bytes=num_bytes, low_latency_mode=True
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and ids ``[T, K]``."""
        weights, idx = (x.float() @ self.router).softmax(-1).topk(TOPK)
        return weights, idx

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` to ``[T, H]``; nothing here waits on the host."""
        weights, idx = self.route(x)
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            x, idx, MOST, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        shared = x @ self.shared  # while rows are on their way
        hook()
        results = torch.bmm(
            rows, self.mine
        )  # rows past an expert's count are not specified, and nobody reads them
        routed, _, hook = self.buffer.low_latency_combine(
            results, idx, weights, handle, return_recv_hook=True
        )
        hook()
        return shared + routed

    def dense(self, x: Tensor) -> Tensor:
        """The same with all experts on this rank."""
        weights, idx = self.route(x)
        chosen = torch.einsum("th,tkhj->tkj", x.float(), self.experts[idx].float())
        return x.float() @ self.shared.float() + (weights.unsqueeze(-1) * chosen).sum(1)


def captured(layer: Layer, x: Tensor) -> Callable[[], Tensor]:
    """The layer on whatever ``x`` holds, as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(x)  # makes and compiles what the first call needs
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)

    def replay() -> Tensor:
        graph.replay()
        return y

    return replay


@torch.no_grad()
def decode(device: torch.device, steps: int = 20) -> float:
    """The loop on this rank; returns the largest relative error of a step. On the CPU, without a
    graph.
    """
    layer = Layer(device)
    x = torch.zeros(MOST, HIDDEN, dtype=torch.bfloat16, device=device)
    step = captured(layer, x) if device.type == "cuda" else lambda: layer(x)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    worst, spent = 0.0, 0.0
    for _ in range(steps):
        x.copy_(torch.randn(MOST, HIDDEN, generator=random))
        begin = time.perf_counter()
        y = step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - begin
        assert torch.equal(y, layer(x))
        want = layer.dense(x)
        worst = max(worst, ((y - want).norm() / want.norm()).item())
    print(
        f"rank {dist.get_rank()}: {steps} steps of {MOST} tokens, {spent / steps * 1e3:.2f} ms "
        f"each, error {worst:.1e}"
    )
    layer.buffer.destroy()
    assert worst < 1e-2, worst
    return worst


def main(device: torch.device) -> None:
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tokenyard").setLevel(logging.INFO)  # which engine, and why
    decode(device)


if __name__ == "__main__":
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    if torch.cuda.device_count() < ranks:
        here = torch.cuda.device_count()
        sys.exit(
            f"decode_loop.py needs {ranks} GPUs, one per rank, as it captures CUDA graphs; there "
            f"are {here}"
        )
    if launch.under_torchrun():
        with launch.joined_by_launcher("cuda") as here:
            main(here)
    else:
        launch.spawn(main, ranks, device="cuda")
