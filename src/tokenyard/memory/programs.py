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
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from numbers import Integral
from typing import Any, NamedTuple

import torch

from tokenyard.memory.kernel_launch import parameters, with_defaults

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


def bind(kernel: Any, args: tuple[int, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: int64 as on a GPU (the interpreter would make small integers int32), and
    constants, which may be left out where the kernel has defaults.

    Raises:
        ValueError: they do not fit the kernel, are no integers, or kernels are not interpreted in
            this process.
    """
    names = parameters(kernel)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise ValueError(
            f"{kernel.__name__} would be compiled, but on CPU processes kernels are interpreted: "
            f"set TRITON_INTERPRET=1 before "
            "anything imports triton"
        )
    constants = with_defaults(kernel, constants)
    if len(args) != len(names.args) or set(constants) != set(names.constants):
        raise ValueError(
            f"{kernel.__name__} takes {names.args} and {names.constants}, not {len(args)} and "
            f"{[*constants]}"
        )
    for name, value in _leaves(names.args, args):
        # a tensor of one number would pass as that number, a float without its fraction
        if not isinstance(value, Integral):
            raise ValueError(
                f"{name} of {kernel.__name__} is a {type(value).__name__}, but arguments are whole "
                f"numbers: give tensors by their "
                "data_ptr(), and other numbers as constants"
            )
    _rewrite(kernel, interpreter.InterpretedFunction)
    return {
        name: _int64(interpreter, value) for name, value in zip(names.args, args, strict=True)
    } | constants


def _leaves(names: tuple[str, ...], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Arguments with their names; those in structs one by one."""
    found: list[tuple[str, Any]] = []
    for name, arg in zip(names, args, strict=True):
        fields = arg._asdict().items() if hasattr(arg, "_fields") else None
        found += (
            [(name, arg)]
            if fields is None
            else [(f"{name}.{field}", value) for field, value in fields]
        )
    return found


def _int64(interpreter: Any, value: Any) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*(_int64(interpreter, each) for each in value))
    language: Any = interpreter.tl
    handle = interpreter.TensorHandle(
        interpreter.np.array([value], interpreter.np.int64), language.int64
    )
    return language.tensor(handle, language.int64)


def _rewrite(kernel: Any, kind: type) -> None:
    """Have the interpreter read the kernel, and what it calls, here rather than in every child."""
    seen: set[int] = set()
    pending = [kernel]
    while pending:
        function = pending.pop()
        if id(function) not in seen:
            seen.add(id(function))
            function.rewrite()
            pending += [
                value for value in function.fn.__globals__.values() if isinstance(value, kind)
            ]


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
        with language():
            run_program(kernel, bound, program, grid)
        sys.stdout.flush()
        code = 0
    except BaseException:
        os.set_blocking(write, False)
        os.write(write, traceback.format_exc()[-4000:].encode())
    finally:
        os._exit(code)


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
