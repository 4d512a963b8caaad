"""No call imports what takes seconds while other ranks wait for it, whether or not the object was
warmed up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nvlink_pool import SOAK

PROGRAM = Path(__file__).with_name("first_calls.py")
HEAVY = {
    "sympy",
    "mpmath",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.compilers",
    "triton",
}
FEW = 5
"""Modules that a call may bring in: torch's profiler imports one of its own."""


@pytest.mark.parametrize(
    ("size", "warm"),
    [(1, "warm"), (2, "cold"), *([(1, "cold"), (2, "warm")] if SOAK > 1 else [])],
)
def test_no_call_imports_a_compiler(size: int, warm: str, tmp_path: Path) -> None:
    """In fresh processes; rank 0 alone differentiates at first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    programs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(size), str(tmp_path / "meeting"), warm],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [program.communicate()[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    for rank, (program, output) in enumerate(zip(programs, outputs, strict=True)):
        assert program.returncode == 0, f"rank {rank}"
        for call, modules in json.loads(output.splitlines()[-1]).items():
            assert not HEAVY & set(modules), f"rank {rank}, {call}: {sorted(HEAVY & set(modules))}"
            assert len(modules) <= FEW, f"rank {rank}, {call}: {modules}"
