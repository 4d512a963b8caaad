"""``tests/systems.md`` names what exists: files, functions, tests; and counts what is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import nvlink_mutations
import twolevel_mutations
from low_latency_mutations import MUTATIONS as LOW_LATENCY_MUTATIONS
from run import folders

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "systems.md").read_text()
REFERENCE = re.compile(r"`([\w/]+\.py)(?:::([\w.]+))?`")
SYSTEMS = ("S1", "S2", "S3", "S4", "S5", "S6")


def rows() -> list[tuple[str, list[str]]]:
    """(system, cells) of every row of the tables."""
    found: list[tuple[str, list[str]]] = []
    system = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            system = line[3:5]
        elif line.startswith("| ") and not line.startswith("| element |"):
            found.append((system, [cell.strip() for cell in line.strip("|").split(" | ")]))
    return found


ROWS = rows()


@cache
def names_in(path: Path) -> set[str]:
    """Functions, classes, their methods as ``Class.method``, and names that the module assigns."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def wrong(text: str, *roots: Path) -> list[str]:
    """References in ``text`` to files, or names in them, that are not there."""
    bad: list[str] = []
    for path, name in REFERENCE.findall(text):
        file = next((each / path for each in roots if (each / path).is_file()), None)
        if file is None or (name and name not in names_in(file)):
            bad.append(f"{path}::{name}" if name else path)
    return bad


@pytest.mark.parametrize("system", SYSTEMS)
def test_everything_named_exists(system: str) -> None:
    mine = [cells for each, cells in ROWS if each == system]
    assert len(mine) >= 10
    for element, where, shown in mine:
        assert not wrong(where, ROOT / "src" / "tokenyard"), element
        assert not wrong(shown, *folders()), element


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_element_has_a_test_or_says_that_it_has_none(system: str) -> None:
    for element, _, shown in (cells for each, cells in ROWS if each == system):
        tests = [name for path, name in REFERENCE.findall(shown) if path.startswith("test_")]
        assert all(name.startswith("test_") for name in tests), element
        assert tests or "**missing**" in shown or "**none**" in shown, element


BUGS = re.compile(r"`test_(\w+)\.py::test_a_planted_bug_is_found` \(([^)]*)\)")
MUTATIONS = {
    "nvlink_mutations": nvlink_mutations.MUTATIONS,
    "twolevel_mutations": twolevel_mutations.MUTATIONS,
    "low_latency_simulated": LOW_LATENCY_MUTATIONS,
}
NUMBERS = {"five": 5, "eleven": 11}


def missing_bugs(text: str) -> list[str]:
    """What ``text`` says wrongly of planted bugs: names (or their ends) in brackets behind the
    test, or how many a role has.
    """
    bad: list[str] = []
    for file, bugs in BUGS.findall(text):
        for bug in bugs.split(", "):
            role, _, number = bug.removesuffix(" bugs").rpartition(": ")
            if bug.endswith(" bugs"):
                found = sum(name.startswith(role) for name in MUTATIONS[file]) == NUMBERS[number]
            else:
                found = any(bug in name for name in MUTATIONS[file])
            if not found:
                bad.append(bug)
    return bad


def test_planted_bugs_have_these_names() -> None:
    assert len(BUGS.findall(PAGE)) > 30 and not missing_bugs(PAGE)
    wrong_page = (
        "`test_nvlink_mutations.py::test_a_planted_bug_is_found` (last chunk dropped, no such bug, "
        "push: five bugs)"
    )
    assert missing_bugs(wrong_page) == ["no such bug", "push: five bugs"]


def test_marks_are_counted() -> None:
    shown = [cells[2] for _, cells in ROWS]
    missing = sum("**missing**" in cell for cell in shown)
    partly = sum("**missing**" in cell and bool(REFERENCE.search(cell)) for cell in shown)
    none = sum("**none**" in cell for cell in shown)
    said = f"{len(shown)} elements, {missing} missing ({partly} of them in part), {none} none."
    assert f"Marks: {said}" in PAGE, said


def test_a_wrong_reference_is_found() -> None:
    source = ROOT / "src" / "tokenyard"
    assert wrong(
        "`kernels/nothing.py` `routing.py::nothing` `routing.py::block_offsets`", source
    ) == [
        "kernels/nothing.py",
        "routing.py::nothing",
    ]
    assert not wrong(
        "`engines/status.py::StatusMonitor.wait` `engines/rings.py::DEFAULT_BUFFER_BYTES`", source
    )
