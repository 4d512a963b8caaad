"""Engine collective on kernels on a GPU: see ``collective_ranks.py``. With ``make test-gpu``
``test_dispatch_combine.py`` runs it on a GPU per rank too.
"""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from run import command

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("ranks", sorted({1, 3, max(1, torch.cuda.device_count())}))
def test_same_bits_as_the_oracle_and_torch(ranks: int) -> None:
    """Over NCCL, a rank on each GPU; over gloo where ranks share a GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command("collective_ranks", str(ranks)),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" calls") == ranks


def test_few_launches_and_one_wait() -> None:
    """What ``collective_host.py`` counts of calls of 128 tokens."""
    done = subprocess.run(
        command("collective_host", "128"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  fresh FLAT ")]
    launches, waits = next((int(each[4]), int(each[5])) for each in lines if each[3] == "us")
    assert 0 < launches <= 8 and waits == 1
