"""Channels, chunks and rings as engines choose them. Neither Triton nor a GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenyard.engines.rings import RowLayout, meta_words, row_layout_of
from tokenyard.engines.tuning import (
    Tuning,
    heap_bytes,
    least_bytes,
    most_channels,
    peer_tuning,
    receive_bytes,
    too_many,
)
from tokenyard.header import COUNTS
from tokenyard.planner.workload import DTYPES, Workload
from tokenyard.rows import Payload
from tokenyard.topology import Topology, num_tasks
from tokenyard.types import Quantize


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Rings of one kind at a GPU, all alike. ``slots`` and ``chunk`` (rows per release or put) are
    of dispatch, ``back_*`` of combine."""

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
        senders, reducers: programs that send rows in a dispatch, and sum them in a combine, both
            through rings. writers: of calls without rings. Of twolevel, senders and reducers are
            all its workers: each does whatever there is to do.
        rings: network first; beside each network ring its writer has as much staging.
        symmetric_bytes: what the engine allocates when it is made, per GPU: rings, and counters,
            headers and node headers, which grow with the square of ranks; and the heap that it
            makes later. What calls in place need comes on top.
        receive_bytes, heap_bytes: of these, where combines and dispatches without rings put rows.
    """

    channels: int
    senders: int
    reducers: int
    rings: tuple[Ring, ...]
    symmetric_bytes: int
    writers: int = 0
    receive_bytes: int = 0
    heap_bytes: int = 0


def nvlink_sizes(workload: Workload) -> Sizes:
    """Sizes of engine ``nvlink``. ValueError: rings hold less than two rows, or too many ranks."""
    ranks, sms = workload.gpus_per_node, workload.sms
    if why := too_many(ranks):
        raise ValueError(why)
    grid = Topology(1, ranks)
    config, all_sms = workload.config(grid), sms == workload.most_sms
    received = receive_bytes(workload.buffer_bytes, config)
    heap = heap_bytes(workload.buffer_bytes, config, all_sms=all_sms)
    channels = most_channels(grid, 2 * workload.hidden, workload.buffer_bytes)
    tuning = peer_tuning(sms, grid, all_sms=all_sms, channels=channels)
    ring = _ring("NVLink", ranks * tuning.channels, workload.buffer_bytes, workload, tuning)
    programs = _programs(tuning, grid)
    bundles = tuning.channels // tuning.bundle
    senders = bundles * tuning.senders(programs // bundles, grid)
    return Sizes(
        channels=tuning.channels,
        # else, of 2 R - 1 tasks that move rows, R - 1 send
        senders=senders or max(1, round(programs * (ranks - 1) / (2 * ranks - 1))),
        writers=sms,
        reducers=tuning.channels,
        rings=(ring,),
        symmetric_bytes=_signal_bytes(workload, tuning.channels)
        + ring.count * ring.num_bytes
        + received
        + heap,
        receive_bytes=received,
        heap_bytes=heap,
    )


def _programs(tuning: Tuning, grid: Topology) -> int:
    """Of a dispatch through rings."""
    tasks = num_tasks(grid.world_size, grid.num_nodes)
    workers = tuning.workers(tuning.dispatch, tasks, tuning.bundle)
    return tuning.channels // tuning.bundle * workers


def twolevel_sizes(workload: Workload) -> Sizes:
    """Sizes of engine ``twolevel``. ValueError: rings that hold less than two rows."""
    grid, buffer_bytes = workload.grid, workload.buffer_bytes
    channels = most_channels(grid, 2 * workload.hidden, buffer_bytes)
    all_sms = workload.sms == workload.most_sms
    tuning = peer_tuning(workload.sms, grid, all_sms=all_sms, channels=channels)
    programs = _programs(tuning, grid)
    channels, far = tuning.channels, int(buffer_bytes * tuning.net_share)
    inner = _ring("NVLink", workload.ranks * channels, buffer_bytes - far, workload, tuning)
    links = (workload.nodes - 1) * channels
    network = _whole_chunks(_ring("NIC", links, far // 2, workload, tuning), tuning.net_chunk)
    rings = inner.count * inner.num_bytes + 2 * network.count * network.num_bytes
    return Sizes(
        channels=channels,
        senders=programs,
        reducers=programs,
        rings=(network, inner),
        symmetric_bytes=_signal_bytes(workload, channels) + rings,
    )


def _signal_bytes(workload: Workload, channels: int) -> int:
    """Bytes before the rings: of ``region.signal_words`` and ``two_region.signal_table``, which
    need Triton."""
    ranks, nodes = workload.ranks, workload.nodes
    header = COUNTS + -(-workload.experts // ranks)
    parts = (header + ranks + 3 + 2 * channels, workload.gpus_per_node * channels)
    node_header = sum(-(-part // 2) * 2 for part in parts)
    words = (
        2 * ranks * channels + 7 * ranks + 2 * ranks * (ranks + 2 + channels + header),
        2 * nodes * channels + 4 * ranks * node_header + 4,
    )
    return sum(-(-count // 32) * 256 for count in words)  # int64, padded to 256 bytes


def _whole_chunks(ring: Ring, most: int) -> Ring:
    """As ``PeerWorkspace.net_ring`` uses it: whole chunks, at least three of them where they
    fit."""
    chunk, back = (max(1, min(most, slots // 3)) for slots in (ring.slots, ring.back_slots))
    return replace(
        ring,
        chunk=chunk,
        slots=ring.slots // chunk * chunk,
        back_chunk=back,
        back_slots=ring.back_slots // back * back,
    )


def _ring(name: str, count: int, num_bytes: int, workload: Workload, cuts: Tuning) -> Ring:
    """``count`` rings in ``num_bytes``."""
    each = num_bytes // count // 256 * 256
    there, back = row_layouts(workload)
    slots, back_slots = each // there.slot_bytes, each // back.slot_bytes
    if min(slots, back_slots) < 2:
        row, whole = max(there.slot_bytes, back.slot_bytes), workload.buffer_bytes
        works = [replace(workload, dtype=dtype) for dtype in DTYPES]
        slot = max(layout.slot_bytes for work in works for layout in row_layouts(work))
        least = least_bytes(workload.grid, 2 * workload.hidden, slot, cuts.channels)
        raise ValueError(
            f"buffer_bytes ({whole}) gives each of {count} {name} rings {each} bytes, but 2 rows "
            f"of {row} bytes must fit: make it at least {least}"
        )
    return Ring(
        name=name,
        count=count,
        num_bytes=each,
        slots=slots,
        chunk=cuts.dispatch.chunk_of(slots),
        back_slots=back_slots,
        back_chunk=cuts.send.chunk_of(back_slots),
    )


def row_layouts(workload: Workload) -> tuple[RowLayout, RowLayout]:
    """Slots of a fresh dispatch with weights, and of a combine."""
    rows = Payload(torch.empty(0, workload.hidden, dtype=torch.bfloat16), None)
    mode = None if workload.dtype == "bf16" else Quantize.FP8
    meta = meta_words(workload.topk, experts=False, weighted=True)
    return row_layout_of(rows, mode, meta), row_layout_of(rows, None, 0)
