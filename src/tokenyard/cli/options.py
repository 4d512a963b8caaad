"""Options of commands as dataclasses, and what is wrong with them, said before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from inspect import Signature, signature
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import torch
import typer

MOST_PROCESSES = 256
"""That a command starts."""
T = TypeVar("T")


def option(text: str, **known: Any) -> Any:
    """The option of a field; ``known`` are arguments of ``typer.Option``."""
    return typer.Option(help=text, **known)


def word_of(known: Iterable[str]) -> Callable[[str], str]:
    """What parses one of ``known``, in small letters or large."""

    def parse(text: str) -> str:
        if (found := text.strip().lower()) not in known:
            raise typer.BadParameter(f"{found!r} is unknown; use one of {', '.join(known)}")
        return found

    return parse


def list_of(parse: Callable[[str], object], text: str) -> Any:
    """The option of a field that takes a comma list."""

    def parse_all(given: str) -> list[object]:
        return [parse(word) for word in given.split(",")]

    return option(text, parser=parse_all, metavar="LIST")


def command(kind: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a function of one argument a command: its options are fields of dataclass ``kind``."""

    def decorate(run: Callable[[T], None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            run(kind(**given))

        made: Any = call
        hints = get_type_hints(kind, include_extras=True)
        fields = signature(kind).parameters.items()
        made.__signature__ = Signature([e.replace(annotation=hints[name]) for name, e in fields])
        made.__annotations__, made.__doc__, made.__name__ = hints, run.__doc__, run.__name__
        return call

    return decorate


def bad(option: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=option)


def check_folder(path: Path | None, option: str) -> None:
    """There is a directory for the file that ``option`` names."""
    if path is not None and not path.absolute().parent.is_dir():
        bad(option, f"{path.parent} is not a directory")


def check_plot(path: Path | None) -> None:
    """A figure can be drawn where ``--plot`` says."""
    if path is None:
        return
    if find_spec("matplotlib") is None:
        bad("--plot", "it needs matplotlib: pip install 'tokenyard[plots]'")
    if path.suffix.lower() != ".png":
        bad("--plot", f"{path.name!r} must end in .png")
    check_folder(path, "--plot")


def check_device(device: str) -> None:
    """torch has a device of the kind that ``--device`` names."""
    if device == "cuda" and not torch.cuda.is_available():
        bad("--device", "torch sees no CUDA device here; use cpu")
