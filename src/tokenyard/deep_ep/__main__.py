"""``python -m tokenyard.deep_ep run SCRIPT ...``: run a program that imports ``deep_ep``, unchanged
and without installing it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenyard

SHIM = Path(__file__).parent / "shim"
"""Holds modules named ``deep_ep`` and ``deep_ep_cpp``."""

USAGE = """usage: python -m tokenyard.deep_ep run SCRIPT [ARGUMENT ...]
       python -m tokenyard.deep_ep run -m MODULE [ARGUMENT ...]
       python -m tokenyard.deep_ep path

run:  start this Python with the rest of the line; there, and in every process it starts,
      `import deep_ep` finds tokenyard's.
path: print the directory to put on PYTHONPATH for the same effect."""


def search_path(present: str) -> str:
    """``PYTHONPATH`` for a program: the shim first, tokenyard last."""
    root = Path(tokenyard.__file__).parent.parent
    return os.pathsep.join([str(SHIM), *filter(None, [present]), str(root)])


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the program; returns only if there is none."""
    if list(arguments) == ["path"]:
        print(SHIM)
        return 0
    if len(arguments) < 2 or arguments[0] != "run":
        print(USAGE, file=sys.stderr)
        return 2
    environment = {**os.environ, "PYTHONPATH": search_path(os.environ.get("PYTHONPATH", ""))}
    os.execve(sys.executable, [sys.executable, *arguments[1:]], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
