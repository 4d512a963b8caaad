"""What calls of one kind share in engines with rings: two calls that differ in anything are of two
kinds.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenyard.config import Config
from tokenyard.handle import Spec
from tokenyard.header import CACHED, COMBINE, DISPATCH, CallKind
from tokenyard.rows import Payload
from tokenyard.types import Layout, Quantize

CONFIG = Config(
    num_experts=8, hidden=256, num_topk=3, max_tokens_per_rank=4, rank=0, world_size=2, timeout=1.0
)
FLAT = Spec(layout=Layout.FLAT, exact=True)
SPECS = [
    FLAT,
    replace(FLAT, exact=False),
    *(
        Spec(layout=Layout.EXPERT_MAJOR, exact=False, expert_alignment=n, capacity=room)
        for n in (1, 8)
        for room in (None, 9)
    ),
    Spec(layout=Layout.EXPERT_PADDED, exact=True),
]
PAYLOADS = [
    *((torch.bfloat16, width, None) for width in (256, 3)),
    *((dtype, 256, None) for dtype in (torch.float16, torch.float32)),
    *(
        (torch.int8, 256, (dtype, width))
        for dtype in (torch.float32, torch.int32)
        for width in (1, 2)
    ),
]


def payload_of(dtype: torch.dtype, width: int, scales: tuple[torch.dtype, int] | None) -> Payload:
    given = None if scales is None else torch.empty(2, scales[1], dtype=scales[0])
    return Payload(torch.empty(2, width, dtype=dtype), given)


def test_what_is_kept_is_what_would_be_made() -> None:
    """In any order of calls: nothing that a kind says comes from a call of another."""
    pytest.importorskip("triton")
    from tokenyard.engines.ring_engine import TwolevelEngine
    from tokenyard.engines.signatures import signature_of

    begun: list[tuple[Any, int]] = []
    monitor = SimpleNamespace(
        raise_if_failed=lambda: None, begin=lambda *given: begun.append(given)
    )
    engine: Any = SimpleNamespace(config=CONFIG, _monitor=monitor, _signatures={}, _calls=0)
    flags = list(product((False, True), repeat=3))
    calls = [*product((DISPATCH, CACHED, COMBINE), PAYLOADS, SPECS, (None, *Quantize), flags)]
    random.Random(0).shuffle(calls)
    for op, given, spec, mode, (weighted, scaled, in_place) in calls * 2:
        kind = CallKind(op, payload_of(*given), spec, mode, weighted, scaled, in_place)
        kept, want = TwolevelEngine._signature(engine, kind), signature_of(kind, CONFIG)
        want.fingerprint.call = kept.fingerprint.call
        for name in (
            "fingerprint",
            "tag",
            "row_layout",
            "dtype",
            "sent",
            "weighted",
            "mode",
            "spec",
        ):
            assert getattr(kept, name) == getattr(want, name), (name, kind)
        for name in ("experts", "padding", "holes", "width"):
            assert getattr(kept, name) == getattr(want, name), (name, kind)
        assert begun[-1] == (kept.fingerprint, kept.tag)
    assert len(engine._signatures) == len(calls)
    assert engine._calls == 2 * len(calls)
