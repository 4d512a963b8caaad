"""The test process's end of one worker: its process, its pipe and what it prints."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from tokenyard.launch import forks
from tokenyard.testing import worker
from tokenyard.testing.job import Ending, Job, Outcome

DUMP_TIME = 60.0
"""Seconds that a stuck worker gets to print its stacks."""


class Member:
    """A worker process; ``pipe`` becomes readable when it has joined its group. Its session is its
    own, so that Ctrl-C does not reach it, and what it starts ends with it."""

    def __init__(self, rank: int, world_size: int, device: str, port: int, name: str) -> None:
        self.rank = rank
        self.pipe, theirs = Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        self._seen = 0
        # a pipe to the child by its type, as only those are handed on to forks of the server
        output = Connection(os.dup(self._output.fileno()), readable=False)
        given = rank, world_size, device, port, name, theirs, output, dict(os.environ)
        self.process = forks().Process(target=worker.serve, args=given)
        self.process.start()
        theirs.close()
        output.close()

    @property
    def num_threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except OSError:
            return 0

    def check_joined(self) -> None:
        """Raise ``RuntimeError`` with what the worker printed unless it has joined its group."""
        with suppress(EOFError, OSError):
            if self.pipe.poll() and self.pipe.recv_bytes() == worker.READY:
                return
        self.process.terminate()
        raise RuntimeError(f"rank {self.rank} did not start:\n{self.stuck('').stack}")

    def send(self, job: Job) -> None:
        """Start a body. That a worker is gone shows in :meth:`outcome`."""
        with suppress(OSError):
            self.pipe.send_bytes(pickle.dumps(job))

    def outcome(self) -> Outcome:
        """Of the body that was sent. ``pipe`` is readable when it is there, or all is over."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            if code >= 0:
                return Outcome(Ending.DIED, f"exited with code {code}")
            ending = Ending.DIED if code == -signal.SIGKILL else Ending.CRASHED
            return Outcome(ending, f"died of {signal.Signals(-code).name}")

    def new_output(self) -> str:
        """What the worker has printed since the last call, stdout and stderr in their order."""
        descriptor = self._output.fileno()
        data = os.pread(descriptor, os.fstat(descriptor).st_size - self._seen, self._seen)
        self._seen += len(data)
        return data.decode(errors="replace")

    def stuck(self, error: str) -> Outcome:
        """Of a worker that was terminated inside its body, so that it prints the stacks of its
        threads and ends; carries them."""
        self.process.join(DUMP_TIME)
        return Outcome(Ending.STUCK, error, _tidy(self.new_output()))

    def kill(self) -> None:
        """End the worker and everything it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may not have had a session yet
        self.process.join()
        self.pipe.close()
        self._output.close()


def _tidy(dump: str) -> str:
    """Without addresses of threads, which differ between ranks, and what every idle worker does."""
    threads = "\n\n".join(
        block for block in dump.strip().split("\n\n") if "in _listen" not in block
    )
    ways = worker.__file__, os.path.dirname(multiprocessing.__file__), '"<string>"'
    lines = (line for line in threads.splitlines() if not any(file in line for file in ways))
    return re.sub(r"[Tt]hread 0x[0-9a-f]+", "thread", "\n".join(lines)) + "\n"
