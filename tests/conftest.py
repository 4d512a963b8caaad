from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest_plugins = ["pytester"]

# Without a GPU kernels are interpreted, in the whole process; Triton reads this when it is
# imported. Tests that compile kernels do so in a process of their own.
if (
    os.environ.get("TOKENYARD_TEST_DEVICE", "cpu") in ("cpu", "simulated")
    and not torch.cuda.is_available()
):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Several workers (pytest -n) keep the processors busy already.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU")
    config.addinivalue_line(
        "markers", "portable: of each kind of truth a little, for other versions of Python"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For ``pytest -n 2 --dist loadfile``: files stay whole, for their fixtures, and all that start
    ranks go to one worker.

    To start many ranks takes longer than most tests on them. The same worker runs other files when
    it is through.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "ranks" if _starts_ranks(config.rootpath / path) else path

    return Scheduling(config, log)


@cache
def _starts_ranks(path: Path) -> bool:
    return "@distributed_test" in path.read_text()
