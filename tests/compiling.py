"""Runs programs that compile kernels: in the tests' own process they are interpreted."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from run import command


def compiled(program: str, *arguments: str) -> Any:
    """What ``program`` prints as JSON in its last line."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        command(program, *arguments), capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
