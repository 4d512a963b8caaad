"""Engines on kernels say whom they wait for, on a GPU. See ``make test-gpu``."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
import torch

from one_gpu import ENVIRONMENT
from run import command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """By engine, what each rank of ``waits_virtual.py`` saw."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command("waits_virtual"), capture_output=True, text=True, check=False,
        env=environment | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("engine", ["nvlink", "twolevel", "low_latency"])
def test_a_late_rank_shows_under_its_name(engine: str, seen: dict[str, Any]) -> None:
    """All of its lateness, and others do not."""
    slept = seen[engine][1][1]
    for rank, (waits, _, later, _) in enumerate(seen[engine]):
        came = [sum(pair) for pair in zip(waits["counts"], waits.get("call", [0] * 4), strict=True)]
        late = [each for peer, each in enumerate(came) if peer != 1]
        if rank != 1:
            assert came[1] >= 0.5 * slept, (rank, slept, waits)
            assert max(late) < 0.3 * came[1], (rank, slept, waits)
            assert later["counts"][1] < 0.3 * came[1], (rank, slept, later)
        else:
            assert max(came) < 0.3 * slept, (slept, waits)


@pytest.mark.parametrize("engine", ["nvlink", "twolevel", "low_latency"])
def test_statistics_wait_for_no_kernel(engine: str, seen: dict[str, Any]) -> None:
    """They come while a call of the rank itself waits for the late one."""
    assert any(rank[3] for rank in seen[engine])
