"""Combines that begin while the experts still compute, as SGLang's single-batch overlap asks for
them: they wait for the experts' signals.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from bad_input import check, error_of
from deep_ep_world import World
from interpreted import need_interpreter
from nvlink_pool import SOAK, without_devices
from tokenyard import deep_ep
from tokenyard.deep_ep import overlap
from tokenyard.deep_ep.natives import TIMEOUT_VARIABLE
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

HERE = "cuda" if os.environ.get(DEVICE_VARIABLE) == "cuda" else "cpu"
MOST, BLOCK, DONE = 28, 8, 5


def blocks_of(most_rows: int) -> int:
    return -(-most_rows // BLOCK)


class Experts(threading.Thread):
    """Write their output block by block, late, and count the signals up: each block's (Hopper), or
    each expert's (Blackwell).
    """

    def __init__(self, rows: Tensor, counts: Tensor, made: Tensor, each_block: bool) -> None:
        super().__init__()
        self.rows, self.counts, self.made, self.each_block = rows, counts, made, each_block
        local, width = rows.shape[0], blocks_of(rows.shape[1])
        shape, dtype = ((local * width,), torch.int32) if each_block else ((local,), torch.uint32)
        self.signals = torch.zeros(shape, dtype=dtype)

    def arguments(self) -> dict[str, Any]:
        if not self.each_block:
            return {"src_signals": self.signals, "src_signal_expect_value": DONE}
        known = {"packed_recv_count": self.counts, "comp_signal": self.signals}
        return {**known, "block_m": BLOCK, "threshold": DONE, "num_sms": 3}

    def run(self) -> None:
        width = blocks_of(self.rows.shape[1])
        for expert, count in enumerate(self.counts.tolist()):
            for block in range(blocks_of(count)):
                time.sleep(2e-3)
                at = slice(block * BLOCK, (block + 1) * BLOCK)
                self.rows[expert, at] = self.made[expert, at]
                if self.each_block:
                    self.signals[expert * width + block] = DONE
            if not self.each_block:
                self.signals[expert] = DONE


@without_devices
@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3))
def test_waits_for_the_experts(ranks: Ranks) -> None:
    """The sums are of what the experts had written when they said so."""
    buffer, rank = deep_ep.Buffer(ranks.group), ranks.rank
    for each_block, hooked in ((True, False), (True, True), (False, True), (False, False)):
        world = World.of(ranks, "uneven" if hooked else "empty first")
        given, count = world.x[rank], world.num_experts
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(
            given, world.idx[rank], MOST, count, use_fp8=False
        )
        rows = torch.full_like(recv, torch.nan)
        experts = Experts(rows, counts, world.by_expert(rank, recv), each_block)
        experts.start()
        out, _, hook = buffer.low_latency_combine(
            x=rows,
            topk_idx=world.idx[rank],
            topk_weights=world.weights[rank],
            handle=handle,
            async_finish=not hooked,
            return_recv_hook=hooked,
            overlap=True,
            **experts.arguments(),
        )
        if hook is not None:
            hook()
        experts.join()
        assert torch.equal(out.float(), world.weighted(rank)), (each_block, hooked)


@without_devices
@distributed_test(world_size=2)
def test_bad_signals(ranks: Ranks) -> None:
    """Named before anything moves; the other rank learns why. So are experts that never finish."""
    rank, world = ranks.rank, World.of(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, "3")
        buffer = deep_ep.Buffer(ranks.group)
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            world.x[rank], world.idx[rank], MOST, world.num_experts, use_fp8=False
        )
    picks, work = (world.idx[rank], world.weights[rank]), world.by_expert(rank, rows)
    local, width = rows.shape[0], blocks_of(rows.shape[1])
    good = {
        "overlap": True,
        "packed_recv_count": counts,
        "comp_signal": torch.full((local * width,), DONE, dtype=torch.int32),
        "block_m": BLOCK,
        "threshold": DONE,
    }
    each = {"overlap": True, "src_signals": torch.full((local,), DONE, dtype=torch.int32)}
    each |= {"src_signal_expect_value": DONE}
    never = good["comp_signal"].clone()
    never[width] = 2
    strided = good["comp_signal"].repeat(2)[::2]
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"overlap": True}, ("overlap=True needs comp_signal", "src_signals")),
        (good | {"overlap": "yes"}, ("overlap", "True or False")),
        (good | {"block_m": 0}, ("block_m (0)",)),
        (good | {"threshold": -1}, ("threshold (-1)",)),
        (good | {"num_sms": "all"}, ("num_sms",)),
        (good | {"packed_recv_count": None}, ("packed_recv_count must be",)),
        (good | {"packed_recv_count": counts[1:]}, ("packed_recv_count has shape",)),
        (good | {"comp_signal": never[1:]}, ("comp_signal has shape", str(local * width))),
        (good | {"comp_signal": never.float()}, ("comp_signal is float32",)),
        (good | {"comp_signal": strided}, ("comp_signal must be contiguous",)),
        (each | {"src_signals": never}, ("src_signals has shape",)),
        (each | {"src_signals": [5]}, ("src_signals must be",)),
        (each | {"src_signal_expect_value": None}, ("src_signal_expect_value",)),
        (good | {"comp_signal": never}, ("came to 2 of 5 for local expert 1, block 0",)),
        ({"use_eager": True}, ("use_eager",)),
        ({"colour": 1}, ("colour",)),
    ]
    kinds: dict[str, type[Exception]] = {"use_eager": ty.NotSupported, "colour": TypeError}
    for number, (wrong, words) in enumerate(cases):
        here = number % 2 == rank
        given = wrong if here else {}
        error = error_of(
            lambda given=given: buffer.low_latency_combine(work, *picks, handle, **given)
        )
        check(error, kinds.get(words[0], ValueError) if here else ty.PeerError, *words)
    for given in (good, each, good | {"overlap": False, "comp_signal": None}):
        out = buffer.low_latency_combine(work, *picks, handle, **given)[0]
        assert torch.equal(out.float(), world.weighted(rank))


@without_devices
@distributed_test(world_size=2)
def test_defaults_of_forks(ranks: Ranks) -> None:
    """What forks' signatures have by default changes nothing; other values are refused by name."""
    rank, world, forks = ranks.rank, World.of(ranks), {"eager_support": False, "use_eager": False}
    buffer = deep_ep.Buffer(ranks.group, **forks)
    given = world.x[rank], world.idx[rank], MOST, world.num_experts
    more = {"use_nvfp4": False, "use_ue8m0_for_sf": False, "x_global_scale": None}
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*given, use_fp8=False, **forks, **more)
    work, picks = world.by_expert(rank, rows), (world.idx[rank], world.weights[rank])
    out = buffer.low_latency_combine(work, *picks, handle, **forks)[0]
    assert torch.equal(out.float(), world.weighted(rank))
    for name in ("eager_support", "use_eager", "use_nvfp4", "use_ue8m0_for_sf"):
        error = error_of(lambda name=name: buffer.low_latency_dispatch(*given, **{name: True}))
        check(error, ty.NotSupported, name)
    for name in forks:
        error = error_of(lambda name=name: deep_ep.Buffer(ranks.group, **{name: True}))
        check(error, ty.NotSupported, f"Buffer({name}=True)")


