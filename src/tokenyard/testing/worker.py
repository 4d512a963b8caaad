"""One rank of a pool: joins the group once, and then runs one test body after the other."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import inspect
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from io import TextIOWrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from queue import SimpleQueue
from traceback import TracebackException
from types import TracebackType
from typing import Any, cast
from unittest import SkipTest

import torch
import torch.distributed as dist

from tokenyard.launch import joined
from tokenyard.testing.job import Ending, Job, Outcome, Ranks
from tokenyard.testing.modules import find_body

READY = b"ready"

CAN_REST = sys.platform == "linux"
"""Whether workers may be stopped between bodies."""
_PR_SET_PDEATHSIG = 1


def serve(
    rank: int,
    world_size: int,
    device: str,
    port: int,
    name: str,
    pipe: Connection,
    output: Connection,
    environment: dict[str, str],
) -> None:
    """Be rank ``rank`` of group ``name`` in the store at ``port`` until ``pipe`` closes.

    The process gets a session of its own, prints into the file of ``output``, and has
    ``environment`` instead of that of the fork server, with which it ends. SIGTERM prints the
    stacks of all threads and then ends it.
    """
    if CAN_REST:
        _end_with_server()
    gc.freeze()  # what the fork server has imported stays: bodies may collect garbage often
    os.setsid()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    torch.set_num_threads(1)
    jobs: SimpleQueue[Job] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, jobs), daemon=True).start()
    with joined(rank, world_size, device, port=port, name=name) as here:
        pipe.send_bytes(READY)
        group = cast("dist.ProcessGroup", dist.group.WORLD)
        while True:
            job = jobs.get()
            outcome = perform(job, Ranks(rank, world_size, here, job.engine, group))
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(pickle.dumps(outcome))


def _end_with_server() -> None:
    """Also while this process is stopped and sees no pipe close. The server ends when all have
    closed a pipe of which multiprocessing gives its forks the writing end too."""
    server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _listen(pipe: Connection, jobs: SimpleQueue[Job]) -> None:
    """Hand on jobs as they come. A body may be stuck for ever when the test process has gone."""
    try:
        while True:
            jobs.put(pickle.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)


def perform(job: Job, ranks: Ranks) -> Outcome:
    """Run one body. Random numbers start from the rank, whatever ran before."""
    try:
        sys.path[:] = job.sys_path
        body = find_body(job.module, job.path, job.qualname, job.code)
        torch.manual_seed(ranks.rank)  # pyright: ignore[reportUnknownMemberType]
        call_body(body, {name: pickle.loads(value) for name, value in job.arguments.items()}, ranks)
    except BaseException as error:
        return _outcome_of(error)
    return Outcome(Ending.PASSED)


def call_body(body: Callable[..., Any], arguments: dict[str, Any], ranks: Ranks) -> None:
    """``body(**arguments)``, with ``ranks`` if it asks for them."""
    extra = {"ranks": ranks} if "ranks" in inspect.signature(body).parameters else {}
    body(**arguments, **extra)


def _outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, skip_exceptions()):
        return Outcome(Ending.SKIPPED, str(error))
    report = TracebackException(type(error), error, _without_this_file(error.__traceback__))
    last = "".join(report.format_exception_only())
    return Outcome(Ending.FAILED, last.rstrip("\n"), "".join(report.format()).removesuffix(last))


def skip_exceptions() -> tuple[type[BaseException], ...]:
    outcomes = sys.modules.get("_pytest.outcomes")
    return (SkipTest,) if outcomes is None else (SkipTest, outcomes.Skipped)


def _without_this_file(frames: TracebackType | None) -> TracebackType | None:
    inner = frames
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return inner or frames
