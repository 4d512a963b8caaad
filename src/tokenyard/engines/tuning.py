"""Numbers that engines with kernels are made with: how their work is cut into programs, what they
make of the memory they are lent, whether rows cross once per node. Without Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tokenyard.config import Config
from tokenyard.engines.rings import least_ring
from tokenyard.topology import Topology

MANY_REGISTERS = 128
"""Of a thread, where a program may have as many as the compiler likes."""
NET_SHARE = 0.5
MOST_CHANNELS = 64
LONG_TURN = 256
"""Tokens of a turn where nobody waits for its rows."""
LEAST_SLOTS = 8
"""Rows in a ring below which fewer channels, with more workers each, are better."""

MOST_DESTINATIONS = 512
"""Ranks and nodes together. Kernels of plans hold tables of so many rows and columns in registers:
32 x 8 compiles, 64 x 8 had not after 200 s, and of 128 x 8 Triton refuses the table."""
MOST_NODES = 64
"""Sums over nodes are unrolled: those of 64 nodes compile in a minute, of 128 not within 100 s."""


def limit_of(grid: Topology) -> str:
    """What engine twolevel takes at most, where ``grid`` has more; "" if it takes the grid."""
    if grid.world_size + grid.num_nodes > MOST_DESTINATIONS:
        return f"{MOST_DESTINATIONS} ranks and nodes together"
    return f"{MOST_NODES} nodes" if grid.num_nodes > MOST_NODES else ""


def _at_once(rows: int, most: int) -> int:
    """A power of two: not more than ``rows``, nor ``most``, but at least 1."""
    return 1 << (max(1, min(rows, most)).bit_length() - 1)


def too_many(ranks: int) -> str:
    """Why one node of ``ranks`` is too large; "" if it is not."""
    limit = limit_of(Topology(1, ranks))
    why = f"engine 'nvlink' takes at most {limit}, but {ranks} ranks and a node are {ranks + 1}"
    remedy = "use smaller expert-parallel groups, or engine 'collective'"
    return f"{why}: {remedy}" if limit else ""


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """How a role of a kernel works."""

    rows: int  # that a program has in flight
    block: int  # words (channels in combine) of each
    chunk: int = 8  # rows per release
    num_warps: int = 8  # per program; all roles of a kernel have the same
    max_registers: int | None = None  # per thread; None: as many as the compiler likes
    stages: int = 1  # of sums: rounds of loads at once, as shared memory has room for
    per_sm: int = 1  # programs on a multiprocessor, where all are lent

    def chunk_of(self, slots: int) -> int:
        """Rows per release through a ring of ``slots``: two chunks must fit."""
        return min(self.chunk, slots // 2)

    def rows_of(self, block: int, most: int) -> int:
        """Rows in flight, a power of two up to ``most``: several if of few (``block``) words."""
        return _at_once(self.rows * self.block // block, most)

    def casts_of(self, channels: int, most: int) -> int:
        """Rows of ``channels`` cast at once, a power of two: they take half of the registers."""
        registers = (self.max_registers or MANY_REGISTERS) // 2 * self.num_warps * 32
        return _at_once(registers // channels, most)

    def stages_for(self, round_bytes: int, shared: int) -> int:
        """Of ``stages``, as many as a program has ``shared`` memory for; one less is kept there. 4
        stages of 64 KiB keep 3 rounds, 192 KiB; two programs on one multiprocessor one each."""
        return max(1, min(self.stages, 1 + shared // round_bytes))

    def staged(self, rows: int, row_bytes: int, shared: int) -> tuple[int, int]:
        """``rows`` of a round, and its stages. Fewer rows where no round of them fits into shared
        memory: nor do registers hold them. ``row_bytes``: of a row, with all that is added to it.
        """
        while rows > 1 and self.stages > 1 and self.stages_for(rows * row_bytes, shared) == 1:
            rows //= 2
        return rows, self.stages_for(rows * row_bytes, shared)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How work is divided into programs. Equal on all ranks.

    A channel's work is a row of tasks (one per role and peer, and the call barrier), which its
    programs share, its *workers* (``kernels/two_scheduler.py``). With as many workers as tasks each
    has a program of its own; with one, each program does everything for its channel. Channels of a
    *bundle* have their workers together.
    """

    channels: int
    dispatch: KernelConfig
    send: KernelConfig  # these two: of combine
    reduce: KernelConfig
    direct: KernelConfig  # of a dispatch in place
    pull: KernelConfig  # of a combine in place
    # of a combine without rings: ``rows`` x ``block`` words at once, wherever rows begin
    push: KernelConfig
    gather: KernelConfig  # of its sums: with ``stages`` of whole rows, else of ``block`` channels
    pushers: int  # programs of a combine without rings, as the next
    gatherers: int
    # of forwarders, without ``chunk``: rings inside have one (``dispatch.chunk``)
    forward: KernelConfig
    num_sms: int  # multiprocessors that calls may use
    # rows per put and per network credit, at most; in place on one node, tokens of a turn
    net_chunk: int = 16
    turn: int = 16  # tokens that a reducer sums in one turn
    net_share: float = NET_SHARE  # part of rings' memory for network rings and their staging
    # rows that a dispatch through rings casts are cast before, once, not for each destination
    cast_ahead: bool = False
    bundle: int = 1  # channels, in calls through rings

    def workers(self, config: KernelConfig, tasks: int, bundle: int = 1) -> int:
        """Programs of each ``bundle`` of channels of a kernel of ``config`` with so many ``tasks``
        per channel."""
        return max(1, min(tasks * bundle, config.per_sm * self.num_sms * bundle // self.channels))

    def senders(self, workers: int, grid: Topology) -> int:
        """Of so many ``workers`` of a bundle, those that only send in a dispatch that casts no
        rows: half of them; 0 where one would have more tasks so, or nodes have tasks between them.
        """
        ranks, senders = grid.ranks_per_node, workers // 2
        if grid.num_nodes > 1 or not senders:
            return 0
        return senders if -(-ranks // senders) == -(-2 * ranks // workers) else 0

    def combine_senders(self, workers: int, grid: Topology) -> int:
        """The same of a combine of rows in arrival order: one of two, where multiprocessors are
        few. Of two ranks one has all sends anyhow; of more than four nobody has timed it."""
        few = grid.num_nodes == self.reduce.per_sm == 1
        return int(few and workers == 2 < grid.world_size <= 4)


FEW_SUMS = KernelConfig(rows=16, block=512, num_warps=16, max_registers=128, stages=3)
FEW_PULLS = KernelConfig(rows=16, block=512, num_warps=16, max_registers=128, stages=4)
FEW_PUSHES = KernelConfig(rows=4, block=4096, chunk=16, num_warps=16, stages=4)
"""Of programs that have a multiprocessor each."""
MOST_PUSHERS = 32
"""Of up to 64 multiprocessors: a cluster of four in each of a GPU's eight parts (GPCs). Where some
have two, these are late: four H200, 64 multiprocessors, 26, 32, 38 pushers: 495, 481, 526 us."""


def pushers_of(num_sms: int, num_ranks: int) -> int:
    """Programs of ``num_sms`` that push; the others sum. By what each moves, if 8 picks of a token
    fall on any experts: rows for other ranks are read and stored, all are read, a sum is stored.
    A store to another GPU counts one and a half times: two and four ranks of 24 were fastest so.

    >>> [pushers_of(24, ranks) for ranks in (1, 2, 4, 8)]
    [1, 11, 14, 16]
    """
    reached = num_ranks * (1 - (1 - 1 / num_ranks) ** 8)
    pushed, summed = 2.5 * reached * (1 - 1 / num_ranks), reached + 1
    return max(1, min(num_sms - 1, round(num_sms * pushed / (pushed + summed))))


def most_channels(grid: Topology, row_bytes: int, buffer_bytes: int) -> int:
    """Channels (1 at least) whose rings all hold ``LEAST_SLOTS`` rows of ``row_bytes``."""
    near, far = grid.world_size, 2 * (grid.num_nodes - 1)
    share = NET_SHARE if far else 0.0
    far_bytes = share * buffer_bytes / far if far else buffer_bytes
    rows = min((1 - share) * buffer_bytes / near, far_bytes) / row_bytes
    return max(1, min(MOST_CHANNELS, int(rows / LEAST_SLOTS)))


def least_bytes(grid: Topology, row_bytes: int, slot_bytes: int, channels: int) -> int:
    """The buffer from which on every ring holds two rows of ``slot_bytes``, though larger buffers
    have more than ``channels``.

    :func:`most_channels` gives rings ``LEAST_SLOTS`` rows of ``row_bytes``. Where two slots are
    more than that, as those of short rows with many picks are, any number of channels must do.
    """
    ring = least_ring(slot_bytes)
    channels = channels if ring <= LEAST_SLOTS * row_bytes else MOST_CHANNELS
    near, far = grid.world_size, 2 * (grid.num_nodes - 1)
    if not far:
        return near * channels * ring
    return math.ceil(channels * ring * max(near / (1 - NET_SHARE), far / NET_SHARE))


def peer_tuning(
    num_sms: int, grid: Topology, *, all_sms: bool, channels: int = MOST_CHANNELS
) -> Tuning:
    """The tuning for ``num_sms`` multiprocessors, ``channels`` at most. ValueError: none."""
    if num_sms < 1:
        raise ValueError(f"num_sms ({num_sms}) must be at least 1")
    if grid.num_nodes == 1:
        of_one_node = _all_of_one_node if all_sms else _few_of_one_node
        return of_one_node(num_sms, grid.world_size, channels)
    dispatch = KernelConfig(rows=4, block=4096, chunk=16, num_warps=16, max_registers=128)
    reduce = KernelConfig(rows=8, block=1024, num_warps=16, max_registers=128)
    pushers = pushers_of(num_sms, grid.world_size)
    return Tuning(
        channels=min(channels, num_sms),
        dispatch=dispatch, direct=dispatch, pull=FEW_PULLS, push=FEW_PUSHES, gather=FEW_SUMS,
        send=KernelConfig(rows=4, block=8192, chunk=4 if all_sms else 16, num_warps=16),
        reduce=reduce if all_sms else FEW_PULLS,
        forward=KernelConfig(rows=4, block=4096, num_warps=16), num_sms=num_sms, pushers=pushers,
        gatherers=max(1, num_sms - pushers),
    )  # fmt: skip


def few_channels(num_sms: int, ranks: int, most: int) -> tuple[int, int]:
    """Channels of one node of ``ranks`` where ``num_sms`` are few, ``most`` at most, and how many
    of them share their programs.

    Through rings each has a program that sends, and one that takes rows to their places. Among two
    ranks half of the rows stay, so two channels share a program that sends, and two others.

    >>> [few_channels(24, ranks, 64) for ranks in (1, 2, 4, 8)]
    [(24, 1), (16, 2), (12, 1), (12, 1)]
    >>> few_channels(24, 2, 11), few_channels(1, 2, 64)
    ((10, 2), (1, 1))
    """
    if ranks == 2 and min(most, num_sms) > 1:
        return 2 * max(1, min(most // 2, num_sms // 3)), 2
    return max(1, min(most, num_sms // min(ranks, 2))), 1


def _few_of_one_node(num_sms: int, ranks: int, most_channels: int) -> Tuning:
    """Multiprocessors that hold a program each."""
    pushers = pushers_of(num_sms, ranks)
    if num_sms <= 2 * MOST_PUSHERS:
        pushers = min(MOST_PUSHERS, pushers)
    # 64 KiB of rows a round, or a program waits for memory: of two ranks twice the channels
    gather = FEW_SUMS if ranks > 2 else replace(FEW_SUMS, block=2 * FEW_SUMS.block)
    # a program that only sends waits for each chunk's stores
    dispatch = KernelConfig(rows=4, block=4096, chunk=64, num_warps=16, max_registers=128)
    channels, bundle = few_channels(num_sms, ranks, most_channels)
    return Tuning(
        channels=channels, bundle=bundle,
        dispatch=dispatch, direct=dispatch, forward=dispatch, pull=FEW_PULLS,
        push=FEW_PUSHES, gather=gather,
        send=KernelConfig(rows=2, block=8192, chunk=32),
        reduce=FEW_PULLS,
        num_sms=num_sms, pushers=pushers, gatherers=max(1, num_sms - pushers), cast_ahead=True,
        net_chunk=LONG_TURN,
        turn=64 if ranks <= 2 else 16,  # of four ranks 16 are faster
    )  # fmt: skip


def _all_of_one_node(num_sms: int, ranks: int, channels: int) -> Tuning:
    """All multiprocessors, which hold two programs each of most kernels."""
    sums = KernelConfig(rows=4, block=1024, max_registers=128, stages=3, per_sm=2)
    direct = KernelConfig(rows=1, block=4096, num_warps=16, max_registers=128)
    programs = sums.per_sm * num_sms
    # two H100: 70 of 264 pushers 179 us, 56 181, 132 192; four: 170 of 264 478, 143 493, 190 486
    pushers = round(pushers_of(programs, ranks) * (7 / 12 if ranks == 2 else 13 / 12))
    return Tuning(
        channels=max(1, min(channels, 4 * num_sms // (2 * ranks))),
        dispatch=KernelConfig(rows=1, block=4096, chunk=16, max_registers=128, per_sm=2),
        # 8192 tokens, chunks of 4, 8, 16: of four ranks 981, 1006, 1029 us; of two 16 are faster
        send=KernelConfig(rows=1, block=8192, chunk=16 if ranks <= 2 else 4),
        reduce=sums,
        direct=direct,
        pull=FEW_PULLS,
        forward=direct,
        push=KernelConfig(rows=2, block=4096, chunk=4, stages=4),
        gather=sums,
        num_sms=num_sms,
        pushers=pushers,
        gatherers=programs - pushers,
        net_chunk=LONG_TURN,
    )


# Memory of engine nvlink

RECEIVE_SHARE = 4
"""Bytes of a receive buffer per byte of rings, at most. Beside rings of 128 MiB it holds a layer of
4096 tokens of 7168 channels in BF16: 411 MB where each token goes to 7 other ranks, the most that 8
picks on 8 ranks can need."""

HEAP_SHARE = 6
"""Bytes of a heap per byte of rings, at most. Beside rings of 128 MiB it holds two results of 4096
tokens of 7168 channels in BF16 on 8 ranks, the one in use and the next: 350 MB each, if 8 picks
fall on any experts."""

LEAST_BYTES = 64 << 20
"""Of the rows that a rank gets at most: smaller results go through rings, not to the heap, which is
as fast, and costs the host a launch less."""


def most_rows_there(tokens: int) -> int:
    """Rows for which a block of a heap has room at most, if all ranks together have ``tokens``:
    more than any rank guesses."""
    return tokens + tokens // 16 + 64


def most_rows_back(config: Config) -> int:
    """Rows that others send back to a rank at most, if none has more than M tokens."""
    return min(config.world_size - 1, config.num_topk) * config.max_tokens_per_rank


def receive_bytes(buffer_bytes: int, config: Config) -> int:
    """Bytes of the receive buffer beside rings of ``buffer_bytes``."""
    needed = most_rows_back(config) * config.hidden * 2 + (1 << 20)  # BF16, and flags
    return min(RECEIVE_SHARE * buffer_bytes, needed) // 256 * 256


def heap_bytes(buffer_bytes: int, config: Config, *, all_sms: bool) -> int:
    """Bytes of the heap for results of dispatches beside rings of ``buffer_bytes``: two of the
    largest, if they are no more than its share. None where rings are as fast: between two ranks
    that lend all multiprocessors."""
    if config.absent:  # ranks that are gone tell of no block
        return 0
    if all_sms and config.world_size <= 2:
        return 0
    row_bytes = config.hidden * 2 + 4 * (4 + 2 * config.num_topk)  # BF16, and metadata
    rows = config.padded_rows + config.padded_rows // 8 + 64  # what is guessed, and rounded up
    needed = 2 * rows * row_bytes + (4 << 20)
    return min(HEAP_SHARE * buffer_bytes, needed) // (2 << 20) * (2 << 20)  # as memory is mapped


# Crossings of engine low_latency

NIC_GBS, HOP_US = 50.0, 3.0
"""Of a rank's NIC, and of a store and a flag inside a node: nominal, to choose by."""


def crosses_once(config: Config) -> bool:
    """Whether a full call of ``config`` is faster if tokens cross once per node: by bytes of rows
    on the NIC, if picks fall on any experts, against a hop each way."""
    grid = config.topology
    if grid is None or not grid.has_levels:
        return False
    nodes, ranks = grid.num_nodes, grid.world_size

    def met(places: int, near: int) -> float:
        """How many of ``places`` a token goes to, but for those that are ``near``."""
        return (places - near) * (1 - (1 - 1 / places) ** config.num_topk)

    saved = met(ranks, grid.ranks_per_node) - met(nodes, 1)
    num_bytes = config.max_tokens_per_rank * saved * 2 * config.hidden
    return num_bytes / (NIC_GBS * 1e3) > HOP_US
