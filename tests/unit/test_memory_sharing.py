"""Tensors that a forked child writes to and its parent reads."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared_tensors import SharedTensors, shared_empty


def written_by_a_child(tensors: list[Tensor]) -> list[bool]:
    """Which of these tensors changed when a child of this process set them to ones."""
    before = [tensor.clone() for tensor in tensors]
    pid = os.fork()
    if pid == 0:
        for tensor in tensors:
            tensor.numpy()[...] = 1
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    return [not torch.equal(old, new) for old, new in zip(before, tensors, strict=True)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_shared_empty(dtype: torch.dtype) -> None:
    tensor = shared_empty(3, 5, dtype=dtype)
    assert (tensor.shape, tensor.dtype, bool(tensor.any())) == ((3, 5), dtype, False)
    assert written_by_a_child([tensor, torch.zeros(3)]) == [True, False]
    assert shared_empty(0, 5, dtype=dtype).shape == (0, 5)


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(4),
    "zeros": lambda x: torch.zeros(4, 2, dtype=torch.int32),
    "full": lambda x: torch.full((3,), 7),
    "new_empty": lambda x: x.new_empty(5),
    "tensor": lambda x: torch.tensor([5, 6]),
    "arithmetic": lambda x: x + 3,
    "sort": lambda x: x.sort(descending=True).values,
    "transposed": lambda x: torch.zeros(2, 3).t(),
    "contiguous": lambda x: torch.zeros(2, 3).t().contiguous(),
    "to": lambda x: x.to(torch.float64),
}


@pytest.mark.parametrize("name", MAKERS)
def test_new_tensors_are_shared(name: str) -> None:
    x = torch.arange(2.0, 8.0).view(2, 3)
    plain = MAKERS[name](x)
    with SharedTensors():
        tensor = MAKERS[name](x)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (
        plain.shape,
        plain.stride(),
        plain.dtype,
    )
    assert "empty" in name or torch.equal(tensor, plain)
    assert written_by_a_child([tensor, x]) == [True, False]


def test_tensors_from_outside_stay_where_they_are() -> None:
    x = torch.arange(6.0)
    place = x.data_ptr()
    with SharedTensors():
        assert x.add_(1) is x
        assert x.view(2, 3)[1].data_ptr() == place + 12
        assert x.to(torch.float32) is x
        assert torch.zeros(0).numel() == 0
        made = torch.zeros(4)
        row = made[1:]
        row.copy_(x[:3])
    assert x.data_ptr() == place
    assert made.tolist() == [0, 1, 2, 3]
    assert row.data_ptr() == made.data_ptr() + 4


def test_gradients_flow() -> None:
    x = torch.ones(3, requires_grad=True)
    with SharedTensors():
        (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]
