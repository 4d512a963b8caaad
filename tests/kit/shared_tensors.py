"""Tensors in memory that a process shares with the children it forks."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


def shared_empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor in memory that this process shares with the children it forks later. It
    has no name.
    """
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(
        shape
    )


class SharedTensors(TorchDispatchMode):
    """A context in which every new CPU tensor that torch makes is a shared one (results of
    operations too).

    Tensors from outside and views of them stay where they are.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Any = None,
    ) -> Any:
        """Run ``func``, then move its new tensors."""
        # How torch.tensor(...) hands over what it has made.
        lifted = func is torch.ops.aten.lift_fresh.default
        known = (
            set[int]()
            if lifted
            else {
                _storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            }
        )

        def moved(result: Tensor) -> Tensor:
            fresh = (
                result.device.type == "cpu"
                and result.layout == torch.strided
                and result.numel() > 0
            )
            return _moved(result) if fresh and _storage(result) not in known else result

        result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, moved, result)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0  # pyright: ignore[reportPrivateUsage]


def _moved(tensor: Tensor) -> Tensor:
    """The same numbers in the same layout, shared."""
    room = tensor.untyped_storage().nbytes() // tensor.itemsize
    place = shared_empty(room, dtype=tensor.dtype).as_strided(
        tensor.shape, tensor.stride(), tensor.storage_offset()
    )
    return place.copy_(tensor)
