"""Whoever installs tokenyard, without extras or with those that a folder needs, can import it: what
source files import is declared.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tokenyard"
EXTRAS = {
    "kernels": ("cuda",),
    "testing": ("cuda", "test"),  # the kit is for who tests with it
    "integrations": ("transformers", "megatron"),
    "cli": ("cli", "plots"),
}
"""Of files of a folder; others have none."""
MODULES = {"nvidia-ml-py": "pynvml", "megatron-core": "megatron", "pytest": "_pytest"}
"""Where a module is not called as its project."""
WITH_TORCH = {"typing_extensions"}


def declared(extras: tuple[str, ...]) -> set[str]:
    """Modules that ``pip install`` brings with ``extras``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][each] for each in extras)]
    names = {re.split(r"[^\w.-]", line)[0] for each in lists for line in each}
    brought = {MODULES.get(name, name) for name in names} | WITH_TORCH
    return brought | {"tokenyard", *sys.stdlib_module_names}


def imported(path: Path) -> set[str]:
    """Modules of others that a file imports, wherever in it."""
    tree, names = ast.parse(path.read_text()), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("folder", sorted({"", *(p.name for p in SOURCE.iterdir() if p.is_dir())}))
def test_what_is_imported_is_declared(folder: str) -> None:
    files = (SOURCE / folder).rglob("*.py") if folder else SOURCE.glob("*.py")
    known = declared(EXTRAS.get(folder, ()))
    missing = {path.name: imported(path) - known for path in files if imported(path) - known}
    assert not missing
