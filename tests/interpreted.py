"""For test modules whose kernels are interpreted: call :func:`need_interpreter` before importing
Triton.
"""

from __future__ import annotations

import os

import pytest


def need_interpreter() -> None:
    """Skip the module if kernels would be compiled in this process."""
    pytest.importorskip("triton")
    pytest.importorskip("greenlet")
    if os.environ.get("TRITON_INTERPRET") != "1":
        reason = (
            "kernels are compiled in this run (TRITON_INTERPRET is not 1): the simulator is "
            "tested on machines without a GPU"
        )
        pytest.skip(reason, allow_module_level=True)
