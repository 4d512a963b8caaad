# pyright: basic
"""Low-latency dispatch: one row per (token, rank) into a fixed slot, then to its place at each
local expert.

Grid ``programs`` in every launch. The stages, send and receive, are one launch or two. Example: 2
ranks, 2 experts each. Token 2 of rank 1 picks experts 3 and 0: rank 1 writes it to slot (1, 2) of
both ranks. Rank 0 finds 1 token of rank 0 for expert 0 in its counts, so the row goes to row 1 of
expert 0's block.

Who publishes what, and who may read it when:

1. One program per destination counts this rank's tokens for each expert there, and stores the
   counts. A count holds the number of its call, so it needs no order. The program also sets all
   flags of tokens that do not go there to ``2 * call``.
2. One program per piece of a token (one or two) casts it and stores it into the slots at all the
   token's ranks. The program of the first piece also finds the rank of each pick among this rank's
   tokens for that expert, and stores the metadata. Each sets its own flags there to ``2 * call +
   1`` (release).
3. The last program of a receiver (the *leader*) waits for the counts of all ranks, decides who is
   present, computes where rows begin, and publishes this table by ``READY`` (release, gpu). One
   program decides, so all agree, even if counts come as the time runs out.
4. One program per slot waits for READY, then for all the slot's flags (both acquire), and copies
   the row to its places.

Why a slot may be reused: call n + 2 writes the same half as call n. A rank makes it after it has
received call n + 1, so after it has seen a count of every active rank in call n + 1. That rank
writes the count in a kernel that runs after its kernel of call n has read the half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_far import first_put
from tokenyard.kernels.low_latency_memory import Sizes, Stages, epoch_of, slots_in
from tokenyard.kernels.low_latency_rail import hand_on, source_of
from tokenyard.kernels.low_latency_receive import empty_rows, finish_block, lead, receive_slot
from tokenyard.kernels.low_latency_send import put_rows, send_counts, send_piece
from tokenyard.kernels.low_latency_waits import Call, is_active, wait_ready
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.payload import cast_of
from tokenyard.kernels.region import first_expert
from tokenyard.kernels.structs import Cast, RowConstants, row_constants
from tokenyard.kernels.sync import follow
from tokenyard.routing import power_of_two_at_least
from tokenyard.rows import address
from tokenyard.types import Layout


class DispatchConfig(NamedTuple):
    """What is known of a dispatch when its kernel is compiled."""

    sizes: Sizes
    row: RowConstants
    cast: Cast  # its groups are those of a piece
    expert_bins: int  # a power of two, not less than local_experts, nor 2
    counted: int  # tokens looked at at once
    pieces: int  # of a row
    piece: int  # words of a piece
    block: int  # words of a row in flight
    chunk_rows: int  # rows for a far rank that one program puts
    wide: bool  # ids are int64
    weighted: bool
    padded: bool  # blocks of experts have one size
    padding: bool  # blocks of experts end in rows of zeros
    by_column: bool  # scales of a block are [words, rows]
    load_bytes: int  # of one load counter; 0: there are none
    stages: Stages
    early: bool  # programs may be set up while the launch before still runs


class Tokens(NamedTuple):
    """Addresses of this rank's tokens. 0: there is none."""

    picks: Any
    weights: Any
    rows: Any
    scales: Any


class DispatchResult(NamedTuple):
    """Addresses of what a dispatch fills. 0: there is none."""

    rows: Any
    scales: Any
    weights: Any
    source: Any  # (rank << 32) | token
    slots: Any  # int32 [R * M, K]: result rows of each slot; -1: no row, -2: no place, TORN
    merged: Any  # int32 [2, T, K]: ids of merged picks, bits of their weights
    first_pick: Any  # int64 [T, K]: the pick that each was merged into
    tokens_per_expert: Any
    blocks: Any  # source_ranges or expert_offsets
    overflow: Any
    loads: Any  # [L]: tokens of each expert are added
    waits: Any  # int64 [R]: nanoseconds waited are added


