# pyright: basic
"""Low latency between nodes: puts to *far* ranks, whose memory is not mapped.

Which ranks are far is a table, made with the object. All else is as in
``kernels/low_latency_dispatch.py`` and ``low_latency_combine.py``, and in the same launches: ranks
that are mapped are stored to, far ones get few large messages. Constants of objects without far
ranks leave all of this out of their kernels.

Rows, and sums, for a far rank go in *chunks* of consecutive rows, each put by another program: a
put may be a copy by the threads of its program. Chunk c begins at row ``c * chunk_rows``, a
constant of the call: a few rows of some KiB, more of many rows, so that there are at most CHUNKS.

Example, with chunks of 2 rows. Rank 0 has tokens 0 to 3, of which 0, 2 and 3 go to far rank 5. They
are rows 0, 1 and 2 for it. Any programs pack them into staging (half, 5), rows one behind the
other, and count them by chunk. Two other programs have counted picks and know that there are three:
one puts rows 0 and 1 to where slots (half, 0) begin at rank 5, once both are packed; one puts row 2
behind them. Rank 5 waits for the first chunk, which says that there are three rows, and for the
second before it reads row 2. The sum of row 2 comes back with the second chunk of sums as row 2 of
(half, 5) at rank 0, which knows that token 3 is its row 2 there (``numbers_of``).

Who publishes what, and who may read it when. Each message brings a signal of its own, set when its
bytes are there:

===========  =======================================  ==============================================
message      bytes                                    signal: who acquires it reads them
===========  =======================================  ==============================================
header       counts per local expert                  the tag (a combine's: the tag alone)
rows         a chunk of them, with token numbers      ``arrivals[s, ROWS + c]``: call << 24 | rows
                                                      of all chunks
weights      of the owner, a row per row              ``arrivals[s, WEIGHTS]``: the same
sums         a sum for each row of a chunk, in order  the flag of slot (s, first row of the chunk):
                                                      2 call + 1. First chunk: 2 call, if this rank
                                                      has no rows of the owner, or not all
heartbeat                                             the heartbeat
===========  =======================================  ==============================================

So no message need wait for another; a header is put before rows are packed. A reader finds row j by
its number. It waits for the first chunk, which says whether there is a row j (a sum), then for its
own. A number that a rank tells decides only whether a row is read, not where it is. No atomics.

Packing: whoever has stored a piece of a row adds 1 to ``packed`` of its chunk (release, gpu). One
program per far rank and chunk, which knows by itself how many there are, waits for all (acquire),
sets the counter to 0 and puts. Without rows there is nothing to wait for, and only the first chunk
is put. Those who pack wait for nobody, but for weights, whose wait ends, and each program packs
before it puts; so this wait ends too, and all programs are resident.

Why staging may be written again: call n + 2 writes the half of call n for far rank d only if d is
not left out, so after this rank has seen d's tag n + 1. Rank d set it in a kernel behind its kernel
n, which has read all chunks of call n, or does not read them any more. And a put that nobody reads
may bring anything: the fence before each put keeps what this program, and earlier kernels, have put
to a rank in order, so no late one writes over a later one, or turns a signal back: chunks of one
call share no byte and no signal. (Where no token went, nobody waits for word that there are no
sums, or no weights.)

Ranks that are left out get no message. Who packs looks whether they are, before it counts; so if
one has left a row out, the program that puts its chunk sees it too, and does not put. Other chunks
may come all the same. Who waits for a chunk of rows in vain calls its row TORN: then no sums go
back. Of sums each token has those that came.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.low_latency_memory import numbers_of, packed_count_of
from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import words
from tokenyard.kernels.two_net import put


@triton.jit
def is_far(state, rank, sizes: tl.constexpr):
    """Whether ``rank``, or each of a small tensor of ranks, is reached by puts."""
    return tl.load(words(state) + sizes.state.far + rank, mask=rank < sizes.ranks, other=0) != 0


@triton.jit
def next_of(places, chosen, last, none: tl.constexpr):
    """The least of ``places [n]`` above ``last``, of those ``chosen``; ``none`` if there is none.
    Of many ranks a token goes to few: who goes from one to the next takes as many steps as it has
    picks."""
    return tl.min(tl.where(chosen & (places > last), places, none))


@triton.jit
def via_of(rank, me, sizes: tl.constexpr):
    """Where rows for ``rank``, or each of a tensor of ranks, are sent: there, or once per node
    (``kernels/low_latency_rail.py``)."""
    if sizes.per_node:
        P: tl.constexpr = sizes.per_node
        rail = rank // P * P + me % P
        rank = tl.where((rank < 0) | (rank // P == me // P), rank, rail)
    return rank


@triton.jit
def takes_rows(rank, call, sizes: tl.constexpr):
    """Whether ``rank`` is far, and rows and sums are put there."""
    far = is_far(call.state, rank, sizes)
    if sizes.per_node:
        far = far & (via_of(rank, call.rank, sizes) == rank)
    return far


@triton.jit
def put_far(call, to, there, here, num_bytes, signal, value, sizes: tl.constexpr):
    """``num_bytes`` (a multiple of 8, or 0) from ``here`` to ``there`` at far rank ``to``, then its
    word ``signal`` becomes ``value``. Addresses are in my own region."""
    mine, empty = peer_base(call.regions, call.rank), num_bytes == 0
    rest = tl.full((), 8 * sizes.region.rest, tl.int64)
    there = tl.where(empty, rest, there.to(tl.int64) - mine)
    here = tl.where(empty, rest, here.to(tl.int64) - mine)
    num_bytes = tl.where(empty, 16, num_bytes).to(tl.int64)
    signal_at = signal.to(tl.int64) - mine
    put(
        call.regions, words(call.state) + sizes.state.account, mine, to, there, here, num_bytes,
        signal_at, value.to(tl.int64), 1, sizes.network, True,
    )  # fmt: skip


@triton.jit
def tell_or_put(word, to, value, call, sizes: tl.constexpr):
    """Raise a ``word`` of ``to`` that nothing else needs to be seen before. If that rank is far,
    ``word`` is where it is not mapped: in my own region it has the same place."""
    base = peer_base(call.regions, to)
    if is_far(call.state, to, sizes):
        mine = word.to(tl.int64) - base + peer_base(call.regions, call.rank)
        put_far(call, to, mine, mine, to * 0, mine, value, sizes)
    else:
        tl.atomic_max(word, value, sem="relaxed", scope="sys")


@triton.jit
def count_packed(state, messages, ranks, mask, sizes: tl.constexpr):
    """What this program has packed of ``messages`` to far ``ranks`` is in staging (release)."""
    tl.debug_barrier()
    at = packed_count_of(state, messages, ranks, sizes)
    one = (ranks * 0).to(tl.int64) + 1
    tl.atomic_add(at, one, mask=mask, sem="release", scope="gpu")


@triton.jit
def wait_packed(state, message, to, want, sizes: tl.constexpr):
    """Wait until ``want`` pieces of a message to far rank ``to`` are in staging (acquire), and
    begin anew."""
    at = packed_count_of(state, message, to, sizes)
    packed = tl.atomic_add(at, 0, sem="acquire", scope="gpu")
    while packed < want:
        packed = tl.atomic_add(at, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    tl.store(at, tl.zeros_like(packed))


@triton.jit
def first_put(program, sizes: tl.constexpr):
    """Puts of chunks go round: the first of this ``program``. The last programs count, so theirs
    are last."""
    return (2 * sizes.programs - sizes.ranks - 1 - program) % sizes.programs


@triton.jit
def numbers(slots, t, sizes: tl.constexpr):
    """What :func:`numbers_of` tells of token ``t``, ``[topk_bins]``."""
    pick = tl.arange(0, sizes.topk_bins)
    return tl.load(numbers_of(slots, t, sizes) + pick, mask=pick < sizes.topk, other=0)


@triton.jit
def of_ranks(numbers, owners, ranks):
    """``numbers`` of picks, ``[topk_bins]``, by the rank of the pick: ``[rank_bins]``."""
    same = owners[None, :] == ranks[:, None]
    return tl.max(tl.where(same, numbers[None, :], 0), axis=1)
