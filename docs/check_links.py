"""Checks the Markdown pages: relative links lead to files, anchors to headings; counts words.

``python docs/check_links.py`` prints what is broken, and exits with 1 if anything is.
``tests/unit/test_house.py`` runs it.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def pages() -> list[Path]:
    """All Markdown pages."""
    folders = ("docs", "compat", "tests")
    return sorted(
        [*ROOT.glob("*.md"), *(page for each in folders for page in (ROOT / each).rglob("*.md"))]
    )


@cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


def broken() -> list[str]:
    """``page: link`` of every link that leads nowhere."""
    bad: list[str] = []
    for page in pages():
        for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
            if "://" in target:
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                bad.append(f"{page.relative_to(ROOT)}: {target}{'#' if anchor else ''}{anchor}")
    return bad


def words() -> int:
    """Words of README, CONTRIBUTING and ``docs``, records of measurements left out."""
    mine = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sum(len(page.read_text().split()) for page in mine if "benchmarks" not in page.parts)


if __name__ == "__main__":
    print(*broken(), f"{words()} words", sep="\n")
    sys.exit(bool(broken()))
