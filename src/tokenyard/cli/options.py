"""Options of commands as dataclasses, and what is wrong with them, said before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_type_hints

import torch
import typer

from tokenyard.cli.consoles import leads

T = TypeVar("T")


def option(text: str, show_default: str | bool = True, **known: Any) -> Any:
    """The option of a field, with arguments of ``typer.Option``."""
    return typer.Option(help=text, show_default=show_default, **known)


def bad(option: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=option)


def check_device(device: str) -> str:
    """That torch has one of the kind that ``--device`` names."""
    if device == "cuda" and not torch.cuda.is_available():
        bad("--device", "torch sees no CUDA device here; use cpu")
    return device


Ranks = Annotated[int, option("Local processes; under torchrun its ranks count.", min=1, max=256)]
WHERE = "Where tensors live."
Device = Annotated[Literal["cpu", "cuda"], option(WHERE, callback=check_device)]


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


def words_of(known: Iterable[str], text: str = "") -> Any:
    """The option of a field that takes a comma list of ``known``, which its help ends with."""
    return list_of(word_of(known), text + ", ".join(known))


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


def file(text: str, name: str = "--json") -> Any:
    """The option ``name`` of a field that takes a file to write: with "--plot", a picture."""

    def check(path: Path | None) -> Path | None:
        if path is None or not leads():
            return path
        if name == "--plot" and find_spec("matplotlib") is None:
            bad(name, "it needs matplotlib: pip install 'tokenyard[plots]'")
        if name == "--plot" and path.suffix.lower() != ".png":
            bad(name, f"{path.name!r} must end in .png")
        if not path.absolute().parent.is_dir():
            bad(name, f"{path.parent} is not a directory")
        return path

    return option(text, dir_okay=False, callback=check)
