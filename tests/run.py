"""Runs a program of the tests: ``python tests/run.py NAME ARGUMENTS``, for instance ``four_on_two
--help``.

Modules of all folders here are imported by their bare names; pytest has the folders from
``pyproject.toml``, a program from this one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def command(name: str, *arguments: str) -> list[str]:
    """Runs ``name`` in a process of its own."""
    return [sys.executable, str(Path(__file__).resolve()), name, *arguments]


def folders() -> list[Path]:
    """Where files of the tests are: this folder and its lanes."""
    return [
        TESTS,
        *sorted(each for each in TESTS.iterdir() if each.is_dir() and "__" not in each.name),
    ]


def main(name: str, *arguments: str) -> None:
    """Becomes the program, which finds all modules of the tests, ``benchmarks`` and ``src``."""
    found = [each / f"{name}.py" for each in folders() if (each / f"{name}.py").is_file()]
    if not found:
        sys.exit(f"no folder of {TESTS} has {name}.py")
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = [*map(str, folders()), str(TESTS.parent), *given, str(TESTS.parent / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.execv(sys.executable, [sys.executable, str(found[0]), *arguments])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
