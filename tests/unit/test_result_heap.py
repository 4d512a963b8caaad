"""Which cached dispatches are launched to heaps: a plan's counts tell it, as all ranks must launch
alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenyard.engines.result_heap import ResultHeap
from tokenyard.engines.tuning import LEAST_BYTES
from tokenyard.handle import Spec
from tokenyard.types import Layout

AT, ROWS = 3, 32768


def signature(row_bytes: int, layout: Layout = Layout.FLAT) -> Any:
    """Of calls whose rows have so many bytes, of which a rank gets at most ``ROWS``."""
    return SimpleNamespace(
        spec=Spec(layout=layout, exact=True),
        fingerprint=SimpleNamespace(in_place=False),
        sent=SimpleNamespace(payload_bytes=row_bytes),
        row_layout=SimpleNamespace(scale_words=56, meta_words=0),
        most_rows=ROWS,
    )


@pytest.mark.parametrize("row_bytes", [14336, LEAST_BYTES // ROWS, LEAST_BYTES // ROWS - 4, 32])
@pytest.mark.parametrize("noted", [None, False, True])
def test_cached_dispatches_to_heaps(noted: bool | None, row_bytes: int) -> None:
    """If the fresh one was there and rows are large enough, as of fresh ones: weights, say, cost a
    launch less through rings. None: static shapes tell nothing."""
    nothing: Any = None
    heap: Any = ResultHeap(nothing, nothing, 1 << 30, AT)
    heap._heap, counts = SimpleNamespace(num_bytes=1 << 30), np.full(5, -1)
    if noted is not None:
        heap.note(counts, signature(14336), in_heap=noted)
        assert counts[[0, 1, 2, 4]].tolist() == [-1] * 4
    large = row_bytes * ROWS >= LEAST_BYTES
    assert heap.was_in_heap(counts, signature(row_bytes)) == (large and noted is True)
    assert not heap.was_in_heap(counts, signature(row_bytes, layout=Layout.EXPERT_MAJOR))
    heap._heap.num_bytes = ROWS * 56 * 4 - 1  # scales alone are more
    assert not heap.was_in_heap(counts, signature(row_bytes))
    heap._heap = None
    assert not heap.was_in_heap(counts, signature(row_bytes))
