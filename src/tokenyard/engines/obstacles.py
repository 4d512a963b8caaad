"""What keeps kernels from a GPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch

TRITON = "3.6"
CAPABILITY = (7, 0)
"""Compute capability that kernels need."""


def obstacle_of(gpu: torch.device | None) -> str:
    """Why this rank's kernels cannot work on ``gpu``; empty if they can."""
    if gpu is None:
        return "it needs CUDA devices, and a rank works on the CPU"
    version: str | None = None
    if importlib.util.find_spec("triton") is not None:
        version = importlib.import_module("triton").__version__
    name, capability = torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu)
    return next(iter(obstacles(version, name, capability)), "")


def obstacles(triton: str | None, name: str, capability: tuple[int, ...]) -> list[str]:
    """Everything that keeps kernels from a GPU, with this version of Triton (None: not there)."""
    found: list[str] = []
    install = "pip install 'tokenyard[cuda]'"
    if triton is None:
        found.append(f"it needs triton {TRITON}, which is not installed: {install}")
    elif not triton_fits(triton):
        found.append(f"it needs triton {TRITON}, and this is triton {triton}: {install}")
    if capability < CAPABILITY:
        least = ".".join(map(str, CAPABILITY))
        found.append(f"it needs compute capability {least}, and {name} is older")
    return found


def triton_fits(version: str) -> bool:
    """Whether kernels run with this Triton."""
    return version.startswith(f"{TRITON}.")
