"""Rows in one process: sums in blocks, memory that two tensors share, and what only a GPU's tensors
take otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tokenyard import rows as tokenyard_rows
from tokenyard.rows import Payload, Routing, RowFormat, overlap, sum_rows, take_values
from tokenyard.testing import assert_same_bits, poisoned

HIDDEN = 6
NAN = float("nan")


class _Elsewhere(TorchFunctionMode):
    """Tensors say that they are on another device than a CPU, and what is made for that device is
    made here.
    """

    device = torch.device("meta")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return self.device
        given = dict(kwargs or {})
        if given.get("device") == self.device:
            given["device"] = "cpu"
        return func(*args, **given)


@contextmanager
def on(device: str) -> Iterator[None]:
    """Code that asks for the type of the device takes the way of a CPU, or of a GPU."""
    if device == "cpu":
        yield
    else:
        with _Elsewhere():
            yield


devices = pytest.mark.parametrize("device", ["cpu", "gpu"])


def test_a_gpu_is_feigned() -> None:
    with on("gpu"):
        assert torch.zeros(1).device.type != "cpu"
        assert torch.zeros(1, device=torch.zeros(1).device).tolist() == [0.0]


def by_hand(
    rows: Tensor,
    index: Tensor,
    out: Tensor,
    weights: Tensor | None = None,
    bias: tuple[Tensor, ...] = (),
) -> Tensor:
    """What :func:`sum_rows` promises, one row and one addition after the other."""
    sums = torch.empty(index.shape[0], rows.shape[1])
    for i, places in enumerate(index.tolist()):
        total = torch.zeros(rows.shape[1])
        for place in places:
            if place >= 0:
                term = rows[place].float()
                total = total + (term if weights is None else weights[place] * term)
        for term in bias:
            total = total + term[i].float()
        sums[i] = total
    return sums.to(out.dtype)


@devices
@pytest.mark.parametrize("block", [1, 3, 4, 11, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_in_blocks(device: str, block: int, dtype: torch.dtype) -> None:
    """11 sums in blocks of any size; rows that nobody names hold NaN, and so does memory that
    nobody has written.
    """
    random = torch.Generator().manual_seed(block)
    rows = torch.randn(9, HIDDEN, generator=random).to(dtype)
    rows[[0, 4]] = NAN
    index = torch.randint(1, 9, (11, 3), generator=random)
    index[(torch.rand(11, 3, generator=random) < 0.4) | (index == 4)] = -1
    index[5] = -1
    weights, first = (
        torch.randn(9, generator=random),
        torch.randn(11, HIDDEN, generator=random).bfloat16(),
    )
    second = torch.randn(HIDDEN, 11, generator=random).t()
    second[3] = 2.0**24
    names = ("SUM_BLOCK_BYTES", "SUM_BLOCK_BYTES_CPU")
    with (
        mock.patch.multiple(tokenyard_rows, **dict.fromkeys(names, 4 * HIDDEN * block)),
        poisoned(),
    ):
        for scale, bias in product(
            (None, weights), ((), (first,), (first, second), (second, first))
        ):
            out = torch.empty(11, HIDDEN, dtype=dtype)
            with on(device):
                sum_rows(rows, index, out, weights=scale, bias=bias)
            assert_same_bits(
                out, by_hand(rows, index, out, scale, bias), what=f"{len(bias)} biases"
            )


@devices
def test_rows_longer_than_a_block_are_summed_one_by_one(device: str) -> None:
    rows, index, out = (
        torch.randn(3, HIDDEN),
        torch.tensor([[2, 0], [-1, 1], [1, -1]]),
        torch.empty(3, HIDDEN),
    )
    with mock.patch.multiple(tokenyard_rows, SUM_BLOCK_BYTES=8, SUM_BLOCK_BYTES_CPU=8), on(device):
        sum_rows(rows, index, out)
    assert_same_bits(out, by_hand(rows, index, out), what="sums")


@devices
def test_sums_of_no_rows(device: str) -> None:
    none, bias = torch.full((4, HIDDEN), NAN), torch.randn(4, HIDDEN)
    alone = none.clone()
    with poisoned(), on(device):
        sum_rows(torch.empty(0, HIDDEN), torch.full((4, 2), -1), none)
        sum_rows(torch.empty(0, HIDDEN), torch.full((4, 2), -1), alone, bias=(bias,))
    assert_same_bits(none, torch.zeros(4, HIDDEN), what="sums of nothing")
    assert_same_bits(alone, bias, what="bias alone")


@devices
@pytest.mark.parametrize("zeros", [True, False])
def test_rows_of_results(device: str, zeros: bool) -> None:
    """Taken and spread: what no row is named for is zeros, or with ``zeros=False`` of a spread
    anything. No view of the buffer.
    """
    row = RowFormat(5, torch.bfloat16, scale_words=3, picks=2, routed=True, weighted=True)
    x, scales = torch.randn(4, 5).bfloat16(), torch.randn(4, 3)
    routing = Routing(torch.tensor([[3, -1], [0, 1], [2, 3], [1, 0]]), torch.rand(4, 2))
    with poisoned(), on(device):
        buffer = row.buffer(4, x.device)
        row.pack(Payload(x, scales), torch.tensor([2, 0, -1, 3]), routing, buffer)
        token, ids, weights = row.routing(buffer)
        taken = row.take(buffer, torch.tensor([3, -1, 0, 0, -1]))
        whole = row.take(buffer, None)
        spread = row.spread(
            buffer, torch.tensor([[6, 1], [-1, 2], [-1, -1], [0, -1]]), 7, zeros=zeros
        )
        none = row.take(row.buffer(0, x.device), torch.tensor([-1, -1]))
    assert token.tolist() == [2, 0, -1, 3]
    assert ids.tolist() == [[2, 3], [3, -1], [-1, -1], [1, 0]]
    assert weights is not None
    assert_same_bits(
        weights, take_values(routing.weights, torch.tensor([2, 0, -1, 3]), 0.0), what="weights"
    )
    buffer.fill_(0xFF)
    for got, want in ((taken.x, x), (taken.scales, scales)):
        assert_same_bits(got, take_values(want, torch.tensor([3, -1, 2, 2, -1]), 0.0), what="taken")
    for got, want in ((whole.x, x), (whole.scales, scales)):
        assert_same_bits(got[[0, 1, 3]], want[[2, 0, 3]], what="all")
    for got, want in ((spread.x, x), (spread.scales, scales)):
        right = take_values(want, torch.tensor([3, 2, 0, -1, -1, -1, 2]), 0.0)
        some = range(7) if zeros else [0, 1, 2, 6]
        assert_same_bits(got[list(some)], right[list(some)], what="spread")
    assert_same_bits(none.x, torch.zeros(2, 5).bfloat16(), what="taken from nothing")
    assert_same_bits(none.scales, torch.zeros(2, 3), what="scales taken from nothing")


def test_rows_of_nobody() -> None:
    """Token and ids are -1, of some rows or of all; payload, scales and weights stay as
    they are.
    """
    row = RowFormat(5, torch.bfloat16, scale_words=3, picks=2, routed=True, weighted=True)
    buffer = row.buffer(3, torch.device("cpu")).zero_()
    for unused, nobody in ((torch.tensor([False, True, False]), [0, -1, 0]), (None, [-1, -1, -1])):
        row.vacate(buffer, unused)
        token, ids, weights = row.routing(buffer)
        assert token.tolist() == nobody and ids.tolist() == [[each] * 2 for each in nobody]
        kept = row.take(buffer, None)
        assert weights is not None and kept.scales is not None
        assert not (kept.x.any() or kept.scales.any() or weights.any())


@pytest.mark.parametrize("num_rows", [1, 4])
def test_rows_that_are_taken_as_they_are_are_copies(num_rows: int) -> None:
    """Also where a row is nothing but its payload, and where there is one row: the buffer is used
    again.
    """
    for row in (
        RowFormat(4, torch.float32),
        RowFormat(5, torch.int8, scale_words=2),
        RowFormat(8, torch.bfloat16),
    ):
        buffer = row.buffer(num_rows, torch.device("cpu")).zero_()
        taken = row.take(buffer, None)
        buffer.fill_(1)
        assert taken.x.shape == (num_rows, row.hidden) and not taken.x.any()
        assert taken.scales is None or not taken.scales.any()


def of(
    memory: Tensor, dtype: torch.dtype, begin: int, shape: tuple[int, int], strides: tuple[int, int]
) -> Tensor:
    """A view of ``memory`` from byte ``begin``."""
    return memory.view(dtype).as_strided(shape, strides, begin // dtype.itemsize)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
def test_memory_that_two_tensors_share(other: torch.dtype) -> None:
    """float32 over 16 bits and the reverse, at every distance: from the first byte of one to the
    last byte of the other.
    """
    memory = torch.zeros(256, dtype=torch.uint8)
    # Bytes 98 to 129: it begins and ends in the middle of a float32.
    one = of(memory, torch.bfloat16, 98, (3, 4), (6, 1))
    assert 98 + 2 * (2 * 6 + 3) + 2 == 130
    span = (2 * 7 + 1) * other.itemsize  # 2 rows, the second 14 elements later
    for begin in range(0, 256 - span + 1, other.itemsize):
        two = of(memory, other, begin, (2, 1), (14, 1))
        shared = begin < 130 and begin + span > 98
        assert overlap(one, two) == overlap(two, one) == shared, begin
    assert not overlap(one, one[:0]) and not overlap(one[:0], one)
