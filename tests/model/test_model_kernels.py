"""The models follow the kernels: the order of waits, stores and releases there, and the sizes that
engines choose.

An outline that differs says that a kernel's protocol has changed: change its role in the model too,
then the outline here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch

from low_latency_outlines import LOW_LATENCY_OUTLINES, LOW_LATENCY_VERBS
from model_cases import least_far_slots, least_slots, one
from model_grid import Grid
from model_mutations import first_failure
from model_outlines import OUTLINES, VERBS
from model_rings import Call
from model_source import outline
from nvlink_pool import without_devices
from tokenyard.config import Config
from tokenyard.engines.rings import RowLayout
from tokenyard.engines.tuning import peer_tuning
from tokenyard.engines.workspace import SHARED_BYTES, NetRing, PeerWorkspace
from tokenyard.kernels.two_combine import bind_two_combine
from tokenyard.kernels.two_dispatch import bind_two_dispatch
from tokenyard.topology import Topology

pytestmark = without_devices


@pytest.mark.parametrize(("file", "name"), OUTLINES | LOW_LATENCY_OUTLINES)
def test_the_order_of_operations_is_the_models(file: str, name: str) -> None:
    low = (file, name) in LOW_LATENCY_OUTLINES
    want = (LOW_LATENCY_OUTLINES if low else OUTLINES)[file, name]
    verbs = LOW_LATENCY_VERBS if low else VERBS
    assert "\n".join(outline(file, name, verbs)) == want.strip()


GRID = Topology(2, 2)
CONFIG = Config(
    num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=8, rank=0, world_size=4, timeout=1.0
)


class _Memory:
    """Binds nothing: keeps the constants of the last kernel."""

    world_size = 4
    constants: dict[str, Any]

    def bind(
        self, kernel: Any, grid: int, *, num_warps: int, max_registers: int | None, **constants: Any
    ) -> Any:
        self.constants = constants
        return lambda *_: None  # pyright: ignore[reportUnknownLambdaType, reportUnknownVariableType]


def _sizes(constants: dict[str, Any]) -> dict[str, int]:
    """What matters to the models of a kernel's constants."""
    k = constants.get("k")
    if k is None:
        names = {
            "Q": "slots",
            "CHUNK": "chunk",
            "NQ": "far_slots",
            "NCHUNK": "far_chunk",
            "CREDIT": "credit",
            "B": "batch",
        }
        return {ours: constants[name] for name, ours in names.items() if name in constants}
    sizes = {"slots": k.ring.slots, "chunk": k.ring.chunk}
    if hasattr(k, "tiles"):
        sizes |= {"batch": k.tiles.rows_summed}
    else:
        sizes["batch"] = k.rows_forwarded or k.rows_received
    far = k.network_ring
    if far is not None:
        sizes |= {"far_slots": far.slots, "far_chunk": far.chunk, "credit": far.credit}
    return sizes


def _workspace(grid: Topology, tuning: Any, buffer_bytes: int) -> Any:
    """Sizes without memory."""
    workspace = object.__new__(PeerWorkspace)
    for name, value in {
        "tuning": tuning,
        "grid": grid,
        "net": False,
        "mapped": False,
        "header_words": 16,
        "buffer_bytes": buffer_bytes,
        "config": CONFIG,
        "shared_bytes": SHARED_BYTES,
        "memory": _Memory(),
    }.items():
        setattr(workspace, name, value)
    workspace._lay_out(4, tuning.channels, buffer_bytes)  # pyright: ignore[reportPrivateUsage]
    return workspace


