"""Runs programs of this directory that compile kernels: in the tests' own process they are
interpreted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def compiled(script: str, *arguments: str) -> Any:
    """What ``script`` prints as JSON in its last line."""
    pytest.importorskip("triton")
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
