"""What a low-latency call may be asked for besides its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenyard.config import Config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallOptions:
    """Options of a dispatch or combine of engine ``low_latency``. Tensors lie on the object's device and are added to.

    Attributes:
        timeout: seconds of this call, by the device's clock, after which silent ranks are left out; None: the object's.
        waits: ``[R]`` int64, nanoseconds that this rank waited for each rank to come to the call.
        loads: ``[L]`` int64, rows that each local expert got (dispatch).
    """

    timeout: float | None = None
    waits: Tensor | None = None
    loads: Tensor | None = None

    def check(self, config: Config, device: torch.device | None) -> None:
        """Raise if they cannot be.

        Raises:
            ValueError: names the option, the limit and the value.
        """
        timeout: Any = self.timeout
        if timeout is not None and (
            isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < 1e9
        ):
            raise ValueError(f"options.timeout ({timeout!r}) must be a positive number of seconds below 1e9, or None")
        _check("waits", self.waits, config.world_size, device)
        _check("loads", self.loads, config.num_local_experts, device)


def _check(name: str, tensor: Tensor | None, size: int, device: torch.device | None) -> None:
    if tensor is None:
        return
    if tensor.dtype != torch.int64 or tuple(tensor.shape) != (size,) or not tensor.is_contiguous():
        raise ValueError(
            f"options.{name} is {tensor.dtype} {list(tensor.shape)}, but must be a contiguous torch.int64 [{size}]"
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"options.{name} is on {tensor.device}, but must be on {device}: move it there")


NO_OPTIONS = CallOptions()
