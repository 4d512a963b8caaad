"""Start ranks: local processes around a store that the parent holds, or those of ``torchrun``.

Local processes are forks of a process that has torch, this package and the main program imported
(multiprocessing's fork server): some ten milliseconds each, where a new interpreter takes seconds.
Before Python 3.13.1 each rank imports the main program anew.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
import torch.distributed as dist

from tokenyard.errors import NotSupported

LOOPBACK = "127.0.0.1"

PRELOADED = ("torch", "torch.distributed", "torch.multiprocessing", "tokenyard")
IF_KNOWN = (
    "pytest",
    "_pytest.assertion.rewrite",
    "hypothesis",
    "triton",
    "tokenyard.testing.worker",
)
"""Preloaded too if this process has them: what runs in ranks mostly comes with these."""

_wanted: list[str] = []


def preload(*modules: str) -> None:
    """Have ranks be forks of a process that has these modules. Too late once there was a rank."""
    _wanted.extend(modules)


@functools.cache
def forks() -> ForkServerContext:
    """Makes processes by a fork server, which starts here."""
    context = multiprocessing.get_context("forkserver")
    known = [name for name in IF_KNOWN if name in sys.modules]
    context.set_forkserver_preload(["__main__", *PRELOADED, *known, *_wanted])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    try:  # until 3.13.1 a server looks for modules on no other path
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def under_torchrun() -> bool:
    """Whether a launcher has already given this process its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_store() -> dist.TCPStore:
    """A store on a free loopback port, held by this process; children reach it by ``.port``."""
    return dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def backend_for(device: str, world_size: int) -> str:
    """``nccl`` where every rank has a GPU of its own, ``gloo`` elsewhere (shared GPUs too)."""
    return "nccl" if device == "cuda" and world_size <= torch.cuda.device_count() else "gloo"


def joined_by_launcher(device: str = "cpu") -> AbstractContextManager[torch.device]:
    """Be the rank that ``torchrun`` made this process, for a while; yields the device to use."""
    return joined(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


@contextmanager
def joined(
    rank: int,
    world_size: int,
    device: str = "cpu",
    *,
    port: int | None = None,
    name: str = "",
    timeout: float = 600.0,
) -> Generator[torch.device, None, None]:
    """Be rank ``rank`` of a process group for a while; yields the device to work on. ``port``: of
    the parent's :func:`local_store`, in which ``name`` sets this group apart; without one the
    launcher's environment (``torchrun``) says where the others are."""
    here = torch.device("cpu")
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", rank))
        here = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(here)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    wait = timedelta(seconds=timeout)
    place: dict[str, Any] = {}
    if port is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=wait)
        place |= {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": world_size}
    dist.init_process_group(backend_for(device, local_world), timeout=wait, **place)
    try:
        yield here
    finally:
        dist.destroy_process_group()


def _rank_main(
    rank: int,
    world_size: int,
    device: str,
    port: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    out: Any,
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # it is that of the fork server
    os.environ.update(environment)
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        with joined(rank, world_size, device, port=port, name="spawn") as here:
            out.put((rank, True, fn(here, *args)))
    except BaseException as error:
        out.put((rank, False, error if isinstance(error, NotSupported) else traceback.format_exc()))
        raise SystemExit(1) from None


def spawn(fn: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> list[Any]:
    """Run ``fn(device, *args)`` on ``world_size`` local ranks; their results in rank order. The
    first rank that raises ends the others; its traceback is the message of the ``RuntimeError``
    raised here. Only ``NotSupported``, of which the message says all, is raised as it is."""
    store = local_store()
    context = forks()
    out = context.SimpleQueue()
    known = (world_size, device, store.port, fn, args, out, dict(os.environ))
    ranks = [
        context.Process(target=_rank_main, args=(rank, *known), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            while out.empty():
                dead = [r for r, p in enumerate(ranks) if p.exitcode not in (None, 0)]
                if dead and out.empty():
                    code = ranks[dead[0]].exitcode
                    raise RuntimeError(f"rank {dead[0]} died with exit code {code}")
                time.sleep(0.02)
            rank, ok, value = out.get()
            if not ok and isinstance(value, NotSupported):
                raise value
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    finally:
        for process in ranks:
            process.join(5 if len(results) == world_size else 0.5)
            if process.is_alive():
                process.kill()
    return [results[r] for r in range(world_size)]
