"""Kernels of engine collective as sm_90 machine code: wide accesses, nothing spilled, sums that are
not fused.
"""

from __future__ import annotations

from typing import Any

import pytest

from compiling import compiled
from nvlink_pool import SOAK, without_devices

pytestmark = without_devices

Facts = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def facts() -> Facts:
    return compiled("collective_compile", *([] if SOAK > 1 else ["of 8 ranks", "bf"]))


def test_nothing_is_spilled(facts: Facts) -> None:
    assert len(facts) > 15
    assert not {name: each["spills"] for name, each in facts.items() if each["spills"]}


def test_rows_move_16_bytes_at_a_time(facts: Facts) -> None:
    kinds = ("pack", "place", "gather", "partial", "owner")
    for kind in kinds:
        moving = [each for name, each in facts.items() if name.startswith(f"collective_{kind}")]
        assert moving and all(each["loads 128"] and each["stores 128"] for each in moving)


def test_products_are_rounded_before_sums(facts: Facts) -> None:
    sums = {
        name: each
        for name, each in facts.items()
        if name.startswith(("collective_partial", "collective_owner"))
    }
    assert sums and not any(each["fused"] for each in sums.values())
