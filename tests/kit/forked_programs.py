"""Interpreted kernels with real concurrency: one forked process per program.

Triton's interpreter runs the programs of a grid one after the other, so programs that wait for each
other would wait for ever. Here each runs in a child of this process. The interpreter's atomics are
real ones (std::atomic, in C++), so flags work across processes; its plain loads and stores go
straight to memory.

A child has the parent's memory as it was at the launch. What it writes reaches others only where
memory is shared.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tokenyard.testing.interpreter import bind, clock

_FORKING = threading.Lock()  # the pipe of a launch must not leak into another thread's children


class _Launch(NamedTuple):
    name: str
    pids: dict[int, int]  # program by process
    pipe: (
        int  # at its end when all programs have ended; carries the tracebacks of those that failed
    )


Language = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which the body of an interpreted kernel can be called as a Python function."""


class Programs:
    """Launches of one rank, each behind the one before.

    Args:
        language: ``tokenyard.testing.interpreter.patched_language``.
    """

    def __init__(self, language: Language) -> None:
        self._language = language
        with language():  # the first time is the longest: not in every child
            pass
        self._launches: list[_Launch] = []

    def launch(
        self, kernel: Any, grid: int, args: tuple[int, ...], constants: dict[str, Any]
    ) -> None:
        """Start ``grid`` programs; they run when all earlier launches have ended.

        Raises:
            ValueError: kernels are not interpreted in this process.
            RuntimeError: an earlier program failed.
        """
        self._reap()
        bound = bind(kernel, args, constants)
        sys.stdout.flush()
        with _FORKING:
            before = self._launches[-1].pipe if self._launches else None
            read, write = os.pipe()
            pids: dict[int, int] = {}
            try:
                for program in range(grid):
                    pid = _fork()
                    if pid == 0:
                        _child(self._language, kernel, bound, program, grid, before, write)
                    pids[pid] = program
            finally:
                os.close(write)
                self._launches.append(_Launch(kernel.__name__, pids, read))

    def settle(self) -> None:
        """Return when all programs have ended.

        Raises:
            RuntimeError: a program failed; names it. The others have been ended.
        """
        while self._launches:
            _ended(self._launches[0].pipe, 50)
            self._reap()

    def check(self) -> None:
        """Raise if a program has failed, as :meth:`settle` does; waits for nothing."""
        self._reap()

    def kill(self) -> None:
        """End everything that runs."""
        launches, self._launches = self._launches, []
        for launch in launches:
            for pid in launch.pids:
                os.kill(pid, signal.SIGKILL)
        for launch in launches:
            for pid in launch.pids:
                os.waitpid(pid, 0)
            os.close(launch.pipe)

    def _reap(self) -> None:
        for launch in list(self._launches):
            for pid, program in list(launch.pids.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                del launch.pids[pid]
                if status:
                    self._fail(launch, program, os.waitstatus_to_exitcode(status))
            if not launch.pids:
                self._launches.remove(launch)
                os.close(launch.pipe)

    def _fail(self, launch: _Launch, program: int, code: int) -> None:
        os.set_blocking(launch.pipe, False)
        try:
            text = os.read(launch.pipe, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            text = ""
        self.kill()
        how = (
            f"was ended by signal {-code}"
            if code < 0
            else f"failed:\n{text}"
            if text
            else f"exited with code {code}"
        )
        raise RuntimeError(f"program {program} of kernel {launch.name} {how}")


def _fork() -> int:
    with warnings.catch_warnings():
        # Of forking with threads: the child takes none of their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _child(
    language: Language,
    kernel: Any,
    bound: dict[str, Any],
    program: int,
    grid: int,
    before: int | None,
    write: int,
) -> None:
    """Run one program and end this process."""
    code = 1
    try:
        torch.set_num_threads(1)  # the parent's threads are not here
        while before is not None and not _ended(before, 60_000):
            pass
        with language(), clock(_later(time.monotonic())):
            run_program(kernel, bound, program, grid)
        sys.stdout.flush()
        code = 0
    except BaseException:
        os.set_blocking(write, False)
        os.write(write, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(code)


def _later(begun: float) -> Callable[[], int]:
    """The clock of a program that has ``begun``, of which waits ask round after round: they leave
    the processor to those that they wait for, the longer the longer they have waited.
    """

    def now_ns() -> int:
        time.sleep(min(max(0.002, 0.02 * (time.monotonic() - begun)), 0.1))
        return time.monotonic_ns()

    return now_ns


def run_program(kernel: Any, bound: dict[str, Any], program: int, grid: int) -> None:
    """Run one program of a grid in this process, where nothing else is interpreted at the same
    time.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.grid_dim = (grid, 1, 1)
    interpreter.interpreter_builder.grid_idx = (program, 0, 0)
    kernel.rewrite()(**bound)


def _ended(pipe: int, milliseconds: int) -> bool:
    """Wait until every writer of ``pipe`` has ended. Takes nothing out of it."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(milliseconds))
