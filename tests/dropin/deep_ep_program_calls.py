"""How tests start programs that import ``deep_ep``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
COMPAT = ROOT / "compat" / "deep_ep"


def python(*arguments: str, path: list[Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """This Python, with ``path`` and ``variables`` in its environment."""
    joined = os.pathsep.join(map(str, path))
    environment = {**os.environ, "PYTHONPATH": joined, **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def site_of(folder: Path) -> Path:
    """A site directory as ``pip install ./compat/deep_ep`` leaves it."""
    site = folder / "site"
    shutil.copytree(COMPAT / "tokenyard_deep_ep", site / "tokenyard_deep_ep")
    shutil.copy(COMPAT / "tokenyard_deep_ep.pth", site)
    return site
