"""House rules that a machine can check: imports point down, files stay small, importing needs no
GPU and does nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tokenyard.engines import known

pytestmark = pytest.mark.portable

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tokenyard"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each module may import from earlier lines only (and, within a line of packages, from its own
# package).
ORDER = [
    ["types", "errors", "version", "forks", "arguments", "dense"],
    ["reference_quant", "reference_picks", "reference_sums"],
    ["reference"],
    ["call_queue", "routing", "launch", "stats", "topology", "transforms"],
    ["config"],
    ["handle", "rows"],
    ["formats", "tracing"],
    ["header", "limits"],
    ["memory"],
    ["rendezvous", "survivors", "redirect"],
    ["admission"],
    ["kernels"],
    ["engines"],
    ["gradients"],
    ["results"],
    ["ops"],
    ["autograd", "checks"],
    ["straight_through"],
    ["guard"],
    ["calls"],
    ["validation"],
    ["recovery"],
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


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


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
    parts = {"reference_picks", "reference_quant", "reference_sums"}
    for name in ("reference", *parts):
        assert imports(PACKAGE / f"{name}.py") <= {"types", *parts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


HOST = [path for path in FILES if unit(path) != "kernels"]


@pytest.mark.parametrize("path", HOST, ids=name_of)
def test_host_functions_are_small(path: Path) -> None:
    """At most 60 lines, docstring included, and 16 parameters."""
    long = {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (
            (node.end_lineno or 0) - node.lineno >= 60
            or len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > 16
        )
    }
    assert not long


def _modules() -> dict[str, Path]:
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES
    }
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def _imported(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of this package that a file imports anywhere: in functions and for the type checker
    too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(modules)


def test_no_import_goes_round_in_a_circle() -> None:
    modules = _modules()
    imported = {name: _imported(path, modules) - {name} for name, path in modules.items()}
    circular: set[str] = set()
    for name in modules:
        reached, waiting = set[str](), list(imported[name])
        while waiting:
            each = waiting.pop()
            if each not in reached:
                reached.add(each)
                waiting += imported[each]
        circular |= {name} & reached
    assert not circular


def test_a_file_name_stands_for_one_thing() -> None:
    """In whatever folder. The shim repeats names of DeepEP's files."""
    seen: dict[str, list[str]] = {}
    for path in FILES:
        if "shim" not in path.parts and path.stem not in ("__init__", "__main__"):
            seen.setdefault(path.stem, []).append(name_of(path))
    assert not {stem: paths for stem, paths in seen.items() if len(paths) > 1}


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if unit(path) == "kernels"],
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


def test_every_folder_stands_in_the_map() -> None:
    """``docs/explanation/architecture.md`` has each folder that holds code, and no other."""
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text().split("## Folders")[1]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    said = {name.strip(" `/") for row in rows for name in row.split(",")}
    assert said == {str(path.parent.relative_to(PACKAGE)) for path in FILES} - {"."}


def test_links_of_the_pages_lead_somewhere_and_pages_stay_short() -> None:
    """Relative links of all Markdown pages, and their anchors; words of all pages together."""
    command = [sys.executable, ROOT / "docs" / "check_links.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    words = int(done.stdout.split()[-2])
    assert words <= 25_000, f"all pages together have {words} words; at most 25,000"


# Engine names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_engine_names_are_spelt_in_one_module(path: Path) -> None:
    """Others import them, so that a new engine is entered once."""
    if path == PACKAGE / "engines" / "known.py":
        return
    spelt = [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in known.ENGINES
    ]
    assert not spelt


# The host path


def test_a_call_passes_few_frames_before_its_launch() -> None:
    """On engine nvlink, from ``ExpertParallel.dispatch`` and ``combine`` to the launch of a bound
    kernel, both included: at most 6 of our functions.
    """
    pytest.importorskip("triton")
    from recorded import our_frames, recorded_object

    sizes = {"num_experts": 8, "hidden": 256, "num_topk": 2, "max_tokens_per_rank": 4}
    ep, memory = recorded_object(**sizes)
    x, idx = torch.zeros(4, 256, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 4)
    known = ep.dispatch(x, idx)
    calls: dict[str, Callable[[], object]] = {
        "fresh": lambda: ep.dispatch(x, idx),
        "static": lambda: ep.dispatch(x, idx, exact=False),
        "cached": lambda: ep.dispatch(x, handle=known.handle),
        "combine": lambda: ep.combine(known.x, known.handle),
    }
    launched: dict[str, set[str]] = {name: set() for name in calls}
    with torch.no_grad():
        for name, call in calls.items():

            def note(kernel: str, name: str = name) -> None:
                frames = our_frames(sys._getframe())
                assert len(frames) <= 6, f"{name}, {kernel}: {' < '.join(frames)}"
                launched[name].add(kernel)

            memory.on_launch = note
            call()
    both = {"plan_kernel", "two_dispatch_kernel"}
    assert launched == {
        "fresh": both,
        "static": both,
        "cached": {"two_dispatch_kernel"},
        "combine": {"push_kernel"},
    }
