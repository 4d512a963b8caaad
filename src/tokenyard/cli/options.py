"""Options that several commands have, and what is wrong with them: said before any work, as an
error of usage.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import typer

from tokenyard.engines.select import obstacle_of

PNG = (".png",)


def check_plot(path: Path | None, suffixes: Sequence[str] = PNG) -> None:
    """A figure can be drawn, as a file of a kind in ``suffixes``, where ``--plot`` says.

    Raises:
        BadParameter: matplotlib is not installed, another kind of file, or no directory for it.
    """
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise typer.BadParameter(
            "it needs matplotlib: pip install 'tokenyard[plots]'", param_hint="--plot"
        )
    if path.suffix.lower() not in suffixes:
        raise typer.BadParameter(
            f"{path.name!r} must end in {' or '.join(suffixes)}", param_hint="--plot"
        )
    check_folder(path, "--plot")


def check_folder(path: Path | None, option: str) -> None:
    """There is a directory for the file that ``option`` names.

    Raises:
        BadParameter: there is none.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path.parent} is not a directory", param_hint=option)


def check_device(device: str) -> None:
    """torch has a device of the kind that ``--device`` names.

    Raises:
        BadParameter: it has none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use cpu", param_hint="--device")


def check_engine(engine: str, device: str) -> None:
    """The ``--engine`` is not one whose kernels need GPUs where ranks work on the CPU. (Whether it
    fits GPUs, ranks find out.)

    Raises:
        BadParameter: it is.
    """
    if device == "cpu" and engine not in ("auto", "collective"):
        why = f"engine {engine!r} cannot work here: {obstacle_of(None)}; engine 'collective' can"
        raise typer.BadParameter(why, param_hint="--engine")
