from __future__ import annotations

import os

import pytest
import torch

pytest_plugins = ["pytester"]

# Without a GPU kernels are interpreted, in the whole process; Triton reads this when it is imported. Tests that compile kernels
# do so in a process of their own.
if os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") in ("cpu", "simulated") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")
