# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""What kernels and regions of CPU processes are given: refused before anything runs, on every rank,
with a remedy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interpreted import need_interpreter

need_interpreter()

import numpy as np
import triton
import triton.language as tl

from tokenyard.memory.meeting import MOST_BYTES, check_sizes
from tokenyard.testing.interpreter import bind
from tokenyard.testing.simulator import Simulator


@triton.jit
def put(at, value, N: tl.constexpr):
    tl.store(at.to(tl.pointer_type(tl.int64)), value + N)


@pytest.mark.parametrize(
    "value",
    [7.9, torch.tensor([7]), np.zeros(1, np.int64), "7", None],
    ids=lambda v: type(v).__name__,
)
def test_arguments_are_whole_numbers(value: Any) -> None:
    """A tensor of one number would be taken for that number, and a float would lose its
    fraction.
    """
    with pytest.raises(
        ValueError, match=r"value of put is a .*, but arguments are whole numbers: .*data_ptr\(\)"
    ):
        bind(put, (0, value), {"N": 1})
    with pytest.raises(ValueError, match="value of put"):
        Simulator().launch(0, put, 1, 0, value, N=1)


def test_whole_numbers_of_any_kind_are_arguments() -> None:
    sim, out = Simulator(), np.zeros(3, np.int64)
    at = sim.register(out)
    for number, value in enumerate((7, np.int32(8), True)):
        sim.launch(0, put, 1, at + 8 * number, value, N=1)
    sim.run()
    assert out.tolist() == [8, 9, 2]


def test_regions_that_nothing_can_address() -> None:
    """Also numbers that the file system's calls cannot take: they must not raise on the one rank
    that makes the region.
    """
    check_sizes([MOST_BYTES] * 2)
    for size in (MOST_BYTES + 16, 1 << 70):
        with pytest.raises(ValueError, match=rf"num_bytes \({size}\) must be at most {MOST_BYTES}"):
            check_sizes([size] * 2)
