"""How engines cut their work: whatever is spared is left."""

from __future__ import annotations

import pytest

from tokenyard.api import BESIDE_COLLECTIVES
from tokenyard.engines import low_latency_workspace
from tokenyard.engines.base import Request
from tokenyard.engines.rings import RowLayout
from tokenyard.engines.tuning import peer_tuning
from tokenyard.engines.workspace import SHARED_BYTES
from tokenyard.kernels.low_latency_memory import CHUNKS
from tokenyard.topology import Topology, num_tasks

SMS = 132
DISPATCHES, COMBINES, SLOTS = 2, 2, 2
"""Programs of each kind that a multiprocessor holds, of 256 threads of 128 registers."""


@pytest.mark.parametrize("ranks", range(1, 17))
def test_calls_fit_beside_collectives(ranks: int) -> None:
    """All programs of a call are resident while others hold the multiprocessors that were
    spared.
    """
    room = Request(spare_sms=BESIDE_COLLECTIVES).sms(SMS)[0]
    assert room == SMS - BESIDE_COLLECTIVES
    tuning = peer_tuning(room, Topology(1, ranks), all_sms=True)
    for config, tasks, most in (
        (tuning.dispatch, num_tasks(ranks, 1), DISPATCHES),
        (tuning.reduce, ranks + 1, COMBINES),
        (tuning.direct, 2, 1),
        (tuning.pull, 2, 1),
    ):
        assert 0 < tuning.workers(config, tasks) * tuning.channels <= most * room
    assert 0 < tuning.pushers + tuning.gatherers <= COMBINES * room
    for tokens in (1, 128):
        slots = low_latency_workspace.low_latency_tuning(room, ranks, tokens)
        assert ranks <= slots.programs <= SLOTS * room * 8 // slots.num_warps


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("item", "biases"), [(2, 0), (4, 0), (4, 8)])
@pytest.mark.parametrize("num_sms", [24, SMS])
def test_rounds_of_sums_fit_into_shared_memory(
    ranks: int, item: int, biases: int, num_sms: int
) -> None:
    """Of all programs on a multiprocessor; and there are always rows under way while others are
    added.
    """
    tuning = peer_tuning(num_sms, Topology(1, ranks), all_sms=num_sms == SMS)
    config, together = tuning.gather, -(-(tuning.pushers + tuning.gatherers) // num_sms)
    row_bytes, shared = config.block * (ranks * item + biases), SHARED_BYTES // together
    rows, stages = config.staged(config.rows, row_bytes, shared)
    assert 0 < rows <= config.rows
    assert 1 < stages <= config.stages
    assert (stages - 1) * rows * row_bytes <= shared


@pytest.mark.parametrize(
    ("row_bytes", "tokens", "rows"),
    [(7680, 128, 4), (14464, 128, 2), (1 << 20, 4, 1), (14464, 4096, 64), (64, 8, 512)],
)
def test_chunks_are_of_some_size_and_few(row_bytes: int, tokens: int, rows: int) -> None:
    """Of rows for a far rank: of 32 KiB, of a row at least, and 64 of the most rows."""
    tuning = low_latency_workspace.low_latency_tuning(SMS, 2, tokens)
    assert tuning.chunk_rows(row_bytes, tokens) == rows
    assert -(-tokens // rows) <= CHUNKS


@pytest.mark.parametrize(("num_sms", "ranks", "tokens"), [(1, 2, 1), (1, 4, 1), (100, 400, 128)])
def test_low_latency_has_a_program_for_each_rank(num_sms: int, ranks: int, tokens: int) -> None:
    """At least: one tells each rank its counts. A multiprocessor holds four; one rank more is
    refused.
    """
    tuning = low_latency_workspace.low_latency_tuning(num_sms, ranks, tokens)
    assert ranks <= tuning.programs <= SLOTS * num_sms * 8 // tuning.num_warps
    with pytest.raises(ValueError, match=rf"num_sms \({num_sms}\) must be at least {num_sms + 1} "):
        low_latency_workspace.low_latency_tuning(num_sms, 4 * num_sms + 1, tokens)


def test_at_most_half_is_spared() -> None:
    assert [Request(spare_sms=spare).sms(16)[0] for spare in (None, 1, 8, 100)] == [16, 15, 8, 8]


@pytest.mark.parametrize(
    ("channels", "scales", "meta", "row", "slot"),
    [
        (7168, 0, 20, 14416, 14464),
        (7168, 0, 0, 14336, 14336),
        (7168, 56, 20, 14640, 14720),
        (1024, 0, 20, 2128, 2128),
        (8, 0, 4, 32, 32),
    ],
)
def test_slots_of_long_rows_are_whole_lines(
    channels: int, scales: int, meta: int, row: int, slot: int
) -> None:
    """They begin at an address that is a multiple of 128; those of short rows do not grow."""
    row_layout = RowLayout(channels, channels // 2, 32, scales, meta)
    assert (row_layout.row_bytes, row_layout.slot_bytes) == (row, slot)
