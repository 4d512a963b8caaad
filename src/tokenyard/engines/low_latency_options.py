"""What a low-latency call may be asked for besides its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard.arguments import real
from tokenyard.config import Config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOptions:
    """Options of a dispatch or combine of engine ``low_latency``; a combine of the others takes
    ``lost_weights``. Tensors are the caller's, contiguous, on the object's device.

    Attributes:
        timeout: seconds of this call, by the device's clock, after which silent ranks are left out;
            None: the object's.
        waits: ``[R]`` int64. The nanoseconds are added that this rank waited for each rank to come
            to the call.
        loads: ``[L]`` int64 or int32 (dispatch). The rows are added that each local expert got.
        scales_by_column: scales ``[L, R * M, S]`` lie column by column in each block, a view of
            ``[L, S, R * M]``: of quantised rows, with ``EXPERT_PADDED`` (dispatch). A single column
            keeps its strides. Ranks need not agree on it.
        lost_weights: ``[T]`` float32 (combine). It is filled with the weights of the picks that
            each token's sum lacks, 0 if none; in an unweighted combine, with their number
            (``docs/reference/low_latency.md``).
    """

    timeout: float | None = None
    waits: Tensor | None = None
    loads: Tensor | None = None
    scales_by_column: bool = False
    lost_weights: Tensor | None = None

    @property
    def need_low_latency(self) -> bool:
        """Whether more is asked than every engine can tell."""
        numbers = self.timeout, self.waits, self.loads
        return self.scales_by_column or any(each is not None for each in numbers)

    def check(self, config: Config, device: torch.device | None, num_tokens: int | None) -> None:
        """Raise ValueError, which names option, limit and value, if they cannot be. ``num_tokens``:
        of a combine; None: they are those of a dispatch."""
        timeout: Any = self.timeout
        if timeout is not None and not 0 < real(timeout) < 1e9:
            limit = "must be a positive number of seconds below 1e9, or None"
            raise ValueError(f"options.timeout ({timeout!r}) {limit}")
        _check("waits", self.waits, "R", config.world_size, (torch.int64,), device)
        if num_tokens is None:
            if self.lost_weights is not None:
                what = "options.lost_weights tells what the sums of a combine lack"
                raise ValueError(f"{what}: leave it out of a dispatch")
            dtypes = torch.int64, torch.int32
            _check("loads", self.loads, "L", config.num_local_experts, dtypes, device)
            return
        if self.loads is not None:
            raise ValueError("options.loads counts rows of a dispatch: leave it out of a combine")
        if self.scales_by_column:
            what = "options.scales_by_column arranges what a dispatch brings"
            raise ValueError(f"{what}: leave it out of a combine")
        _check("lost_weights", self.lost_weights, "T", num_tokens, (torch.float32,), device)


def _check(
    name: str,
    tensor: Tensor | None,
    symbol: str,
    size: int,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    if tensor is None:
        return
    if tensor.dtype not in dtypes or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(
            f"options.{name} is {tensor.dtype} {list(tensor.shape)}, but must be a contiguous "
            f"{allowed} [{size}], that is [{symbol}]"
        )
    if device is not None and tensor.device != device:
        where = f"is on {tensor.device}, but must be on {device}"
        raise ValueError(f"options.{name} {where}: move it there")


NO_OPTIONS = CallOptions()
