# pyright: basic
"""One-sided verbs between nodes: the only file that speaks of how bytes cross the network.

``put``: bytes of my region to the same region of another rank, then a number onto a counter there,
or (SET) the counter raised to the number.
``credit``: the number alone. Places are bytes from the start of the region, which is symmetric. Two
implementations of ``put``, chosen by NET: NVSHMEM's device calls, and peer pointers. Rows are put,
and credited, only where memory of other nodes is not mapped (``grid.mapped``), so by NVSHMEM.

Who publishes what, who may read when: whoever acquires the counter sees the bytes. A fence orders a
put behind all that this program, and earlier kernels of this rank, have put to anybody; otherwise
NVSHMEM may deliver puts in any order, and a counter that two puts add to would be as large as if
both were there. Bytes are read from here until the put is over, which only an answer tells.

All threads of a program make NVSHMEM's calls together, so a credit is a put, of 16 bytes that
nobody reads: of the calls that signal, only those that put are made once per program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tokenyard.kernels.region import peer_base
from tokenyard.kernels.sync import add_release, raise_release, words

SIGNAL_SET = tl.constexpr(9)
SIGNAL_ADD = tl.constexpr(10)
"""``NVSHMEM_SIGNAL_SET``, ``NVSHMEM_SIGNAL_ADD``."""
_BLOCK = tl.constexpr(2048)


@core.extern
def nvshmem_put_signal(dst, src, num_bytes, signal, value, operation, rank, _semantic=None):
    """``nvshmemx_putmem_signal_block``: all addresses are this rank's own."""
    kinds = ("int64", "int64", "int64", "int64", "uint64", "int32", "int32")
    symbol = ("nvshmemx_putmem_signal_block", core.dtype("int32"))
    arguments = [dst, src, num_bytes, signal, value, operation, rank]
    table = {tuple(core.dtype(kind) for kind in kinds): symbol}
    return core.extern_elementwise("", "", arguments, table, is_pure=False, _semantic=_semantic)


@core.extern
def nvshmem_fence(_semantic=None):
    """``nvshmem_fence``."""
    table = {(): ("nvshmem_fence", core.dtype("int32"))}
    return core.extern_elementwise("", "", [], table, is_pure=False, _semantic=_semantic)


@triton.jit
def _nvshmem(
    account, mine, rank, there, here, num_bytes, counter, count, SET: tl.constexpr = False
):
    """By NVSHMEM: bytes of this rank's region to another's, then its counter there."""
    add_release(account, num_bytes, None)  # what the program has stored, the network reads
    nvshmem_fence()
    nvshmem_put_signal(
        mine + there, mine + here, num_bytes, mine + counter, count.to(tl.uint64),
        SIGNAL_SET if SET else SIGNAL_ADD, rank.to(tl.int32),
    )  # fmt: skip
    tl.debug_barrier()


@triton.jit
def put(
    regions, account, mine, rank, there, here, num_bytes, counter, count, WORDS: tl.constexpr,
    NET: tl.constexpr, SET: tl.constexpr = False,
):  # fmt: skip
    """Bytes from ``here`` to ``there`` at ``rank``, then ``count`` onto ``counter`` there (SET: the
    counter becomes ``count``, which is no less). ``mine``: address of my region.

    ``num_bytes`` (int64) is a multiple of 8 * WORDS (1 or 2). ``account``: a word of this GPU that
    counts them.
    """
    if NET:
        _nvshmem(account, mine, rank, there, here, num_bytes, counter, count, SET)
    else:
        tl.debug_barrier()
        base = peer_base(regions, rank)
        source = tl.multiple_of((mine + here).to(tl.pointer_type(tl.int64)), 8 * WORDS)
        target = tl.multiple_of((base + there).to(tl.pointer_type(tl.int64)), 8 * WORDS)
        n = (num_bytes // (8 * WORDS)).to(tl.int32) * WORDS
        for at in range(0, n, _BLOCK):
            w = at + tl.arange(0, _BLOCK)
            v = tl.load(source + w, mask=w < n, cache_modifier=".cg")
            tl.store(target + w, v, mask=w < n, cache_modifier=".cs")
        tl.atomic_add(account, num_bytes, sem="relaxed", scope="gpu")
        if SET:
            raise_release(words(base + counter), count)
        else:
            add_release(words(base + counter), count, None)


@triton.jit
def credit(account, mine, rank, rest, counter, count):
    """``count`` onto ``counter`` at ``rank``, behind all that this program has read. ``rest``: 16
    bytes that nobody reads."""
    _nvshmem(account, mine, rank, rest, rest, tl.full((), 16, tl.int64), counter, count)
