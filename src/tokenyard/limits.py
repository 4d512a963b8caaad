"""How large things may be that arguments alone decide: checked before anything is exchanged or
allocated (``docs/reference/semantics.md``, Limits). What tokens bring themselves is not bounded: it
costs no more than the data."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tokenyard.arguments import LARGEST
from tokenyard.config import Config
from tokenyard.formats import row_of
from tokenyard.handle import Spec
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

MOST_ALIGNMENT = 2**16
"""``expert_alignment``: rows that a block may be padded with."""

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a GPU, or of this host as far as this process may have them."""
    if device.type == "cuda":
        get: Any = torch.cuda.get_device_properties  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return int(get(device).total_memory)
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no such file, or "max"
        most = min(most, int(_CGROUP.read_text()))
    return most


def most_result_bytes(device: torch.device | None, sharing: int) -> int:
    """Bytes that a result may take whose size is known ahead: half of the memory of ``device``
    (None: host), as the experts' output takes as much again. ``sharing``: ranks that share it."""
    return memory_of(torch.device("cpu") if device is None else device) // (2 * sharing)


def check_symmetric(num_bytes: int, device: torch.device, argument: str) -> None:
    """Raise unless symmetric memory can be so large. ``argument``: what asked, and its value."""
    most = memory_of(device)
    if num_bytes > most:
        raise ValueError(
            f"{argument} takes {num_bytes} bytes of symmetric memory on each rank, but {device} "
            f"has {most} bytes in all: make it smaller"
        )


def check_result(
    payload: Payload,
    mode: Quantize | None,
    spec: Spec,
    config: Config,
    counts_by_most: bool,
    most: int,
) -> None:
    """Raise unless rows of a fresh dispatch can be counted, and those that it makes whatever comes
    fit into ``most`` bytes. The same on all ranks that say the same."""
    local, padded, flat = config.most_local_experts, config.padded_rows, spec.layout is Layout.FLAT
    tokens, width = payload.x.shape[0], 1 if flat else min(config.num_topk, local)
    if tokens * config.world_size * width > LARGEST:
        raise ValueError(
            f"x has {tokens} tokens: if each of {config.world_size} ranks has as many, {width} "
            f"rows of each "
            f"on one rank are more than the {LARGEST} that int32 counts: split the batch"
        )
    if flat and spec.exact:
        return
    alignment, static = spec.expert_alignment, not spec.exact or spec.layout is Layout.EXPERT_PADDED
    tables = padded if static or counts_by_most else 0
    if not flat and alignment > 1 and (alignment + tables) * local > LARGEST:
        raise ValueError(
            f"expert_alignment ({alignment}) x {local} local experts makes more rows than int32 "
            f"counts, {LARGEST}: make it smaller"
        )
    if alignment > MOST_ALIGNMENT:
        raise ValueError(
            f"expert_alignment ({alignment}) must be at most {MOST_ALIGNMENT}: each expert's block "
            "may be padded by so many rows; make it smaller"
        )
    if tables * (1 if flat else local) > LARGEST:
        raise ValueError(
            f"max_tokens_per_rank ({config.max_tokens_per_rank}) x {config.world_size} "
            f"ranks{'' if flat else f' x {local} local experts'} makes more rows than int32 "
            f"counts, {LARGEST}: make it smaller, or use exact=True with engine 'collective'"
        )
    _check_bytes(payload, mode, spec, config, most)


def _check_bytes(
    payload: Payload, mode: Quantize | None, spec: Spec, config: Config, most: int
) -> None:
    """Of what a dispatch takes even of nothing, told by the argument that takes most of it."""
    local, bound, top = config.most_local_experts, config.padded_rows, config.num_topk
    sent, flat = row_of(payload, mode), spec.layout is Layout.FLAT
    moved = sent.payload_bytes + 4 * sent.scale_words
    row = moved + (16 + 12 * top if flat else 20)  # with what describes it
    tokens = 0 if spec.exact else bound * (2 * moved + 64 * top)  # sent, received, and placed
    room = padding = 0
    if spec.capacity is not None:
        room = spec.capacity * row
    else:
        padding = local * (spec.expert_alignment - 1) * row
        if spec.layout is Layout.EXPERT_PADDED:
            tokens += local * bound * row
        elif not spec.exact:
            tokens += (1 if flat else min(top, local)) * bound * row
    total = tokens + room + padding
    if total <= most:
        return
    taken = {
        f"max_tokens_per_rank ({config.max_tokens_per_rank}) x {config.world_size} ranks": tokens,
        f"capacity ({spec.capacity})": room,
        f"expert_alignment ({spec.expert_alignment}) x {local} local experts": padding,
    }
    raise ValueError(
        f"{max(taken, key=lambda each: taken[each])} makes a dispatch of {spec.layout.name} take "
        f"{total} bytes on a rank, whatever is sent, but it may take {most} (half of the rank's "
        "share of the memory): make it smaller"
    )
