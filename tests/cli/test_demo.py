"""``tokenyard demo``: its layer against dense torch, its check against wrong gradients, and the
whole command on real ranks.
"""

from __future__ import annotations

import io
import re
import struct
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import tokenyard as ty
from nvlink_pool import SOAK
from tokenyard import launch
from tokenyard.cli import app, demo, options
from tokenyard.cli.consoles import bytes_text, seconds_text
from tokenyard.cli.demo import (
    MoeLayer,
    Options,
    Part,
    print_result,
    relative_error,
    results,
    run_rank,
)

SHAPE = Options(hidden=8, experts=5, topk=2)
TEXT = "The tokens of this text are its bytes, and no two ranks get equally many of them.\n"
SMALL = ["--hidden", "16"]


def dense_output(layer: MoeLayer, tokens: Tensor) -> Tensor:
    """Every expert on every token, weighted with the router's choice (0 for experts not chosen)."""
    x = layer.embedding.weight[tokens]
    gate, up, down = (
        torch.stack([getattr(expert, name).weight for expert in layer.experts])
        for name in ("gate", "up", "down")
    )
    scores = (x @ layer.router.weight.T).softmax(-1)
    chosen = scores >= scores.topk(SHAPE.topk).values[:, -1:]
    share = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
    inner = functional.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    return torch.einsum("te,tef,ehf->th", share, inner, down)


def invoke(*args: str) -> tuple[int, str]:
    """Exit code and output of ``tokenyard demo``, without line breaks and boxes."""
    result = CliRunner().invoke(app, ["demo", *args])
    return result.exit_code, " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def some_result(**errors: float) -> list[Part]:
    why = "collective: because"
    return [
        Part(why, 2, 3, [0, 1500], [0, 30], [4, 0], errors),
        Part(why, 1, 2, [30, 0], [1500, 0], [2], dict.fromkeys(errors, 0.0)),
    ]


# The layer and the check


def compared(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(tensor, want[name]) for name, tensor in got.items()}


def test_layer_equals_dense_torch():
    tokens = torch.tensor(list(TEXT.encode()))
    gradient = torch.randn(len(tokens), SHAPE.hidden, generator=torch.Generator().manual_seed(0))
    got, want = MoeLayer(SHAPE), MoeLayer(SHAPE)
    y, dense = got(tokens), dense_output(want, tokens)
    y.backward(gradient)
    dense.backward(gradient)
    errors = compared(results(got, y), results(want, dense))
    kinds = [name.split()[0] for name in errors]
    assert kinds == ["output", "embedding", "router", "gate", "up", "down"]
    assert max(errors.values()) < 1e-6


def test_a_wrong_or_missing_gradient_shows():
    layers = MoeLayer(SHAPE), MoeLayer(SHAPE)
    for layer in layers:
        y = layer(torch.arange(256))
        y.sum().backward()
    good, other = (results(layer, torch.ones(1)) for layer in layers)
    assert set(compared(good, other).values()) == {0.0}
    layers[0].experts[2].gate.weight.grad.mul_(1.001)
    layers[0].router.weight.grad = None
    one = slice(2, 3)
    wrong = compared(*(results(layer, torch.ones(1), one) for layer in layers))
    assert {name for name, error in wrong.items() if error > 1e-5} == {
        "gate gradient",
        "router gradient",
    }
    assert wrong["gate gradient"] == pytest.approx(1e-3, rel=1e-3)
    assert wrong["router gradient"] == 1


def test_relative_error_is_never_nan():
    zeros, ones = torch.zeros(2), torch.ones(2)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(ones, zeros) == float("inf")
    assert relative_error(ones * float("nan"), ones) == float("inf")
    assert relative_error(ones * float("inf"), ones) == float("inf")


def test_the_check_finds_a_broken_expert(monkeypatch: pytest.MonkeyPatch):
    right = MoeLayer.over_ranks

    def broken(layer: MoeLayer, *known: Any) -> Any:
        layer.experts[0].gate.weight.data.mul_(1.01)
        return right(layer, *known)

    monkeypatch.setattr(MoeLayer, "over_ranks", broken)
    store = launch.local_store()
    with launch.joined(0, 1, port=store.port) as here:
        [result] = run_rank(here, SHAPE, TEXT.encode())
    wrong = {name for name, error in result.errors.items() if error > demo.LIMIT}
    shared = {"output", "embedding gradient", "router gradient"}
    assert wrong == shared | {f"{name} gradient" for name in ("gate", "up", "down")}
    assert sum(result.load) == len(TEXT) * SHAPE.topk


# What is printed