# The kernel that waits on GPUs (interpreted here, compiled with ``make test-gpu``)


def late_after(
    signals: list[list[int]], counts: list[int] | None, block_rows: int, want: int
) -> int:
    """What the kernel says of signals that nobody counts up any more."""
    table = torch.tensor(signals, dtype=torch.int32, device=HERE)
    rows = None if counts is None else torch.tensor(counts, dtype=torch.int32, device=HERE)
    late = torch.zeros(1, dtype=torch.int64, device=HERE)
    experts, per_expert = table.shape
    arguments = (
        table.data_ptr(),
        0 if rows is None else rows.data_ptr(),
        late.data_ptr(),
        *(experts, per_expert, block_rows, want, 3),
    )
    if HERE == "cuda":
        overlap._launch(0, rows is not None)(*arguments)
        return int(late)
    need_interpreter()
    from tokenyard.kernels.produced import TILE, produced_kernel
    from tokenyard.testing import interpreter  # repairs Triton's

    assert interpreter.is_interpreting()
    produced_kernel[(1,)](*arguments, COUNTED=rows is not None, TILE=TILE)  # type: ignore[index]
    assert table.tolist() == signals
    return int(late)


@pytest.mark.portable
def test_kernel() -> None:
    """Blocks with rows count, also behind the first tile; others do not. Experts count from 1."""
    done, long = [[5, 5, 0], [5, 0, 0], [0, 0, 0]], [5] * 130
    assert late_after(done, [16, 7, 0], 8, 5) == 0
    assert late_after(done, [17, 7, 0], 8, 5) == 1
    assert late_after(done, [16, 9, 0], 8, 5) == 2
    assert late_after(done, [0, 0, 1], 8, 5) == 3
    assert late_after(done, [24, 24, 24], 8, 0) == 0
    assert late_after([long, [*long[:-1], 4]], [1040, 1039], 8, 5) == 2
    assert late_after([long, [*long[:-1], 4]], [1040, 1032], 8, 5) == 0
    assert late_after([[5], [6], [5]], None, 1, 5) == 0
    assert late_after([[5], [4], [5]], None, 1, 5) == 2
