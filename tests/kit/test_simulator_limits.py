# ruff: noqa: E402, N803 (Triton is imported after the check; constants of kernels are written in capitals)
"""What programs may touch, and what may be asked of a simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from interpreted import need_interpreter

need_interpreter()

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tokenyard.kernels.sync import words
from tokenyard.testing.simulator import AddressError, SimulatedRank, Simulator, simulate


@triton.jit
def touch(address, n, STORE: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, 8)
    cells = address.to(tl.pointer_type(DTYPE)) + i
    if STORE:
        tl.store(cells, tl.zeros((8,), DTYPE), mask=i < n)
    else:
        tl.load(cells, mask=i < n)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize(
    ("offset", "lanes", "message"),
    [
        (0, 8, None),
        (0, 4, None),
        (32, 5, "past the end of box"),
        (-8, 1, "before the start of box"),
        (-8, 8, "box"),
        (64, 1, "past the end of box"),
        (4, 1, "not aligned"),
    ],
)
def test_regions_have_ends(offset: int, lanes: int, message: str | None, store: bool) -> None:
    sim = Simulator(seed=8)
    box = sim.allocate(64, "box")
    sim.launch(0, touch, 1, box.ctypes.data + offset, lanes, STORE=store, DTYPE=tl.int64)
    if message is None:
        sim.run()
        return
    with pytest.raises(AddressError, match=message) as caught:
        sim.run()
    assert "rank 0, touch[0]" in str(caught.value) and "seed 8" in str(caught.value)


def test_masked_lanes_may_point_anywhere() -> None:
    sim = Simulator()
    sim.launch(0, touch, 1, 8, 0, STORE=False, DTYPE=tl.int64)
    sim.run()


def test_no_memory_at_all() -> None:
    sim = Simulator()
    sim.launch(0, touch, 1, 4096, 8, STORE=False, DTYPE=tl.int64)
    with pytest.raises(AddressError, match="no memory of this process"):
        sim.run()


def test_other_ranks_buffers_and_unknown_ones_if_strict() -> None:
    theirs, unknown = np.zeros(8, np.int64), np.zeros(8, np.int64)
    for strict in (False, True):
        sim = Simulator(2, strict=strict)
        sim.register(theirs, 1, "results of rank 1")
        sim.launch(1, touch, 1, theirs.ctypes.data, 8, STORE=True, DTYPE=tl.int64)
        sim.run()
        sim.launch(0, touch, 1, theirs.ctypes.data, 8, STORE=True, DTYPE=tl.int64)
        with pytest.raises(AddressError, match=r"results of rank 1.* belongs to rank 1"):
            sim.run()
        sim = Simulator(2, strict=strict)
        sim.launch(0, touch, 1, unknown.ctypes.data, 8, STORE=True, DTYPE=tl.int64)
        if strict:
            with pytest.raises(AddressError, match="no registered memory"):
                sim.run()
        else:
            sim.run()


def test_a_strided_buffer_reaches_from_its_lowest_element_to_its_highest() -> None:
    columns = np.zeros((8, 2), np.int64)
    whole = np.zeros(8, np.int64)
    for buffer, address, step in [
        (columns[:, 1], columns.ctypes.data + 8, 2),
        (whole[::-1], whole.ctypes.data + 56, -1),
        (torch.from_numpy(columns)[:, 1], columns.ctypes.data + 8, 2),
    ]:
        sim = Simulator(strict=True)
        assert sim.register(buffer) == address
        sim.launch(0, touch_every, 1, address, step)
        sim.run()
    assert (whole == 1).all() and (columns == [0, 1]).all()


@triton.jit
def touch_every(address, step):
    tl.store(words(address) + tl.arange(0, 8) * step, tl.full((8,), 1, tl.int64))


def test_behind_the_last_element_of_a_strided_buffer_is_nothing() -> None:
    columns = np.zeros((9, 2), np.int64)
    sim = Simulator(strict=True)
    sim.launch(0, touch_every, 1, sim.register(columns[:7, 0]), 2)
    with pytest.raises(AddressError, match=r"no registered memory|reach past its end"):
        sim.run()


@pytest.mark.parametrize(
    "part", [slice(2, 5), slice(0, 3), slice(5, 8), slice(0, 8), slice(3, 3)], ids=str
)
@pytest.mark.parametrize("part_first", [False, True])
def test_a_tensor_and_parts_of_it_may_both_be_registered(part: slice, part_first: bool) -> None:
    whole = np.zeros(8, np.int64)
    buffers = [(whole, 0, "whole"), (whole[part], 1, "part")]
    sim = Simulator(3, strict=True)
    for buffer, rank, name in reversed(buffers) if part_first else buffers:
        sim.register(buffer, rank, name)
    sim.launch(0, touch_every, 1, whole.ctypes.data, 1)
    if whole[part].size:
        at = whole[part].ctypes.data
        sim.launch(1, touch, 1, at, whole[part].size, STORE=False, DTYPE=tl.int64)
        sim.run()
        assert whole.all()
        sim.launch(2, touch, 1, at, 1, STORE=False, DTYPE=tl.int64)
        with pytest.raises(AddressError, match="belongs to rank 0, 1"):
            sim.run()
    else:
        sim.run()
    sim = Simulator(3, strict=True)
    for buffer, rank, name in reversed(buffers) if part_first else buffers:
        sim.register(buffer, rank, name)
    sim.launch(1, touch_every, 1, whole.ctypes.data, 1)
    if part == slice(0, 8):
        sim.run()
    else:
        with pytest.raises(AddressError, match=r"whole.* belongs to rank 0"):
            sim.run()


def test_a_closed_buffer_leaves_its_neighbours_and_closes_its_parts() -> None:
    sim, memory = Simulator(strict=True), np.zeros(24, np.int64)
    for at in (0, 8, 16):
        sim.register(memory[at : at + 8], name=f"part {at}")
    sim.register(memory[10:12], name="inside")
    sim.addresses.close(memory[8:].ctypes.data)
    for at in (0, 16):
        sim.launch(0, touch_every, 1, memory[at:].ctypes.data, 1)
    sim.run()
    sim.launch(0, touch, 1, memory[10:].ctypes.data, 1, STORE=True, DTYPE=tl.int64)
    with pytest.raises(AddressError, match="in inside, which is closed"):
        sim.run()
    assert memory[:8].all() and not memory[8:16].any() and memory[16:].all()


# Arguments


def test_arguments_are_checked() -> None:
    sim = Simulator()
    with pytest.raises(ValueError, match="touch takes"):
        sim.launch(0, touch, 1, 0, STORE=True, DTYPE=tl.int64)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        sim.launch(0, JITFunction(touch.fn), 1, 0, 8, STORE=True, DTYPE=tl.int64)


@triton.jit
def number(address):
    """One word per program."""
    nx, ny = tl.num_programs(0), tl.num_programs(1)
    tl.store(words(address) + tl.program_id(0) + nx * (tl.program_id(1) + ny * tl.program_id(2)), 1)


@pytest.mark.parametrize(
    ("grid", "count"),
    [
        (0, 0),
        ((2, 0), 0),
        (3, 3),
        (np.int64(3), 3),
        ([2, 3], 6),
        ((2, 3, 2), 12),
        ((np.int32(5),), 5),
    ],
    ids=str,
)
def test_a_grid_is_a_number_or_up_to_three_and_none_is_no_work(grid: Any, count: int) -> None:
    sim = Simulator(strict=True)
    first, behind = sim.allocate(8 * 16), sim.allocate(8)
    sim.launch(0, number, grid, first.ctypes.data)
    sim.launch(0, number, 1, behind.ctypes.data)
    sim.run()
    assert first.view(np.int64).tolist() == [1] * count + [0] * (16 - count)
    assert behind.view(np.int64)[0] == 1


def test_a_launch_of_nothing_ends_for_host_code_too() -> None:
    def body(ranks: SimulatedRank) -> int:
        region = ranks.memory.allocate(16)
        ranks.memory.bind(number, 0, num_warps=4)(region.local.data_ptr())
        ranks.memory.bind(number, 1, num_warps=4)(region.local.data_ptr() + 8)
        ranks.memory.settle()
        return region.local.view(torch.int64).tolist()

    assert simulate(2, body, seed=1) == [[0, 1]] * 2


WRONG: list[tuple[Any, str]] = [
    (
        lambda sim: sim.launch(0, number, -1, 0),
        r"grid \(-1\) must not be negative: .* 0 for no work",
    ),
    (lambda sim: sim.launch(0, number, (2, -3), 0), r"grid \(\(2, -3\)\) must not be negative"),
    (lambda sim: sim.launch(0, number, (1, 1, 1, 1), 0), "must have 1 to 3 dimensions, not 4"),
    (lambda sim: sim.launch(0, number, (), 0), "must have 1 to 3 dimensions, not 0"),
    (
        lambda sim: sim.launch(2, number, 1, 0),
        r"launch\(\): rank \(2\) must be from 0 to 1: .* world_size",
    ),
    (lambda sim: sim.launch(-1, number, 1, 0), r"launch\(\): rank \(-1\) must be from 0 to 1"),
    (
        lambda sim: sim.launch(0, number, 1, 0, num_warps=3),
        r"num_warps \(3\) must be a power of two",
    ),
    (lambda sim: sim.register(np.zeros(1), 2), r"register\(\): rank \(2\) must be from 0 to 1"),
    (lambda sim: sim.kill(-1, at_step=1), r"kill\(\): rank \(-1\) must be from 0 to 1"),
    (lambda sim: sim.freeze(2, at_step=1), r"freeze\(\): rank \(2\) must be from 0 to 1"),
    (lambda sim: sim.allocate(0), r"size \(0\) must be at least 1"),
    (lambda sim: sim.allocate(-8), r"size \(-8\) must be at least 1"),
    (lambda _: Simulator(resident=0), r"resident \(0\) must be at least 1, or None"),
    (lambda _: Simulator(0), r"world_size \(0\) must be at least 1"),
    (lambda _: Simulator(2, kill={2: 5}), r"kill: rank \(2\) must be from 0 to 1"),
    (lambda _: Simulator(swich=0.5), "unknown option.* swich: .* switch, early, late, stale, skew"),
    (lambda _: simulate(0, lambda _: None), "world_size"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_is_refused(call: Any, message: str) -> None:
    sim = Simulator(2)
    with pytest.raises(ValueError, match=message):
        call(sim)
    sim.run()


@triton.jit
def with_defaults(address, add, TIMES: tl.constexpr = 2, BASE: tl.constexpr = 10):
    tl.store(words(address), BASE + TIMES * add)


def test_constants_with_defaults_may_be_left_out() -> None:
    sim = Simulator()
    mem = sim.allocate(32)
    address = mem.ctypes.data
    sim.launch(0, with_defaults, 1, address, 3)
    sim.launch(0, with_defaults, 1, address + 8, 5)
    sim.launch(0, with_defaults, 1, address + 16, 3, TIMES=4)
    sim.launch(0, with_defaults, 1, address + 24, 5, BASE=0, TIMES=1)
    sim.run()
    assert mem.view(np.int64).tolist() == [16, 20, 22, 5]
    with pytest.raises(ValueError, match="with_defaults takes"):
        sim.launch(0, with_defaults, 1, address)
    with pytest.raises(ValueError, match="with_defaults takes"):
        sim.launch(0, with_defaults, 1, address, 3, TIME=4)