def test_report_names_what_is_wrong_on_any_rank():
    out = io.StringIO()
    parts = some_result(output=0.0, gate=0.5, up=1e-9)
    parts[1].errors["gate"] = 0.75
    assert not print_result(Console(file=out, width=100), parts)
    assert "MISMATCH: gate: relative error 7.5e-01, but the limit is 1e-05" in out.getvalue()
    assert out.getvalue().count("MISMATCH") == 1
    assert "1.5 kB" in out.getvalue()


def test_numbers_are_readable():
    assert [bytes_text(n) for n in (0, 999, 1000, 1234567, 2e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "2 TB",
    ]
    assert [seconds_text(s) for s in (4e-6, 0.00123, 0.9999, 12)] == [
        "4 us",
        "1.23 ms",
        "1 s",
        "12 s",
    ]


# The command


@pytest.mark.parametrize(
    "options",
    [
        ["--ranks", "2", "--topk", "3", "--steps", "2"],
        ["--ranks", "3", "--experts", "2", "--tokens", "2"],
    ],
    ids=["two ranks", "ranks without tokens or experts"],
)
def test_demo_matches_one_process(options: list[str], text: str):
    code, out = invoke("--text", text, *SMALL, *options)
    assert code == 0, out
    assert f"{options[1]} ranks on cpu" in out
    assert "Engine collective:" in out
    assert "The output and all" in out
    assert "MISMATCH" not in out


def test_demo_draws_a_figure(text: str, tmp_path: Path):
    figure = tmp_path / "traffic.png"
    code, out = invoke("--text", text, "--ranks", "2", *SMALL, "--plot", str(figure))
    assert code == 0, out
    signature, width, height = struct.unpack(">8s8x2I", figure.read_bytes()[:24])
    assert signature == b"\x89PNG\r\n\x1a\n"
    assert (width, height) == (1800, 780)


def test_demo_runs_under_torchrun(text: str):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*command, "-m", "tokenyard", "demo", "--text", text, *SMALL],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 ranks on cpu") == 1
    assert "The output and all" in done.stdout


def test_a_mismatch_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, text: str):
    errors = {"output": 0.0, "up[1] gradient": 2e-5}
    monkeypatch.setattr(demo, "on_all_ranks", lambda *_: some_result(**errors))
    code, out = invoke("--text", text)
    assert code == 1
    assert "MISMATCH: up[1] gradient" in out


def test_default_text_is_the_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Which an installed package has as metadata."""
    info = tmp_path / "tokenyard-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tokenyard\nVersion: 0\n\n# Hello\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(demo, "on_all_ranks", lambda *_: some_result(output=0.0))
    code, out = invoke("--tokens", "3")
    assert code == 0
    assert "3 bytes of tokenyard's README" in out


def test_without_any_readme_a_text_must_be_named(monkeypatch: pytest.MonkeyPatch):
    def nothing(_: str) -> None:
        raise PackageNotFoundError

    monkeypatch.setattr(demo, "metadata", nothing)
    code, out = invoke()
    assert code == 2
    assert "name a file" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "no/such/file"], "cannot read no/such/file: No such file"),
        (["--text", "."], "cannot read .: Is a directory"),
        (["--text", "/dev/null"], "null is empty"),
        (["--topk", "17"], "17 experts per token, but there are 16"),
        (["--ranks", "0"], "Invalid value for '--ranks'"),
        (["--ranks", "257"], "should be less than or equal to 256"),
        (["--tokens", "0"], "Invalid value for '--tokens'"),
        (["--engine", "warp"], "'warp' is unknown; use one of auto"),
        (
            ["--engine", "nvlink"],
            "Invalid value for --engine: engine 'nvlink' cannot work here: it needs CUDA devices",
        ),
        (
            ["--engine", "low_latency"],
            "'low_latency' cannot work here: it needs CUDA devices, and a rank works on",
        ),
        (["--device", "tpu"], "'tpu' is not one of 'cpu'"),
        (["--plot", "figure.bmp"], "'figure.bmp' must end in .png"),
        (["--plot", "no/such/figure.png"], "no/such is not a directory"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str):
    code, out = invoke(*options)
    assert code == 2
    assert message in out


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    code, out = invoke("--plot", "figure.png")
    assert code == 2
    assert "Invalid value for --plot: it needs matplotlib: pip install 'tokenyard[plots]'" in out


@pytest.mark.parametrize("missing", ["typer", "rich"][:SOAK])
def test_command_line_without_its_extra_says_so(missing: str):
    program = (
        f"import sys; sys.modules[{missing!r}] = None; import runpy; "
        f"runpy.run_module('tokenyard', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        == f"tokenyard: the command line needs {missing}: pip install 'tokenyard[cli]'"
    )


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, f"tokenyard {ty.__version__}")
