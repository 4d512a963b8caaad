"""Programs that import ``deep_ep`` by that name: run without installing anything, or with the small
distribution in ``compat``.
"""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from deep_ep_program_calls import SOURCES, python, site_of
from nvlink_pool import SOAK
from tokenyard.deep_ep.__main__ import main
from tokenyard.deep_ep.generations import GENERATIONS


def test_run_a_program_with_ranks_of_its_own(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("deep_ep_program.py"))
    store = str(tmp_path / "store")
    done = python("-m", "tokenyard.deep_ep", "run", program, store, "--flag", "-x", path=[SOURCES])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all ranks agree ['--flag', '-x']"


@pytest.mark.parametrize("generation", ["2.5", "2"][:SOAK])
def test_run_a_program_of_a_later_generation(generation: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    program = str(Path(__file__).with_name("deep_ep_v2_program.py"))
    call = "-m", "tokenyard.deep_ep", "run", "--generation", generation, program, "--flag"
    done = python(*call, path=[SOURCES], MASTER_PORT=port)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all ranks agree ['--flag']"


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options, generation in (
        (["--generation", "2"], "2"),
        (["--generation=2.5"], "2.5"),
        ([], "1"),
    ):
        assert main(["path", *options]) == 0
        shim = Path(capsys.readouterr().out.strip())
        assert shim == GENERATIONS[generation].path and (shim / "deep_ep" / "__init__.py").exists()
    assert main(["--help"]) == main(["-h"]) == 0
    assert capsys.readouterr().out.count("usage: ") == 2
    for wrong in ([], ["run"], ["walk", "x.py"], ["path", "x"], ["run", "--generation", "2"]):
        assert main(wrong) == 2
        assert "] SCRIPT" in capsys.readouterr().err
    for wrong in (["--generation", "3"], ["--generation=V2"], ["--generation"]):
        assert main(["run", *wrong, "x.py"][: 2 + len(wrong)]) == 2
        said = capsys.readouterr().err
        assert "--generation ('" in said and "must be one of 1, hybrid, 2, 2.5" in said


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
    return site_of(tmp_path)


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
