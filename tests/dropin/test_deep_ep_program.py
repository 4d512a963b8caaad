"""Programs that import ``deep_ep`` by that name: run without installing anything, or with the small
distribution in ``compat``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenyard.deep_ep.__main__ import SHIM, main

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
COMPAT = ROOT / "compat" / "deep_ep"


def python(*arguments: str, path: list[Path]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_run_a_program_with_ranks_of_its_own(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("deep_ep_program.py"))
    store = str(tmp_path / "store")
    done = python("-m", "tokenyard.deep_ep", "run", program, store, "--flag", "-x", path=[SOURCES])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all ranks agree ['--flag', '-x']"


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["path"]) == 0
    assert capsys.readouterr().out.strip() == str(SHIM)
    for wrong in ([], ["run"], ["walk", "x.py"]):
        assert main(wrong) == 2
        assert "run SCRIPT" in capsys.readouterr().err


def test_import_is_quiet() -> None:
    """Neither CUDA, Triton, a process group, a thread, the environment nor a word."""
    code = (
        "import os, sys, threading, torch; before = set(threading.enumerate()), dict(os.environ); "
        "import tokenyard.deep_ep;"
        "assert 'triton' not in sys.modules and not torch.cuda.is_initialized();"
        "assert not torch.distributed.is_initialized() and before == (set(threading.enumerate()), "
        "dict(os.environ))"
    )
    done = python("-c", code, path=[SOURCES])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site directory as ``pip install ./compat/deep_ep`` leaves it."""
    shutil.copytree(COMPAT / "tokenyard_deep_ep", tmp_path / "site" / "tokenyard_deep_ep")
    shutil.copy(COMPAT / "tokenyard_deep_ep.pth", tmp_path / "site")
    return tmp_path / "site"


def imported(site: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    code = f"import site; site.addsitedir({str(site)!r}); import deep_ep; print(deep_ep.__file__)"
    return python("-c", code, path=[SOURCES, *path])


def test_the_installed_name(site: Path) -> None:
    done = imported(site)
    assert done.stdout.strip() == str(site / "tokenyard_deep_ep" / "deep_ep" / "__init__.py"), (
        done.stderr
    )


def test_a_real_deep_ep_wins(site: Path, tmp_path: Path) -> None:
    real = tmp_path / "real" / "deep_ep"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("")
    assert imported(site, tmp_path / "real").stdout.strip() == str(real / "__init__.py")


def test_refuses_to_stand_in_for_an_installed_deep_ep(site: Path, tmp_path: Path) -> None:
    """One that Python finds later only, as some editable installs are, is named."""
    facts = tmp_path / "real" / "deep_ep-1.2.1.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deep_ep\nVersion: 1.2.1+567632d\n"
    )
    done = imported(site, tmp_path / "real")
    assert done.returncode == 1 and "ImportError: deep_ep 1.2.1+567632d is installed" in done.stderr


@pytest.mark.parametrize("name", ["deep_ep/utils.py", "deep_ep/buffer.py", "deep_ep_cpp.py"])
def test_both_ways_give_the_same(name: str) -> None:
    assert (COMPAT / "tokenyard_deep_ep" / name).read_text() == (SHIM / name).read_text()


def test_both_ways_give_the_same_names() -> None:
    """The installed package checks first; then both import the same names."""
    installed, shim = (
        (root / "deep_ep" / "__init__.py").read_text()
        for root in (COMPAT / "tokenyard_deep_ep", SHIM)
    )
    assert installed.partition("__all__")[2] == shim.partition("__all__")[2] != ""