@triton.jit(repr=shown_as("low_latency::dispatch"))
def low_dispatch_kernel(
    regions, state, active, tokens: Tokens, result: DispatchResult, timeout, tag, rank, num_tokens,
    num_rows, alignment, k: tl.constexpr,
):  # fmt: skip
    """See the module. ``k`` is a :class:`DispatchConfig`; ``timeout`` is in nanoseconds."""
    sizes: tl.constexpr = k.sizes
    R: tl.constexpr = sizes.ranks
    P: tl.constexpr = sizes.programs
    M: tl.constexpr = sizes.tokens
    pid = tl.program_id(0)
    me, num_tokens = rank.to(tl.int32), num_tokens.to(tl.int32)
    num_rows, alignment = num_rows.to(tl.int32), alignment.to(tl.int32)
    follow(k.early)
    number = tl.load(epoch_of(state, pid, sizes)) + 1
    parity = (number % 2).to(tl.int32)
    call = Call(
        regions=regions, state=state, active=active, number=number, parity=parity, rank=me,
        timeout=timeout,
    )  # fmt: skip
    if k.stages.send:
        if pid >= P - R:
            to = (me + P - 1 - pid) % R
            if is_active(active, to):
                send_counts(tokens, num_tokens, tag, to, call, k)
        for u in range(pid, num_tokens * k.pieces, P):
            send_piece(tokens, result, num_tokens, u // k.pieces, u % k.pieces, call, k)
        if sizes.far:
            for u in range(first_put(pid, sizes), R * tl.cdiv(M, k.chunk_rows), P):
                put_rows(tokens, num_tokens, (me + 1 + u) % R, u // R, call, k)
    if k.stages.receive:
        if sizes.per_node:
            if pid < P - 1:  # all but the leader, which waits for other ranks too
                for u in range(pid, (R // sizes.per_node - 1) * M, P - 1):
                    hand_on(source_of(u // M, me, sizes), u % M, call, k)
        if pid == P - 1:
            lead(result, tag, num_rows, alignment, call, k)
        wait_ready(state, number)
        end, first = first_expert(me + 1, sizes.experts, R), first_expert(me, sizes.experts, R)
        if (end == first) & (pid == 0):
            empty_rows(result, 0, num_rows, k.weighted)
        for e in range(pid, end - first, P):
            finish_block(result, e + 0, num_rows, state, k)
        for u in range(pid, R * M, P):
            receive_slot(result, u // M, u % M, num_rows, call, k)
        tl.debug_barrier()
        tl.store(epoch_of(state, pid, sizes), number)


# The host's side


def bind_dispatch(
    workspace: Any, row_layout: Any, mode: Any, dtype: Any, spec: Any, by_column: bool, wide: bool,
    weighted: bool, load_bytes: int, stages: Stages,
) -> Callable[..., None]:  # fmt: skip
    """Compile and load the kernel for one call signature. May wait for the device.

    Args:
        form: of a row on the wire.
        mode, dtype: how rows are cast on their way (None: not), and what the input holds.
    """
    tuning, config = workspace.tuning, workspace.config
    words_bins, cast = power_of_two_at_least(row_layout.words), cast_of(row_layout, mode, dtype)
    k = DispatchConfig(
        sizes=workspace.sizes, row=row_constants(row_layout),
        cast=cast._replace(groups=cast.groups // tuning.pieces),
        expert_bins=power_of_two_at_least(max(config.most_local_experts, 2)),
        counted=min(power_of_two_at_least(config.max_tokens_per_rank), 32 * tuning.num_warps),
        pieces=tuning.pieces, piece=max(1, words_bins // tuning.pieces),
        block=min(words_bins, tuning.words),
        chunk_rows=tuning.chunk_rows(row_layout.slot_bytes, config.max_tokens_per_rank), wide=wide,
        weighted=weighted, padded=spec.layout is Layout.EXPERT_PADDED,
        padding=spec.expert_alignment > 1, by_column=by_column and stages.receive,
        load_bytes=load_bytes, stages=stages, early=workspace.memory.early,
    )  # fmt: skip
    return workspace.bind(low_dispatch_kernel, k)


def dispatch_arguments(
    workspace: Any, *, payload: Any, topk_idx: Any, weights: Any, rows: tuple[Any, Any, Any],
    padded: bool, options: Any, timeout: int, tag: int, num_rows: int, alignment: int,
) -> tuple[Any, ...]:  # fmt: skip
    """What a launch is given. ``rows``: a ``Payload``, ``Plan`` and ``Arrived``, to be filled.
    ``timeout``: nanoseconds."""
    out, plan, arrived = rows
    route = plan.route.data_ptr()
    blocks = arrived.source_ranges if padded else arrived.expert_offsets
    tokens = Tokens(
        picks=topk_idx.data_ptr(), weights=address(weights), rows=payload.x.data_ptr(),
        scales=address(payload.scales),
    )  # fmt: skip
    result = DispatchResult(
        rows=out.x.data_ptr(), scales=address(out.scales), weights=arrived.weights.data_ptr(),
        source=arrived.source.data_ptr(), slots=slots_in(route, workspace.sizes), merged=route,
        first_pick=plan.first_pick.data_ptr(),
        tokens_per_expert=arrived.tokens_per_expert.data_ptr(),
        blocks=blocks.data_ptr(),
        overflow=arrived.overflow.data_ptr(), loads=address(options.loads),
        waits=address(options.waits),
    )  # fmt: skip
    return (
        *workspace.addresses, tokens, result, timeout, tag, workspace.config.rank,
        topk_idx.shape[0], num_rows, alignment,
    )  # fmt: skip
