"""House rules that a machine can check: imports point down, files stay small, importing needs no
GPU and does nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.portable

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tokenyard"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each module may import from earlier lines only (and, within a line of packages, from its own
# package).
ORDER = [
    ["types", "errors", "version", "forks", "whole"],
    ["reference_quant", "reference_picks"],
    ["reference"],
    ["lane", "layout", "launch", "stats", "topology", "transforms"],
    ["config"],
    ["handle", "rows"],
    ["formats"],
    ["header", "limits"],
    ["memory"],
    ["rendezvous"],
    ["kernels"],
    ["engines"],
    ["gradients"],
    ["results", "ops"],
    ["autograd", "checks"],
    ["calls"],
    ["api"],
    ["tokenyard"],
    ["integrations", "deep_ep"],
    ["testing"],
    ["planner"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def unit(path: Path) -> str:
    """The line of :data:`ORDER` that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "tokenyard" if first == "__init__" else first


def imports(path: Path) -> set[str]:
    """Units of this package that a file imports when it runs; imports for the type checker only are
    not among them.
    """
    tree = ast.parse(path.read_text())
    checking = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in checking:
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module == "tokenyard":
            names = [alias.name if alias.name in LEVEL else "tokenyard" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokenyard."):
            names = [node.module.split(".")[1]]
        elif isinstance(node, ast.Import):
            names = ["tokenyard" for alias in node.names if alias.name.split(".")[0] == "tokenyard"]
        found.update(names)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    mine = unit(path)
    upward = {name for name in imports(path) if name != mine and LEVEL[name] >= LEVEL[mine]}
    assert not upward, f"{path.name} imports from its own line or from above: {upward}"


def test_the_oracle_stands_alone() -> None:
    for name in ("reference", "reference_picks", "reference_quant"):
        assert imports(PACKAGE / f"{name}.py") <= {"types", "reference_picks", "reference_quant"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 550


WITHOUT_STRUCTS = {
    "names",
    "region",
    "sync",
    "types",
}
"""Kernel files that still take every constant as a parameter of its own: none may be added."""


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if unit(path) == "kernels" and path.stem not in WITHOUT_STRUCTS],
    ids=lambda p: p.stem,
)
def test_kernels_take_structs(path: Path) -> None:
    """At most 16 parameters, 60 lines of a function, 100 columns."""
    text = path.read_text()
    assert not [line for line in text.splitlines() if len(line) > 100]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert len(node.args.args) + len(node.args.kwonlyargs) <= 16, (
                f"{node.name} has too many parameters"
            )
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, (
                f"{node.name} is too long"
            )


def test_import_is_quiet_and_needs_no_gpu() -> None:
    """No CUDA context, no Triton, no process group, no thread, no output."""
    code = (
        "import sys, threading, torch; before = set(threading.enumerate()); import tokenyard;"
        "assert 'triton' not in sys.modules and not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized() and set(threading.enumerate()) == before"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_file_stands_in_the_map() -> None:
    """``docs/architecture.md`` has one line for each file."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    missing = [
        str(path.relative_to(PACKAGE))
        for path in FILES
        if f"`{path.relative_to(PACKAGE)}`" not in text
    ]
    assert not missing
