"""The command line: ``tokenyard`` and ``python -m tokenyard``. Needs the extra ``cli``."""

from __future__ import annotations

import os
from typing import Annotated

try:
    import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"tokenyard: the command line needs {missing.name}: pip install 'tokenyard[cli]'"
    ) from None

from tokenyard import __version__
from tokenyard.cli import bench, demo, doctor, plan_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for run in (demo.demo, bench.bench, doctor.doctor, plan_command.plan):
    app.command()(run)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tokenyard {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]


@app.callback()
def tokenyard(version: Version = False) -> None:
    """Expert-parallel dispatch and combine for mixture-of-experts models."""


def main() -> None:
    """Run the command of ``sys.argv``. What the system refuses (no room where stdout goes, or where
    a file is written) is said in one line, with exit code 1."""
    try:
        try:
            app(prog_name="tokenyard")
        finally:
            print(end="", flush=True)
    except OSError as error:
        if error.errno is None:  # not the system's: a peer that did not answer, say
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter writes what is left
        raise SystemExit(f"tokenyard: {error}") from None
