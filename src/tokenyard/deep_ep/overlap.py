"""Low-latency combines that forks of DeepEP begin while the experts still compute (SGLang): here
they wait for the experts first, on GPUs in the stream of the call, else on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenyard.arguments import LARGEST
from tokenyard.deep_ep import inputs
from tokenyard.deep_ep.handles import LowLatencyHandle
from tokenyard.deep_ep.inputs import flag, whole
from tokenyard.deep_ep.token_layout import has_kernels

SIGNALS = (torch.int32, torch.uint32)
LOOKS_PER_SECOND = 2_500_000
"""At most so often a kernel looks at its signals; a look takes 0.4 us (H200)."""
PAUSE = 100e-6
"""Seconds between two looks of the host."""


class Overlap(NamedTuple):
    """What a combine with ``overlap=`` waits for: ``signals`` (int32 ``[L * per_expert]`` or more;
    None: nothing), of which ``i`` of an expert is for its rows from ``i * block_rows`` on, for so
    many rows as its ``counts`` (int32 ``[L]``; None: its one signal counts). ``patience``: seconds;
    half of the object's timeout, so that waiting ranks learn why in theirs."""

    name: str
    signals: Tensor | None
    counts: Tensor | None
    experts: int
    per_expert: int
    block_rows: int
    threshold: int
    patience: float


def checked(given: Mapping[str, Any], handle: LowLatencyHandle) -> Overlap | None:
    """What the arguments ``given`` of a combine ask for; None without ``overlap``. Host memory is
    waited for here; ValueError: not done in time."""
    inputs.check_fork("low_latency_combine", given, inputs.LOW_LATENCY_COMBINE)
    if "overlap" not in given:
        return None
    experts, patience = handle.ep.config.num_local_experts, handle.ep.config.timeout / 2
    if not flag("overlap", given["overlap"]):
        return Overlap("", None, None, experts, 0, 0, 0, patience)
    whole("num_sms", given.get("num_sms") or 0)
    device = handle.native.arrived.tokens_per_expert.device
    if given.get("src_signals") is not None:
        name, signals = "src_signals", given["src_signals"]
        inputs.array(name, signals, "[L]", (experts,), SIGNALS, device)
        threshold = whole("src_signal_expect_value", given.get("src_signal_expect_value"))
        asked = Overlap(name, signals, None, experts, 1, 1, threshold, patience)
    elif given.get("comp_signal") is not None:
        name, signals, counts = "comp_signal", given["comp_signal"], given.get("packed_recv_count")
        rows = whole("block_m", given.get("block_m", 64), 1)
        threshold = whole("threshold", given.get("threshold", 0))
        per_expert = -(-handle.ep.config.padded_rows // rows)
        length = signals.numel() if isinstance(signals, Tensor) else 0
        meaning = f"[L * ceil(R * M / block_m)], here at least {experts * per_expert}"
        shape = (max(length, experts * per_expert),)
        inputs.array(name, signals, meaning, shape, SIGNALS, device)
        inputs.array("packed_recv_count", counts, "[L]", (experts,), (torch.int32,), device)
        asked = Overlap(name, signals, counts, experts, per_expert, rows, threshold, patience)
    else:
        raise ValueError(
            "overlap=True needs comp_signal (with packed_recv_count, block_m, threshold) or "
            "src_signals (with src_signal_expect_value), which say what the experts have written: "
            "pass them, or leave overlap out"
        )
    for name, each in ((asked.name, asked.signals), ("packed_recv_count", asked.counts)):
        if each is not None:
            inputs.check_contiguous(name, each)
    if not (device.type == "cuda" and has_kernels(device.index)):
        _wait_on_host(asked)
    elif device.index in _LATE:
        check_late(device.index)
    return asked


def _wait_on_host(asked: Overlap) -> None:
    """Another thread counts the signals, or another stream."""
    end = time.monotonic() + asked.patience
    while (lack := _lacking(asked)) is not None:
        if time.monotonic() > end:
            expert, block, seen = lack
            raise ValueError(
                f"{asked.name} came to {seen} of {asked.threshold} for local expert {expert}, "
                f"block {block}, within {asked.patience} s: the experts must count it up, or leave "
                f"overlap out"
            )
        time.sleep(PAUSE)


def _lacking(asked: Overlap) -> tuple[int, int, int] | None:
    """Local expert, block and value of the first signal that has not come."""
    assert asked.signals is not None
    seen = asked.signals.cpu().long()[: asked.experts * asked.per_expert]
    table = seen.view(asked.experts, asked.per_expert)
    blocks = torch.full((asked.experts,), asked.per_expert)
    if asked.counts is not None:
        blocks = (asked.counts.cpu().long() + asked.block_rows - 1) // asked.block_rows
    needed = torch.arange(asked.per_expert) < blocks.unsqueeze(1)
    lack = ((table < asked.threshold) & needed).nonzero()
    if not len(lack):
        return None
    expert, block = int(lack[0, 0]), int(lack[0, 1])
    return expert, block, int(table[expert, block])


# On GPUs with kernels


_LATE: dict[int, Tensor] = {}
"""By device: a word of host memory that a kernel sets which waited in vain."""


def check_late(index: int) -> None:
    """Raise if a wait on this device was in vain; once."""
    expert, _LATE[index][0] = int(_LATE[index][0]), 0
    if expert:
        raise ValueError(
            f"the experts' signal of an earlier low_latency_combine(overlap=True) did not come for "
            f"local expert {expert - 1} in time, and its rows were combined as they "
            f"were: let the experts count it up to the threshold, or leave overlap out"
        )


@cache
def _launch(index: int, counted: bool) -> Callable[..., None]:
    from tokenyard.kernels import produced
    from tokenyard.memory.kernel_launch import kernels_of, multiprocessors

    kernels = kernels_of(index, multiprocessors(torch.device("cuda", index)))
    constants = {"COUNTED": counted, "TILE": produced.TILE}
    kernel: Any = produced.produced_kernel  # pyright: ignore
    return kernels.bind(kernel, 1, 1, None, constants)


def wait(asked: Overlap | None) -> None:
    """Let the current stream wait; without kernels :func:`checked` did."""
    if asked is None or asked.signals is None or not asked.signals.is_cuda:
        return
    index = asked.signals.get_device()
    if not has_kernels(index):
        return
    if index not in _LATE:
        _LATE[index] = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    counts = 0 if asked.counts is None else asked.counts.data_ptr()
    _launch(index, asked.counts is not None)(
        asked.signals.data_ptr(),
        counts,
        _LATE[index].data_ptr(),
        asked.experts,
        asked.per_expert,
        asked.block_rows,
        asked.threshold,
        min(int(asked.patience * LOOKS_PER_SECOND), LARGEST),
    )


def hook_of(asked: Overlap | None, hook: Callable[[], None] | None) -> Callable[[], None] | None:
    """``hook``, on the stream of an ``overlap=`` call, as in DeepEP: SGLang makes such calls on a
    stream of its own, and lets the two wait for each other around the hook."""
    if asked is None or hook is None or not torch.cuda.is_initialized():
        return hook
    stream = torch.cuda.current_stream()

    def on_stream() -> None:
        with torch.cuda.stream(stream):
            hook()

    return on_stream
