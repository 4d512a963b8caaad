"""What users copy must run: the README's example and the files under ``examples/``, as
they stand.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme_example(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    assert len(blocks[0].splitlines()) <= 16
    script = tmp_path / "example.py"
    script.write_text(blocks[0])
    out = run(*TORCHRUN, str(script))
    assert out.count("torch.Size([1000, 512])") == 2


@pytest.mark.parametrize(
    "launcher", [[sys.executable], TORCHRUN][:SOAK], ids=["python", "torchrun"][:SOAK]
)
def test_grouped_matmul(launcher: list[str]) -> None:
    out = run(*launcher, str(ROOT / "examples" / "grouped_matmul.py"))
    assert out.count("relative error") == 2


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="runs here: test_decode_loop_in_a_graph")
def test_decode_loop_says_what_it_needs() -> None:
    command = [sys.executable, str(ROOT / "examples" / "decode_loop.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs 2 GPUs" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: make test-gpu")
def test_decode_loop_in_a_graph() -> None:
    assert run(sys.executable, str(ROOT / "examples" / "decode_loop.py")).count("20 steps") == 2


@distributed_test(world_size=2)
def test_decode_loop_without_a_graph(ranks: Ranks) -> None:
    decode = runpy.run_path(str(ROOT / "examples" / "decode_loop.py"))["decode"]
    assert 0 < decode(torch.device("cpu"), 2) < 1e-2