def _calls(workspace: Any, hidden: int) -> Iterator[tuple[dict[str, int], Call]]:
    """Sizes of kernels that move rows of ``hidden`` channels, and the model's call with those
    sizes.
    """
    row_layout, dtype = RowLayout(hidden, hidden // 2, 32, 0, 0), torch.bfloat16
    for combine in (False, True):
        if combine:
            bind_two_combine(
                workspace, row_layout, dtype, 1, 0, (), by_expert=False, weighted=False
            )
        else:
            bind_two_dispatch(
                workspace, 2, row_layout, None, dtype, 1, by_expert=False, padding=False
            )
        known = _sizes(workspace.memory.constants)
        sizes = {name: known.get(name, 1) for name in ("chunk", "far_chunk", "credit", "batch")}
        yield known, Call((), combine=combine, **sizes)


BUFFERS = [1 << bits for bits in range(12, 24)]
HIDDEN = [64, 192, 1024, 7168]


def _engines() -> Iterator[tuple[dict[str, int], Call]]:
    """Whatever sizes both engines choose for buffers of all kinds; not where they refuse."""
    for num_sms, all_sms, buffer_bytes, hidden in product(
        (24, 132), (False, True), BUFFERS, HIDDEN
    ):
        for grid in (Topology(1, 4), GRID):
            tuning = peer_tuning(num_sms, grid, all_sms=all_sms)
            with suppress(ValueError):  # less than two rows in a ring
                yield from _calls(_workspace(grid, tuning, buffer_bytes), hidden)


@pytest.fixture(scope="module")
def engines() -> list[tuple[dict[str, int], Call]]:
    return list(_engines())


@pytest.mark.parametrize(
    ("grid", "ask"), [(Topology(1, 4), "slots"), (GRID, "slots"), (GRID, "net_ring")]
)
def test_rings_that_are_too_small_name_what_was_asked_for(grid: Topology, ask: str) -> None:
    """And a size that is enough."""
    tuning = peer_tuning(24, grid, all_sms=False)
    row_layout = RowLayout(1024, 512, 32, 0, 0)
    text = (
        r"buffer_bytes \(5000\) holds 0 rows of 2048 bytes in each of \d+ (network )?rings of \d+ "
        r"bytes, but 2"
    )
    with pytest.raises(ValueError, match=text) as caught:
        getattr(_workspace(grid, tuning, 5000), ask)(row_layout)
    enough = int(str(caught.value).split()[-1])
    getattr(_workspace(grid, tuning, enough), ask)(row_layout)


def test_engines_choose_rings_that_are_large_enough(
    engines: list[tuple[dict[str, int], Call]],
) -> None:
    """For the least sizes that the model proves (``test_protocol_model.py``); and puts do not go
    round the end of a ring.
    """
    for known, call in engines:
        assert known["slots"] >= least_slots(call), (known, call)
        if "far_slots" in known:
            assert (
                known["far_slots"] >= least_far_slots(call)
                and known["far_slots"] % known["far_chunk"] == 0
            ), (
                known,
                call,
            )
    assert (
        len({known["slots"] for known, _ in engines}) > 20
        and len({known.get("far_slots") for known, _ in engines}) > 20
    )


def test_a_reducer_takes_no_more_rows_than_network_rings_allow() -> None:
    for chunk, chunks in product(range(1, 40), range(2, 6)):
        ring = NetRing(chunk * chunks, chunk)
        call = Call((), combine=True, far_chunk=chunk, credit=chunk, batch=ring.most_rows)
        assert least_far_slots(call) == ring.slots, ring


def test_the_model_holds_with_the_sizes_of_engines(
    engines: list[tuple[dict[str, int], Call]],
) -> None:
    """The smallest ones, with all tokens going everywhere, and more of them than rings hold."""
    small = {
        (known["slots"], known["far_slots"], call)
        for known, call in engines
        if known["slots"] <= 4 and 0 < known.get("far_slots", 0) <= 6
    }
    assert len(small) >= 4
    for slots, far_slots, call in sorted(small):
        tokens = max(slots, far_slots) + 2
        routing = (
            tuple((1, 2, 3)[: 1 + t % 3] if t % 2 else (1, 2, 3)[t % 3 :] for t in range(tokens)),
            (),
            (),
            (),
        )
        calls = [call._replace(routing=routing)] * 2
        grid = Grid(calls, grid=(2, 2), cells=slots, far_cells=far_slots, owners=(0,))
        assert first_failure(one(lambda grid=grid: grid.machine)) is None, (slots, far_slots, call)
