"""``python -m tokenyard.deep_ep run SCRIPT``: run a program that imports ``deep_ep``, unchanged."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenyard
from tokenyard.deep_ep.generations import GENERATIONS, known

USAGE = f"""usage: python -m tokenyard.deep_ep run [--generation G] SCRIPT [ARGUMENT ...]
       python -m tokenyard.deep_ep run [--generation G] -m MODULE [ARGUMENT ...]
       python -m tokenyard.deep_ep path [--generation G]

run:  start this Python with the rest of the line; there, and in every process it starts,
      `import deep_ep` finds tokenyard's.
path: print the directory to put on PYTHONPATH for the same effect.
G:    whose names programs find, {", ".join(GENERATIONS)} (default 1): Buffer; Buffer and
      HybridEPBuffer (branch hybrid-ep); ElasticBuffer and Buffer; EPBuffer."""


def _generation(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of a leading ``--generation``, and the rest."""
    first = arguments[0] if arguments else ""
    if first.startswith("--generation="):
        return first.partition("=")[2], arguments[1:]
    if first == "--generation":
        return arguments[1] if len(arguments) > 1 else "", arguments[2:]
    return "1", arguments


def main(arguments: Sequence[str]) -> int:
    """Replace this process by the program; returns only if there is none."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    name, rest = _generation(list(arguments[1:]))
    try:
        shim = known(name).path
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if list(arguments[:1]) == ["path"] and not rest:
        print(shim)
        return 0
    if list(arguments[:1]) != ["run"] or not rest:
        print(USAGE, file=sys.stderr)
        return 2
    before, root = os.environ.get("PYTHONPATH"), Path(tokenyard.__file__).parent.parent
    path = os.pathsep.join(filter(None, [str(shim), before, str(root)]))
    os.execve(sys.executable, [sys.executable, *rest], {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
