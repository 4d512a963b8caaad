"""Name the tensors of a layer, compare them, and add up numbers over ranks without pickling
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.cli.demo_model import PER_EXPERT, SHARED, MoeLayer
from tokenyard.routing import host_ints


def results(layer: MoeLayer, y: Tensor, *, first_expert: int) -> dict[str, Tensor]:
    """The output and every gradient by name: ``output``, ``embedding gradient``, ``gate[3]
    gradient``, ...

    ``first_expert`` is the global id of the layer's first expert. A gradient that backward did not
    make counts as zero.
    """
    named = {"output": y.detach()}
    for name in (*SHARED, *PER_EXPERT):
        weight = layer.weights[name]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if name in SHARED:
            named[f"{name} gradient"] = gradient
        else:
            named |= {
                f"{name}[{e}] gradient": g for e, g in enumerate(gradient.unbind(0), first_expert)
            }
    return named


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` with 2-norms in float64; infinite if something is not finite or
    only ``want`` is 0.
    """
    difference = cast(float, torch.linalg.vector_norm(got.double() - want.double()).item())
    size = cast(float, torch.linalg.vector_norm(want.double()).item())
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and difference < float("inf") else float("inf")


def compare(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every tensor in ``got``. ``want`` may hold more: experts of other ranks."""
    return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Collective: the sum of every rank's tensor, on this tensor's device."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    total = tensor.detach().to(where, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


def gather_rows(row: Sequence[float]) -> list[list[float]]:
    """Collective: every rank's numbers (equally many on each), in rank order."""
    table = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64)
    return cast(list[list[float]], sum_over_ranks(table).tolist())


def bytes_of_rank_zero(text: bytes) -> bytes:
    """Collective: what rank 0 passed."""
    own = text if dist.get_rank() == 0 else b""
    size = int(sum_over_ranks(torch.tensor(len(own))).item())
    buffer = torch.zeros(size, dtype=torch.uint8)
    buffer[: len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    return bytes(host_ints(sum_over_ranks(buffer)))
