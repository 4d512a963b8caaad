"""Starts workers as forks of a process that has torch and this package imported: some ten
milliseconds each, where a new interpreter takes more than a second.

The server has one thread and does nothing else, so its forks are whole. It ends with the process
that started it. Each fork gets a session of its own, the caller's environment and directory, and
three files: its pipe, its output, and one that tells its process id and later how it ended.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PRELOADED = ("torch", "torch.distributed", "tokenyard", "tokenyard.testing.worker")
IF_KNOWN = ("pytest", "_pytest.assertion.rewrite", "hypothesis", "triton")
"""Preloaded too if the caller has them: bodies mostly come with these."""

_NUMBER = struct.Struct("q")
_MOST_BYTES = 1 << 20


class Child:
    """A forked worker: what ``subprocess.Popen`` would be of a new one."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._code: int | None = None
        data = os.read(status, _NUMBER.size)
        if not data:
            os.close(status)
            raise RuntimeError("the server that forks workers has ended")
        (self.pid,) = _NUMBER.unpack(data)

    def poll(self) -> int | None:
        """How it ended (negative: by which signal), None if it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended: how.

        Raises:
            subprocess.TimeoutExpired: it has not, after ``timeout`` seconds.
        """
        code = self._code
        if code is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            data = os.read(self._status, _NUMBER.size)
            code = int(_NUMBER.unpack(data)[0]) if data else -int(signal.SIGKILL)
            os.close(self._status)
            self._code = code
        return code

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill_session(self) -> None:
        """End it and everything it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class ForkServer:
    """The caller's end of the server."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        known = [name for name in IF_KNOWN if name in sys.modules]
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run; "
            f"run({theirs.fileno()}, {known!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def start(self, arguments: tuple[Any, ...], pipe: int, output: int) -> Child:
        """Fork a worker: ``serve(*arguments, pipe)``, which prints into file ``output``."""
        status, theirs = os.pipe()
        request = pickle.dumps((arguments, dict(os.environ), os.getcwd()))
        try:
            socket.send_fds(self._control, [request], [pipe, output, theirs])
        finally:
            os.close(theirs)
        return Child(status)

    def close(self) -> None:
        """End the server; workers go on."""
        self._control.close()
        self._process.wait()


@functools.cache
def _started() -> list[ForkServer]:
    servers: list[ForkServer] = []
    atexit.register(lambda: [server.close() for server in servers])
    return servers


def fork_server() -> ForkServer:
    """The server of this process; it starts when it is first needed."""
    servers = _started()
    if not servers or not servers[-1].alive:
        servers.append(ForkServer())
    return servers[-1]


# The server


def run(control_fd: int, known: list[str]) -> None:
    """Fork whenever asked to, until the other end of the socket closes."""
    for name in (*PRELOADED, *known):
        importlib.import_module(name)
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, _wake)
    signal.set_wakeup_fd(writer)
    statuses: dict[int, int] = {}
    gc.collect()
    gc.freeze()
    while True:
        ready = select.select([control, reader], [], [])[0]
        if reader in ready:
            os.read(reader, 4096)
            _report_ended(statuses)
        if control in ready:
            request, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
            if not request:
                return
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for fd in (reader, writer, *statuses.values()):
                    os.close(fd)
                control.close()
                _be_worker(request, *fds)
            statuses[pid] = fds[2]
            os.close(fds[0])
            os.close(fds[1])


def _wake(*_: object) -> None:
    """A signal with a handler writes to the wakeup file."""


def _report_ended(statuses: dict[int, int]) -> None:
    for pid in list(statuses):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            fd = statuses.pop(pid)
            with suppress(OSError):  # nobody asks any more
                os.write(fd, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
            os.close(fd)


def _be_worker(request: bytes, pipe: int, output: int, status: int) -> None:
    """In the fork: never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.write(status, _NUMBER.pack(os.getpid()))
        os.close(status)
        arguments, environment, directory = pickle.loads(request)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        serve: Callable[..., None] = importlib.import_module("tokenyard.testing.worker").serve
        serve(*arguments, pipe)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
