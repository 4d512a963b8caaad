"""Calls that block outside of Python (gloo, a store), on a thread of their own: Python handles
signals between two of its own instructions, so such a call would keep Ctrl-C waiting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

SLICE = 0.1
"""Seconds of a wait: a signal that another thread takes wakes nobody."""


class Begun:
    """A call under way on another thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        self._ended.acquire()
        self.over = False

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds``; whether it is over. A signal's handler may raise here."""
        if not self.over:
            self._ended.acquire(timeout=seconds)
        return self.over

    def result(self) -> Any:
        """What it returned, once it is over; raises what it raised."""
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # else the error's traceback would hold the error

    def make(self) -> None:
        """On the other thread."""
        assert self._call is not None
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error
        self._call, self.over = None, True
        self._ended.release()


class Aside:
    """A thread that makes calls in order. It starts with the first and ends with this object."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Begun | None] | None = None

    def start(self, call: Callable[[], Any]) -> Begun:
        """Make ``call`` there, behind those before it."""
        if self._calls is None:
            calls: SimpleQueue[Begun | None] = SimpleQueue()
            weakref.finalize(self, calls.put, None).atexit = False
            threading.Thread(
                target=_serve, args=(calls,), name="tokenyard aside", daemon=True
            ).start()
            self._calls = calls
        begun = Begun(call)
        self._calls.put(begun)
        return begun

    def close(self) -> None:
        """End the thread once it has made its calls; another call starts another."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)


def _serve(calls: SimpleQueue[Begun | None]) -> None:
    while (begun := calls.get()) is not None:
        begun.make()
        del begun  # it may hold tensors


def wait_for(call: Callable[[], Any]) -> Any:
    """``call()``, which may block outside of Python, on another thread: Ctrl-C can end the wait."""
    aside = Aside()
    begun = aside.start(call)
    aside.close()  # it ends behind the call
    while not begun.wait(SLICE):
        pass
    return begun.result()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; elsewhere there is nothing to wait for."""
    if device.type == "cuda":
        wait_for(partial(torch.cuda.synchronize, device))
