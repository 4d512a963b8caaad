"""Tensors as calls take them: dense, with memory of their own that holds their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TRACED = ("FakeTensor", "FunctionalTensor")


def is_wrapper(tensor: Tensor) -> bool:
    """Whether it is of a subclass that acts for other tensors: it may have no memory of its own."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__  # pyright: ignore


def waited(value: Any) -> Any:
    """``value``, once it has come, if one of torch's functional collectives makes it."""
    return value.wait() if type(value).__name__ == "AsyncCollectiveTensor" else value


def check_dense(name: str, value: Any, meaning: str = "") -> None:
    """ValueError: ``value`` is no dense tensor; ``meaning``: what it must be. Tensors without data,
    by which torch traces calls, are."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor{meaning}, not {type(value).__name__}")
    if value.is_nested:
        remedy = ".values()" if value.layout is torch.jagged else ".to_padded_tensor(0)"
        raise ValueError(f"{name} is a nested tensor, but must be dense: use {remedy}")
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise ValueError(f"{name} is {layout}, but must be dense: use .to_dense()")
    if torch.compiler.is_compiling():
        return
    if is_wrapper(value) and type(value).__name__ not in _TRACED:
        raise ValueError(
            f"{name} is of {type(value).__name__}, which acts for other tensors: give the tensor "
            f"itself (of a DTensor .to_local(), of an AsyncCollectiveTensor .wait())"
        )
    if value.is_neg():
        raise ValueError(f"{name} is a view that negates its memory: use .resolve_neg()")
