"""Which engine and which wire an object works with, and why, in one sentence."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from tokenyard.config import Config
from tokenyard.engines.wire import GlooWire, GroupWire, Wire

ENGINES = ("auto", "collective")


class Choice(NamedTuple):
    """A wire, the device it insists on (None: host and CUDA tensors alike), and the reason."""

    wire: Wire
    device: torch.device | None
    why: str


def choose(
    group: dist.ProcessGroup | None, store: dist.Store | None, config: Config, device: torch.device | None
) -> Choice:
    """Pick the wire for ``group`` (None: this process is alone) and the device that was asked for, if any.

    Raises:
        ValueError: the group has no backend for that device.
    """
    size = config.world_size
    if group is None or store is None:
        return Choice(GlooWire(None, 0, 1, config.timeout), device, "one rank: rows only change places")
    backends = _backends(group)
    if device is None:
        device = _accelerator(backends)
    backend = backends.get("cpu" if device is None else device.type, "")
    if backend not in ("", "gloo") and device is not None:
        why = f"{size} ranks over the group's {backend} backend on {device.type}"
        return Choice(GroupWire(group, device, backend), device, why)
    if "gloo" not in backends.values():
        wanted = "CPU tensors" if device is None else f"device {device}"
        raise ValueError(
            f"the group's backends are {backends}, none of them for {wanted}: pass device=, or a group with gloo"
        )
    why = f"{size} ranks over a gloo mesh of their own, through host memory"
    return Choice(GlooWire(store, config.rank, size, config.timeout), device, why)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, e.g. ``{"cpu": "gloo", "cuda": "nccl"}``."""
    return dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))


def _accelerator(backends: dict[str, str]) -> torch.device | None:
    """The current accelerator, if the group has a backend of its own for it."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None or backends.get(device.type, "gloo") == "gloo":
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())
