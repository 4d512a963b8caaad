"""Asking questions that may raise, crash or hang, without being taken down by them.

Light questions run on a thread that is abandoned when time is up. What may hang for good (a driver,
ranks that wait for each other) or crash runs in a process of its own, which is killed with all its
children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, NamedTuple, TypeVar

T = TypeVar("T")

KILL_SECONDS = 2.0
"""A killed process that is still there after this (stuck inside a driver) is left behind."""

NO_ANSWER = "no answer within"
"""How the reason begins when time was up."""

NOT_ASKED = "no process to ask in"
"""How the reason begins where no process could be started, or no file be made for its answers."""

NO_NVML = "nvidia-ml-py is not installed: pip install 'tokenyard[cuda]'"

MOST_OUTPUT = 1 << 20
LONGEST_REASON = 500

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Variables of a launcher, which a process of our own must not take for its own."""


class Finished(NamedTuple):
    """What a command came to; ``code`` is None if time was up first."""

    code: int | None
    out: str
    err: str

    def why(self, timeout: float) -> str:
        """What went wrong, in one line."""
        if self.code is None:
            return f"{NO_ANSWER} {timeout:g} s"
        end = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return f"{end}: {shortened(lines[-1].strip())}" if lines else end


class Asker:
    """Asks questions, and remembers why some had no answer (``untold``, by name). ``timeout`` is in
    seconds, for each.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.untold: dict[str, str] = {}

    def ask(self, name: str, probe: Callable[[], T]) -> T | None:
        """The answer of ``probe``, or None if it raised."""
        try:
            return probe()
        except Exception as error:
            self.untold[name] = reason(error)
            return None

    def ask_soon(self, name: str, probe: Callable[[], T]) -> T | None:
        """The answer of ``probe``, or None if it raised or took too long."""
        return self.ask(name, lambda: in_time(probe, self.timeout))

    def process(
        self, names: Sequence[str], *arguments: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask ``tokenyard.cli.doctor_child``; answers by name, and reasons for what has none."""
        program = [sys.executable, "-m", "tokenyard.cli.doctor_child"]
        try:
            return ask_child(program, names, arguments, self.timeout)
        except Exception as error:
            return {}, dict.fromkeys(names, f"{NOT_ASKED}: {reason(error)}")

    def ask_process(self, names: Sequence[str], *arguments: str) -> dict[str, Any]:
        """The answers; one that has none is left out."""
        answers, errors = self.process(names, *arguments)
        self.untold.update(errors)
        return answers


def in_time(probe: Callable[[], T], timeout: float) -> T:
    """``probe()``, or ``TimeoutError`` after ``timeout`` seconds (its thread is then left to
    itself).
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(probe())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout)
    for error in errors:
        raise error
    if not answers:
        raise TimeoutError(f"{NO_ANSWER} {timeout:g} s")
    return answers[0]


def ask_child(
    program: Sequence[str], names: Sequence[str], arguments: Sequence[str], timeout: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run ``program RESULTS *arguments``, which writes one JSON line per answer to the file
    ``RESULTS``.

    Returns:
        Answers by name, and for each of ``names`` without an answer the reason. What was answered
            before a crash or a hang counts.
    """
    with TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        done = run([*program, str(results), *arguments], timeout, env=without_launcher(os.environ))
        lines = results.read_text().splitlines()
    answers: dict[str, Any] = {}
    errors = dict.fromkeys(names, done.why(timeout))
    for line in lines:
        try:
            told: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # cut short when the process was killed
        errors.pop(told["name"], None)
        if "error" in told:
            errors[told["name"]] = told["error"]
        else:
            answers[told["name"]] = told["value"]
    return answers, errors


def run(command: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> Finished:
    """Run a command in a session of its own; when ``timeout`` seconds are over, or this process is
    interrupted, kill all of it.

    Its output goes through files: a pipe that some grandchild keeps open would be waited for.
    """
    with TemporaryFile() as out, TemporaryFile() as err:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        start: Any = subprocess.Popen
        process = start(command, env=env, start_new_session=True, **streams)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
        return Finished(code, _text(out), _text(err))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(KILL_SECONDS)
    except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
        pass


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_OUTPUT).decode(errors="replace")


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, but for what ``torchrun`` put there."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER and not name.startswith(LAUNCHER_PREFIXES)
    }


def reason(error: BaseException) -> str:
    """An exception as text. Of a traceback within its message (a rank's) only what it ended with is
    kept.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    head, traced, _ = str(error).partition("\nTraceback (")
    if not traced:
        return shortened(text)
    last = text.rpartition("\nTraceback (")[2].splitlines()[1:]
    end = next((at for at, line in enumerate(last) if line and not line[0].isspace()), 0)
    return shortened(f"{head} {' '.join(line.strip() for line in last[end:])}".strip())


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
