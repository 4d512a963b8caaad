# pyright: basic
"""What this rank's kernels await of ranks that are gone, written by this rank itself.

Kernels of engine nvlink know as many ranks as the object was made with, and wait for all of them.
After a death (``Config.absent``) nobody sends rows to a rank that is gone, or expects any: picks of
its experts have gone elsewhere or nowhere before the plan (``redirect.py``), so rings from and to
it stay empty, and all waits for its rows or for room are over before they begin. What is left is
that the rank takes part in each call. That a survivor plays by itself: the launch before each plan
or data launch, in the same stream, writes into this rank's own region what that rank would have
written there if it made this very call with no tokens.

Example: ranks 0 and 2 of three are left, with 2 channels. Before its plan number 5 rank 0 writes
for rank 1: the call's first header words and nothing behind them (0 tokens, 0 rows), a row of the
matrix with no rows, all room and the tag, all into half 1, and ``arrivals[1] = 12``. Before its
data launch number 7, where 3 of those before were dispatches in place by 2 programs each: the tag
into half 1, ``entered[1] = 8`` and ``dones[1] = 8``. Rank 2 does the same in its own region.

Who publishes what, and who may read it when:

* The words of a rank that is gone in this rank's region have one writer, this launch. Survivors
  never store to them, as each has its own words everywhere; the rank that is gone cannot, as the
  region was made after its end and without it (a rank that was only frozen writes into the regions
  of an earlier epoch, whose memory lasts as long as it maps it).
* Their only readers are later launches of this stream. They begin when this one is over, so all it
  stored can be read; no reader is under way while it writes, as launches of one object never
  overlap. Hence neither the order of its stores nor their parity can be wrong by timing.
* What survivors store *to* a rank that is gone goes to a sink of their own, which nobody reads. No
  row is among it, so the sink is as long as the signals before the rings.

Why counters fit whatever was launched before: they are not counted on, but set to what the next
launch waits for, from the numbers that it reads itself (``TICKETS``, ``EPOCH``, ``DIRECT_CALLS``).
A launch that ends without counting its call (rows before counts are known, when a rank lacks room)
is followed by one that writes the same again. CUDA graphs hold both launches, and replay them.

All survivors come to the same verdict on a call, as they do without: what each writes for a rank
that is gone agrees with its own call and adds no rows, so all differences that one sees are between
survivors, whose words are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from tokenyard import header as head
from tokenyard.kernels.call_barrier import CallBarrierConfig
from tokenyard.kernels.names import shown_as
from tokenyard.kernels.region import DIRECT_CALLS, EPOCH, TICKETS, call_word, peer_base, peer_word
from tokenyard.kernels.sync import RANK, add_release, words
from tokenyard.routing import power_of_two_at_least

_SAID, _ROOM = tl.constexpr(head.STATUS), tl.constexpr(head.MOST_ROWS)
_SAID_BINS = tl.constexpr(power_of_two_at_least(head.STATUS))


@triton.jit
def _absent(absent, k: tl.constexpr):
    """Numbers ``[rank_bins]``, and whether they are ranks that are gone."""
    r = tl.arange(0, k.rank_bins)
    return r, tl.load(words(absent) + r, mask=r < k.ranks, other=0) != 0


@triton.jit
def _raise_to(counters, want, gone):
    """Publish what was stored, and raise each counter of ``gone`` to ``want``."""
    add_release(counters, want - tl.load(counters, mask=gone, other=0), gone)


@triton.jit(repr=shown_as("nvlink::stand_in_plan"))
def join_plan_kernel(regions, state, absent, header_in, tag, k: tl.constexpr):
    """Grid 1: take part in the next plan, with no tokens. ``absent``: int64 ``[ranks]``, not 0 of
    those that are gone. ``k``: a ``CallBarrierConfig``."""
    r, gone = _absent(absent, k)
    w = tl.arange(0, _SAID_BINS)
    mine = peer_base(regions, tl.load(words(state) + RANK).to(tl.int32))
    call = tl.load(words(state) + TICKETS) // k.channels
    parity = (call % 2).to(tl.int32)
    said = tl.load(words(header_in) + w, mask=w < _SAID, other=0)
    to = call_word(mine, "headers", parity, r, k)[:, None] + w[None, :]
    tl.store(to, said[None, :] + (r * 0)[:, None], mask=gone[:, None] & (w < _SAID)[None, :])
    row = call_word(mine, "matrix", parity, r, k) + k.ranks
    tl.store(row, tl.full((k.rank_bins,), _ROOM, tl.int64), mask=gone)
    tl.store(row + 1, tag + (r * 0), mask=gone)
    _raise_to(peer_word(mine, "arrivals", r, k), (call + 1) * k.channels + (r * 0), gone)


@triton.jit(repr=shown_as("nvlink::stand_in"))
def join_call_kernel(regions, state, absent, header_in, tag, k: tl.constexpr):
    """Grid 1: take part in the next data launch. Arguments: as of :func:`join_plan_kernel`."""
    r, gone = _absent(absent, k)
    mine = peer_base(regions, tl.load(words(state) + RANK).to(tl.int32))
    call, in_place = tl.load(words(state) + EPOCH), tl.load(words(state) + DIRECT_CALLS)
    tl.store(peer_word(mine, "tags", r, k, (call % 2).to(tl.int32)), tag + (r * 0), mask=gone)
    _raise_to(peer_word(mine, "entered", r, k), call + 1 + (r * 0), gone)
    _raise_to(peer_word(mine, "dones", r, k), (in_place + 1) * k.writers + (r * 0), gone)


# The host's side


def bind_stand_ins(workspace: Any) -> tuple[Callable[..., None], ...]:
    """Compile and load the kernels, for a data launch and for a plan; none if nobody is gone."""
    if not workspace.config.absent:
        return ()
    k = CallBarrierConfig(
        ranks=workspace.memory.world_size, rank_bins=workspace.rank_bins,
        channels=workspace.tuning.channels, header_words=workspace.header_words,
        writers=workspace.direct_programs,
    )  # fmt: skip
    both = join_call_kernel, join_plan_kernel
    return tuple(workspace.memory.bind(each, 1, num_warps=4, k=k) for each in both)


def stand_in(workspace: Any, tag: int, *, plan: bool = False) -> None:
    """Let ranks that are gone take part in what is launched next."""
    if workspace.stand_ins:
        workspace.stand_ins[plan](
            workspace.peers, workspace.state_at, workspace.absent.data_ptr(),
            workspace.header_in_at, tag,
        )  # fmt: skip


def launch_call(
    launch: Callable[..., None], workspace: Any, data: tuple[Any, ...], tag: int, *numbers: int
) -> None:
    """Launch a data kernel once all ranks have come, behind the stand-ins: ``data``, its arguments
    between the state and the tag of its call (addresses, structs of them), and ``numbers``, those
    behind."""
    stand_in(workspace, tag)
    workspace.memory.gate()
    launch(workspace.peers, workspace.state_at, *data, tag, *numbers)
