# pyright: basic
"""Structs that kernels share. Those of the first part hold constants, known when a kernel is
compiled; those of the second hold values.

A kernel takes one struct of constants, ``k``, which the launcher in the kernel's file fills.
Structs of values are made from the kernel's int64 arguments, at its beginning, or are arguments
themselves: each field is an int64 then.

Triton 3.6 compiles a struct of constants only if every field, and every struct in it, is a
``tl.constexpr``, and interprets it only if none is. Whoever binds a kernel sees to that
(``wrapped`` in ``memory/kernel_launch.py``). A struct of constants cannot be a field of a struct of
values, nor can a kernel make one. No field of a struct of values can be assigned: make a new one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenyard.routing import power_of_two_at_least

# Constants


class RowConstants(NamedTuple):
    """A row on the wire (``kernels/payload.py``)."""

    hidden: int  # elements of a row of the input
    words: int  # of a payload
    word_bits: int  # 32, 16 or 8
    scale_words: int  # of 4 bytes
    metadata_words: int  # of 4 bytes; 0 in a cached dispatch
    slot_bytes: int
    scales_at: int  # bytes of a slot before the scales
    metadata_at: int  # bytes of a slot before the metadata


class Strides(NamedTuple):
    """Words from one row to the next, of each part."""

    payload: int
    scales: int
    metadata: int


class RingLayout(NamedTuple):
    """One ring per (source, channel), in every rank's symmetric region."""

    first_byte: int
    num_bytes: int
    slots: int
    chunk: int  # rows per release


class NetworkRing(NamedTuple):
    """One ring per (source node, channel), and one of the same size per (destination node, channel)
    where rows wait to be put."""

    first_byte: int
    staging: int  # first byte of the rings where rows wait
    num_bytes: int
    slots: int
    chunk: int  # rows per put
    credit: int  # rows per return of credits


class Grid(NamedTuple):
    """Nodes of engine twolevel, and how this rank reaches other nodes."""

    nodes: int
    ranks_per_node: int
    local_bins: int  # a power of two, not less than ranks_per_node
    header_words: int
    first_byte: int  # of the signals between nodes, in every rank's symmetric region
    network: bool  # headers and call barriers cross by NVSHMEM
    mapped: bool  # memory of other nodes' ranks is mapped: rows are stored there
    workers: int  # programs of each bundle of channels
    senders: int = 0  # of these, those that only send; 0: all share all tasks
    bundle: int = 1  # channels that share their workers


class Cast(NamedTuple):
    """How rows are cast on their way, from ``formats.WireFormat``; ``mode`` 0: they are not."""

    mode: int  # the format's ``rule``
    block: int  # elements that share a scale: a group
    groups: int  # that a cast works on
    scale_bytes: int  # of a group
    largest: float  # element
    smallest: float  # magnitude that a group is taken to have at least
    dtype: Any  # of the input
    to: Any  # dtype of elements


# Values: addresses and integers, int64 in a launch


class Payload(NamedTuple):
    """Addresses of rows and of what belongs to them, in the input or in the slots of a ring. 0:
    there is none."""

    rows: Any
    scales: Any
    metadata: Any


class Result(NamedTuple):
    """Addresses of what a dispatch returns. 0: there is none."""

    rows: Any
    scales: Any
    expert_ids: Any
    picks: Any  # the pick behind each slot
    weights: Any
    source: Any  # (rank << 32) | token
    arrivals: Any  # the arrival row behind each result row
    slots: Any  # the result rows of each arrival row


class Peers(NamedTuple):
    """This rank among the others: the table of all symmetric regions, its own state, its number."""

    regions: Any
    state: Any
    rank: Any


class Routing(NamedTuple):
    """The plan's tables, and the sizes that they depend on."""

    plan: Any
    rank: Any  # this one
    num_tokens: Any
    num_experts: Any
    num_rows: Any  # that the result has room for


class Rows(NamedTuple):
    """Some rows of a table: pointer to its first word (or address), their numbers ``[B]``, and a
    row's length (a constant)."""

    words: Any
    index: Any
    stride: Any


class Batch(NamedTuple):
    """Rows that move together, ``[B]`` each: where they stand, which arrival rows they become, and
    whether they exist."""

    index: Any
    arrival: Any
    here: Any


class Experts(NamedTuple):
    """The experts of a rank: ``first`` .. ``end - 1``."""

    first: Any
    end: Any


class Turn(NamedTuple):
    """A turn of a task of engine twolevel: its channel, its number, the counter of its progress,
    and the step of its worker."""

    channel: Any
    task: Any
    done: Any
    step: Any


class Hop(NamedTuple):
    """A turn of a forwarder or combiner of engine twolevel: rows of another node's ``peer`` that
    are forwarded here, or sums that are made here for it."""

    node: Any  # of the peer
    home: Any  # this rank's
    peer: Any
    mine: Any  # address of this rank's region
    base: Any  # rows that the network ring has seen in earlier calls
    begin: Any  # this channel's rows among those of the node: the first
    end: Any  # and the end
    done: Any  # rows of earlier turns


# The host's side


def row_constants(row_layout: Any) -> RowConstants:
    """A row on the wire as kernels see it, from ``engines.rings.RowLayout``."""
    at = row_layout.payload_bytes
    metadata_at = at + -(-row_layout.scale_words * 4 // 16) * 16
    return RowConstants(
        row_layout.hidden, row_layout.words, row_layout.bits, row_layout.scale_words,
        row_layout.meta_words, row_layout.slot_bytes, at, metadata_at,
    )  # fmt: skip


def strides_in_slots(row: RowConstants) -> Strides:
    """Of rows in slots of a ring."""
    return Strides(row.slot_bytes * 8 // row.word_bits, row.slot_bytes // 4, row.slot_bytes // 4)


def grid_of(workspace: Any, workers: int = 1, senders: int = 0, bundle: int = 1) -> Grid:
    """Of an ``engines.workspace.PeerWorkspace``; ``workers``, and ``senders`` of them: of each
    ``bundle`` of channels."""
    grid = workspace.grid
    return Grid(
        nodes=grid.num_nodes, ranks_per_node=grid.ranks_per_node,
        local_bins=power_of_two_at_least(max(2, grid.ranks_per_node)),
        header_words=workspace.header_words, first_byte=workspace.far_at, network=workspace.net,
        mapped=workspace.mapped, workers=workers, senders=senders, bundle=bundle,
    )  # fmt: skip


def network_ring_of(workspace: Any, row_layout: Any) -> NetworkRing:
    """Of the same, for rows of ``row_layout``."""
    ring = workspace.net_ring(row_layout)
    return NetworkRing(
        first_byte=workspace.nets_at, staging=workspace.stage_at,
        num_bytes=workspace.net_ring_bytes, slots=ring.slots, chunk=ring.chunk, credit=ring.chunk,
    )  # fmt: skip
