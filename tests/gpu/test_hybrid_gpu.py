"""``tokenyard.deep_ep``'s overlapped combines and ``HybridEPBuffer`` on one GPU, one rank: streams,
CUDA graphs, and the bits of the same calls on the CPU. See ``make test-gpu``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import deep_ep
from tokenyard.deep_ep.hybrid import HybridEPBuffer
from tokenyard.deep_ep.natives import TIMEOUT_VARIABLE
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE) != "cuda", reason="needs a GPU: make test-gpu"
    ),
]
TOKENS, EXPERTS, TOP, HIDDEN, MOST, BLOCK, DONE = 24, 6, 2, 512, 64, 16, 5
A_WHILE = 50_000_000
"""Cycles, some 30 ms."""


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: Any) -> Iterator[None]:
    begin(tmp_path_factory.mktemp("store") / "file")
    yield
    dist.destroy_process_group()


def begin(path: Path) -> None:
    """A group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)


class Decode:
    """A dispatch, and experts that write their rows late, on a stream of their own."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=random).cuda().bfloat16()
        scores = torch.rand(TOKENS, EXPERTS, generator=random)
        self.idx = scores.topk(TOP, 1).indices.cuda()
        self.weights = torch.ones(TOKENS, TOP, device="cuda")
        self.buffer = deep_ep.Buffer(dist.group.WORLD)
        self.made, self.counts, self.handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.idx, MOST, EXPERTS, use_fp8=False
        )
        self.rows, self.aside = torch.empty_like(self.made), torch.cuda.Stream()
        self.signals = torch.zeros(EXPERTS * (MOST // BLOCK), dtype=torch.int32, device="cuda")

    def begin(self) -> None:
        """Clear all, then let the experts begin: the current stream does not wait for them."""
        self.rows.fill_(torch.nan)
        self.signals.zero_()
        self.aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.aside):
            torch.cuda._sleep(A_WHILE)
            self.rows.copy_(self.made)
            self.signals.fill_(DONE)

    def combine(self, **changes: Any) -> Any:
        given = {"packed_recv_count": self.counts, "comp_signal": self.signals, "block_m": BLOCK}
        return self.buffer.low_latency_combine(
            self.rows,
            self.idx,
            self.weights,
            self.handle,
            **{"overlap": True, **given, "threshold": DONE, "num_sms": 3, **changes},
        )

    def check(self, out: Tensor) -> None:
        assert torch.equal(out.float(), TOP * self.x.float())


def test_combine_waits_for_another_stream() -> None:
    """By signals alone; the hook runs in the stream of the call, as SGLang expects."""
    decode = Decode()
    for hooked in (False, True, False):
        decode.begin()
        alt = torch.cuda.Stream()
        alt.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(alt):
            out, _, hook = decode.combine(return_recv_hook=hooked)
        if hook is not None:
            alt.wait_stream(torch.cuda.current_stream())
            hook()
        torch.cuda.current_stream().wait_stream(alt)
        decode.check(out)
        torch.cuda.synchronize()


def test_combine_waits_in_a_graph() -> None:
    decode = Decode()
    decode.begin()
    decode.combine()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.begin()
        out, _, _ = decode.combine()
        torch.cuda.current_stream().wait_stream(decode.aside)
    for _ in range(3):
        out.zero_()
        graph.replay()
        decode.check(out)


def test_experts_that_never_finish(monkeypatch: Any) -> None:
    """The stream goes on after half of the timeout, and the next such call says so, once."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2")
    decode = Decode()
    decode.rows.copy_(decode.made)
    decode.combine()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="did not come for local expert"):
        decode.combine()
    decode.signals.fill_(DONE)
    decode.check(decode.combine()[0])


def hybrid(device: str) -> list[Tensor]:
    """Every kind of call on ``device``; what they return."""
    random = torch.Generator().manual_seed(2)
    x = torch.randint(-8, 9, (TOKENS, HIDDEN), generator=random).bfloat16().to(device)
    table = (torch.rand(TOKENS, EXPERTS, generator=random) < 0.4).to(device)
    probs = (torch.randint(1, 5, table.shape, generator=random) / 4).to(device)
    scales = torch.rand(TOKENS, 4, generator=random).to(device)
    data = x.to(torch.float8_e4m3fn).view(torch.uint8)
    buffer = HybridEPBuffer(dist.group.WORLD, HIDDEN, TOKENS, EXPERTS)
    got: list[Any] = []
    for rows, more in ((None, {}), (400, {"non_blocking": True}), (32, {})):
        given = {"hidden": x, "routing_map": table, "probs": probs, "num_permuted_tokens": rows}
        made = buffer.dispatch_with_permute(**given, pad_multiple=8, **more)
        used = int(made[3].sum())
        back = buffer.combine_with_unpermute(hidden=made[0], probs=made[1], handle=made[4])
        again = buffer.dispatch_with_permute(hidden=x, handle=made[4], probs=2 * probs)
        got += [made[0][:used], made[1][:used], made[3], *back, again[0][:used], again[1]]
        got += [made[4][at] for at in (3, 4, 7, -1)]
        got += [buffer.combine_with_unpermute(hidden=made[0], handle=made[4])[0]]
    fp8 = buffer.dispatch_with_permute(hidden=data, scaling_factor=scales, routing_map=table)
    flat = buffer.dispatch(x, routing_map=table, probs=probs)
    got += [fp8[0], fp8[2], *flat[:2], *buffer.combine(flat[0], flat[1], flat[3])]
    return [each.cpu() for each in got]


def test_hybrid_has_the_bits_of_the_cpu() -> None:
    there, here = hybrid("cuda"), hybrid("cpu")
    for place, (got, want) in enumerate(zip(there, here, strict=True)):
        assert got.dtype == want.dtype and torch.equal(got, want), place
