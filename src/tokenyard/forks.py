"""A forked child has its parent's objects and sockets, but not their threads: there every object is
out of use, and calls raise at once. Nothing that it holds is ever destroyed there: gloo would wait
for threads that the child lacks, and shut down the parent's connections, which aborts then. Nor is
the parent's garbage collected there, as it may be connections that were closed in order."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

_watched: WeakSet[Any] = WeakSet()
_inherited: set[int] = set()
"""Ids of process groups of the parent, which are kept for ever."""
_here = threading.local()
"""Of the thread that forks: whether garbage was collected when it began."""


def watch(thing: Any) -> None:
    """Call ``thing.disown(why)`` in every child that is forked while it lives: there nothing that
    it holds may be used or destroyed."""
    _watched.add(thing)


def keep_for_ever(thing: Any) -> None:
    """Let nothing destroy ``thing``, or what it holds: not the end of the interpreter either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def is_inherited(group: Any) -> bool:
    """Whether a process group was made by the process that this one was forked from."""
    return id(group) in _inherited


class Disowned:
    """Stands in for what a child must not use: whatever is asked of it raises."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"this ExpertParallel {self._why}: make a new one")


def _before() -> None:
    """What the child makes before :func:`_in_child` must not have it collect."""
    _here.collected = gc.isenabled()
    gc.disable()


def _again() -> None:
    """In the parent, and in the child behind its freeze."""
    if getattr(_here, "collected", True):
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    _again()
    why = (
        f"belongs to process {os.getppid()}, of which this one is a fork (start processes that "
        "need one by 'spawn' or 'forkserver', or make it, and its process group, in the child)"
    )
    things = list(_watched)
    _watched.clear()  # a child of this one has nothing to do with them
    for thing in things:
        thing.disown(why)
    if things and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):  # pyright: ignore[reportPrivateUsage]
            _inherited.add(id(group))
            keep_for_ever(group)


os.register_at_fork(before=_before, after_in_parent=_again, after_in_child=_in_child)
