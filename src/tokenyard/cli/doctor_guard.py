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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from threading import Thread
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

KILL_SECONDS = 2.0
"""A killed process that is still there after this (stuck inside a driver) is left behind."""

NO_ANSWER = "no answer within"
"""How the reason begins when time was up."""

NOT_ASKED = "no process to ask in"
"""How the reason begins where no process could be started, or no file be made for its answers."""

NO_NVML = "nvidia-ml-py is not installed: pip install 'tokenyard[cuda]'"

CHILD = "import sys; from tokenyard.cli.doctor_child import main; main(*sys.argv[1:])"

MOST_OUTPUT = 1 << 20
LONGEST_REASON = 500

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
"""Variables of a launcher, which a process of our own must not take for its own."""


class Finished(NamedTuple):
    """What a command came to: all that it said, and how it ended, in one line."""

    output: str
    why: str


class Asker:
    """Asks questions, and remembers why some had no answer (``untold``, by name). ``timeout`` is in
    seconds, for each. ``program`` answers in a process of its own (default:
    ``tokenyard.cli.doctor_child``).
    """

    def __init__(
        self, timeout: float, program: Sequence[str] = (sys.executable, "-c", CHILD)
    ) -> None:
        self.timeout, self.program = timeout, program
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

    def ask_process(self, names: Iterable[str], *arguments: str) -> dict[str, Any]:
        """The answers; one that has none is left out."""
        answers, errors = self.process(names, *arguments)
        self.untold.update(errors)
        return answers

    def process(
        self, names: Iterable[str], *arguments: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Run ``program RESULTS *arguments``, which writes one JSON line per answer to the file
        ``RESULTS``.

        Returns:
            Answers by name, and for each of ``names`` without an answer the reason. What was
                answered before a crash or a hang counts.
        """
        try:
            with TemporaryDirectory() as folder:
                results = Path(folder) / "results"
                results.touch()
                command = [*self.program, str(results), *arguments]
                done = run(command, self.timeout, without_launcher(os.environ))
                lines = results.read_text().splitlines()
        except Exception as error:
            return {}, dict.fromkeys(names, f"{NOT_ASKED}: {reason(error)}")
        answers: dict[str, Any] = {}
        errors = dict.fromkeys(names, done.why)
        for line in lines:
            with suppress(ValueError):  # cut short when the process was killed
                told: dict[str, Any] = json.loads(line)
                errors.pop(told["name"], None)
                into = errors if "error" in told else answers
                into[told["name"]] = told["error" if "error" in told else "value"]
        return answers, errors


def in_time(probe: Callable[[], T], timeout: float) -> T:
    """``probe()``, or ``TimeoutError`` after ``timeout`` seconds (its thread is then left to
    itself).
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(probe())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    if not wait([answer], timeout).done:
        raise TimeoutError(f"{NO_ANSWER} {timeout:g} s")
    return answer.result()


def run(command: Sequence[str], timeout: float, env: dict[str, str] | None = None) -> Finished:
    """Run a command in a session of its own; when ``timeout`` seconds are over, or this process is
    interrupted, kill all of it.

    Its output goes through a file: a pipe that some grandchild keeps open would be waited for.
    """
    with TemporaryFile() as file:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        code = None
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(KILL_SECONDS)
        file.seek(0)
        output = file.read(MOST_OUTPUT).decode(errors="replace").strip()
    if code is None:
        return Finished(output, f"{NO_ANSWER} {timeout:g} s")
    end = f"signal {-code}" if code < 0 else f"exit code {code}"
    return Finished(output, shortened(": ".join([end, *output.splitlines()[-1:]])))


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
    head, *traces = str(error).split("\nTraceback (")
    if not traces:
        return shortened(": ".join(filter(None, (type(error).__name__, head))))
    frames = traces[-1].splitlines()[1:]
    end = dropwhile(lambda line: not line or line[0].isspace(), frames)
    return shortened(" ".join([head, *map(str.strip, end)]).strip())


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."
