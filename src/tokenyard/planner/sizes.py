"""Channels, chunks and rings as the engines themselves choose them. Neither Triton nor a GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenyard.engines.rings import Cuts, Form, form_of, meta_words, shape_for
from tokenyard.engines.twolevel_ground import Tuning, most_channels, tuning_for
from tokenyard.planner.workload import Workload
from tokenyard.rows import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Rings of one kind at a GPU, all alike. ``slots`` and ``chunk`` (rows per release or put) are of dispatch, ``back_*`` of
    combine."""

    name: str
    count: int
    num_bytes: int
    slots: int
    chunk: int
    back_slots: int
    back_chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What an engine makes of ``sms`` multiprocessors and its buffer.

    Attributes:
        channels: contiguous shares of a rank's tokens.
        senders: programs that send rows in a dispatch. reducers, writers: of a combine, of a dispatch in place. Of twolevel,
            senders and reducers are all its workers: each does whatever there is to do.
        rings: network first; beside each network ring its writer has as much staging.
        symmetric_bytes: of rings, per GPU; counters and headers (under 1 MiB for 8 ranks) and what calls in place need come on top.
    """

    channels: int
    senders: int
    reducers: int
    rings: tuple[Ring, ...]
    symmetric_bytes: int
    writers: int = 0


def nvlink_sizes(workload: Workload) -> Sizes:
    """Sizes of engine ``nvlink`` among the GPUs of one node.

    Raises:
        ValueError: too few SMs for so many ranks, or rings that hold less than two rows.
    """
    ranks = workload.gpus_per_node
    shape = shape_for(workload.sms, ranks, all_sms=workload.sms == workload.most_sms)
    each = workload.buffer_bytes // (ranks * shape.channels) // 256 * 256
    ring = _ring("NVLink", ranks * shape.channels, each, workload, shape)
    return Sizes(
        channels=shape.channels,
        senders=shape.channels * (ranks - 1),
        writers=shape.writers,
        reducers=shape.channels,
        rings=(ring,),
        symmetric_bytes=ring.count * each,
    )


def twolevel_sizes(workload: Workload) -> Sizes:
    """Sizes of engine ``twolevel``.

    Raises:
        ValueError: rings that hold less than two rows.
    """
    nodes, grid = workload.nodes, workload.grid
    channels = most_channels(grid, 2 * workload.hidden, workload.buffer_bytes)
    tuning = tuning_for(workload.sms, grid, all_sms=workload.sms == workload.most_sms, channels=channels)
    links, far = (nodes - 1) * tuning.channels, int(workload.buffer_bytes * tuning.net_share)
    each = (workload.buffer_bytes - far) // (workload.ranks * tuning.channels) // 256 * 256
    inner = _ring("NVLink", workload.ranks * tuning.channels, each, workload, tuning)
    network = _network(_ring("NIC", links, far // (2 * links) // 256 * 256, workload, tuning), tuning)
    return Sizes(
        channels=tuning.channels,
        senders=tuning.channels * tuning.workers,
        reducers=tuning.channels * tuning.workers,
        rings=(network, inner),
        symmetric_bytes=inner.count * inner.num_bytes + 2 * network.count * network.num_bytes,
    )


def _network(ring: Ring, tuning: Tuning) -> Ring:
    """As ``TwoGround.net_ring`` uses it: whole chunks, at least three of them where they fit."""
    chunk, back = (max(1, min(tuning.net_chunk, slots // 3)) for slots in (ring.slots, ring.back_slots))
    return replace(
        ring,
        chunk=chunk,
        slots=ring.slots // chunk * chunk,
        back_chunk=back,
        back_slots=ring.back_slots // back * back,
    )


def _ring(name: str, count: int, num_bytes: int, workload: Workload, shape: Cuts) -> Ring:
    there, back = forms(workload)
    slots, back_slots = num_bytes // there.slot_bytes, num_bytes // back.slot_bytes
    if min(slots, back_slots) < 2:
        row, whole = max(there.slot_bytes, back.slot_bytes), workload.buffer_bytes
        raise ValueError(
            f"buffer_bytes ({whole}) gives each of {count} rings {num_bytes} bytes, but 2 rows of {row} bytes must fit: "
            f"make it such as {whole * (2 * row + 256) // max(num_bytes, 256)}"
        )
    return Ring(
        name=name,
        count=count,
        num_bytes=num_bytes,
        slots=slots,
        chunk=shape.dispatch.chunk_of(slots),
        back_slots=back_slots,
        back_chunk=shape.send.chunk_of(back_slots),
    )


def forms(workload: Workload) -> tuple[Form, Form]:
    """Slots of a fresh dispatch with weights, and of a combine."""
    dtype = torch.bfloat16 if workload.dtype == "bf16" else torch.float8_e4m3fn
    scales = torch.empty(0, workload.scales) if workload.scales else None
    there = Payload(torch.empty(0, workload.hidden, dtype=dtype), scales)
    back = Payload(torch.empty(0, workload.hidden, dtype=torch.bfloat16), None)
    return form_of(there, None, meta_words(workload.topk, experts=False, weighted=True)), form_of(back, None, 0)
