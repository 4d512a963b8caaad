"""The order of calls on one object: one after the other, whether the caller waits or not.

Over gloo an asynchronous call runs on a thread of the object's own; over NCCL it is issued on a
communication stream (CUDA tensors have that stream either way). A synchronous call comes after
every call started before it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._C import _set_grad_enabled  # pyright: ignore[reportPrivateUsage]

from tokenyard import forks
from tokenyard.errors import ended_from_outside

NO_TICKET = 0
MAX_OUTSTANDING = 8
"""Asynchronous calls that may be started and not yet waited for."""
_NO_EXTRAS: dict[str, Any] = {}

Wait = Callable[[Callable[[], Any]], Any]
"""Returns what the call that it is given returns."""


Tell = Callable[[Exception], None]
"""Tells the other ranks of an error that keeps this one from a call."""


class Waitable(Protocol):
    """What ``after=`` takes: a CUDA event, an asynchronous result, anything with ``wait()``."""

    def wait(self) -> Any: ...


class When(NamedTuple):
    """Whether the caller waits for a call now or later, and what the call waits for first.
    ``in_two``: its first half is made now, in the caller's stream, the second when it is waited
    for. ``extras``: for the engine."""

    later: bool
    after: Waitable | None
    in_two: bool = False
    extras: dict[str, Any] = _NO_EXTRAS


class _Turn:
    """What one call is made in: without autograd, and on a GPU behind the call before it, wherever
    that ran, as calls of one object share memory. The order of calls in a CUDA graph is the
    caller's affair."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}  # by device
        self._done: torch.cuda.Event | None = None
        self._where = -1, 0
        self._stream: torch.cuda.Stream | None = None  # at ``_where``
        self._here: tuple[int, int] | None = None
        self._tracks = False

    def is_on_gpu(self) -> bool:
        return torch.cuda.is_initialized() and (self._device is None or self._device.type == "cuda")

    def __enter__(self) -> None:
        self._here = None
        if self.is_on_gpu() and not torch.cuda.is_current_stream_capturing():
            index = torch.cuda.current_device() if self._device is None else self._device.index
            self._here = index, torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore
            if self._done is not None and self._where != self._here:
                self._done.wait(torch.cuda.current_stream(index))
        self._tracks = torch.is_grad_enabled()
        if self._tracks:
            _set_grad_enabled(False)  # no_grad() costs ten times as much

    def __exit__(self, *_: object) -> None:
        if self._tracks:
            _set_grad_enabled(True)
        if self._here is None:
            return
        if self._where != self._here:
            index = self._here[0]
            self._done = self._events.get(index) or self._events.setdefault(
                index, torch.cuda.Event()
            )
            self._stream, self._where = torch.cuda.current_stream(index), self._here
        assert self._done is not None
        self._done.record(self._stream)


class CallQueue:
    """Runs calls in program order. Not for two threads at once: that raises."""

    def __init__(self, *, threaded: bool, device: torch.device | None = None) -> None:
        """``device``: that calls work on, if it is always the same. ``threaded``: calls keep the
        host busy or waiting (gloo), so asynchronous ones need a thread of their own."""
        self._threaded, self._device = threaded, device
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._turn = _Turn(device)
        self._streams: dict[int, torch.cuda.Stream] = {}  # by device
        self._started: dict[int, Future[Any] | _Made] = {}
        self._issued: dict[int, tuple[torch.cuda.Event, torch.cuda.Stream, Callable[[], Any]]] = {}
        self._halves: dict[int, Callable[[], Any]] = {}
        self._dropped: list[Any] = []
        self._last: Future[Any] | None = None
        self._tickets = 0

    @property
    def is_busy(self) -> bool:
        """Whether a call is still under way on the thread."""
        return self._last is not None and not self._last.done()

    def run(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Make ``call(*args, **options)`` in its turn and return its result."""
        if not self.is_busy:
            with self:
                return call(*args, **options)
        self._enter()
        try:
            stream = torch.cuda.current_stream(self._device) if self._turn.is_on_gpu() else None

            def body() -> Any:
                with torch.cuda.stream(stream), self._turn:
                    return call(*args, **options)

            return _result_of(self._submit(body))
        finally:
            self._lock.release()

    def __enter__(self) -> None:
        """The turn of a call, of a queue that is not busy."""
        self._enter()
        try:
            self._turn.__enter__()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._turn.__exit__()
        finally:
            self._lock.release()

    def _enter(self) -> None:
        """Take the lock, which is the caller's to release."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this ExpertParallel is in use by another thread: one object serves one thread at "
                "a time"
            )

    def begin(
        self, call: Callable[[], Any], device: torch.device, after: Waitable | None, tell: Tell
    ) -> int:
        """Start a call behind ``after`` and return a ticket for :meth:`take`. RuntimeError:
        ``MAX_OUTSTANDING`` calls wait to be taken."""
        self._enter()
        try:
            return self._start(call, device, after, tell)
        finally:
            self._lock.release()

    def _start(
        self, call: Callable[[], Any], device: torch.device, after: Waitable | None, tell: Tell
    ) -> int:
        if len(self._started) >= MAX_OUTSTANDING:
            raise RuntimeError(
                f"{len(self._started)} asynchronous calls are outstanding, {MAX_OUTSTANDING} may "
                f"be: wait() for one first (a result in a reference cycle counts until it is "
                f"collected)"
            )
        self._tickets += 1
        ticket = self._tickets
        on_gpu = device.type == "cuda"
        if on_gpu:
            body = self._on_stream(ticket, call, device, after, tell)
        else:
            body = partial(self._behind, after, call, tell)
        try:
            self._started[ticket] = self._submit(body) if self._threaded else _made(body)
        except BaseException:  # interrupted in the middle of the call
            self.drop(ticket)
            raise
        return ticket

    def hold(self, rest: Callable[[], Any]) -> int:
        """A ticket for a call of which ``rest`` is still to be made, by :meth:`take`."""
        self._tickets += 1
        self._halves[self._tickets] = rest
        return self._tickets

    def rest_of(self, ticket: int) -> Callable[[], Any] | None:
        """What :meth:`hold` was given, to be made now; None of another ticket."""
        return self._halves.pop(ticket, None)

    def held(self, ticket: int) -> Any:
        """What :meth:`hold` was given."""
        return self._halves[ticket]

    def _submit(self, body: Callable[[], Any]) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenyard")
        self._last = self._pool.submit(body)
        return self._last

    def _behind(self, after: Waitable | None, call: Callable[[], Any], tell: Tell) -> Any:
        """Make a call once ``after`` is over; if that raises, ``tell`` the other ranks instead."""
        try:
            if after is not None:
                after.wait()
        except Exception as error:
            with self._turn:
                tell(error)
            raise
        with self._turn:
            return call()

    def _on_stream(
        self,
        ticket: int,
        call: Callable[[], Any],
        device: torch.device,
        after: Waitable | None,
        tell: Tell,
    ) -> Callable[[], Any]:
        """``call`` on the communication stream, behind ``after`` or the current stream as it is."""
        here = torch.cuda.current_stream(device)
        stream = self._streams.get(here.device_index) or self._streams.setdefault(
            here.device_index, torch.cuda.Stream(device)
        )
        ready, done = here.record_event() if after is None else after, torch.cuda.Event()
        # The call holds its inputs, which the stream still reads.
        self._issued[ticket] = done, here, call

        def body() -> Any:
            with torch.cuda.stream(stream):
                try:  # ``ready`` first: in a capture it makes this stream part of it
                    return self._behind(ready, call, tell)
                finally:
                    done.record()

        return body

    def take(self, ticket: int) -> Any:
        """The result behind ``ticket``, once it is there (on a GPU: for the current stream)."""
        future = self._started[ticket]
        try:
            result = _result_of(future)
        finally:
            issued = None
            if future.done():  # not if an interrupt has ended the wait: it can be waited for again
                issued = self._issued.pop(ticket, None)
                self._started.pop(ticket, None)
                if self._last is future:
                    self._last = None
            del future  # an error's traceback would hold it, and it holds the error
        if issued is not None:
            done, begun_on, _ = issued
            here = torch.cuda.current_stream(begun_on.device)
            done.wait(here)
            if begun_on != here:
                done.wait(begun_on)  # inputs go back to this one
            keep_for(result, here)
        return result

    def work_of(self, ticket: int, wait: Wait) -> Work | None:
        """The call behind ``ticket``, to wait for without its result; None if none was started.
        The host waits through ``wait``, a method, as long as there is its object."""
        future, (done, *_) = self._started.get(ticket), self._issued.get(ticket, (None,))
        if isinstance(future, Future):
            return Work(future, done, wait)
        return None if future is None or done is None or future.error else Work(None, done, wait)

    def drop(self, ticket: int) -> None:
        """Forget a call that nobody waits for any more; it still runs, in its turn."""
        self._started.pop(ticket, None)
        issued = self._issued.pop(ticket, None)
        if issued is None:
            return
        done, begun_on, _ = issued
        with torch.cuda.stream(begun_on):
            captured = torch.cuda.is_current_stream_capturing()
        if captured:  # collected as garbage, say: to wait would spoil the capture
            self._dropped.append(issued)
        else:
            done.wait(begun_on)

    def disown(self) -> None:
        """In a forked child (``forks.py``), where nothing that was started ever ends."""
        tables = self._started, self._issued, self._halves
        for held in (self._pool, *tables, self._dropped, self._turn):
            forks.keep_for_ever(held)
        self._started, self._issued, self._halves = {}, {}, {}

    def close(self, *, wait: bool = True) -> None:
        """Finish what was started; without ``wait`` it ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=wait)


class Work:
    """A call under way, on a thread, on a stream (``done`` is behind it) or both; no result."""

    def __init__(
        self, future: Future[Any] | None, done: torch.cuda.Event | None, wait: Wait
    ) -> None:
        self._future, self._done = None if future is None else weakref.ref(future), done
        self._wait = weakref.WeakMethod(wait)
        self._captured = done is not None and torch.cuda.is_current_stream_capturing()
        self._process = os.getpid()

    def can_be_waited_for(self) -> bool:
        """Whether the current stream may: events of a CUDA graph's capture are for it alone."""
        return self._done is None or self._captured == torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Let the current stream wait, or the host where there is none; raise what it raised."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"this call was begun by process {self._process}, of which this one is a fork: "
                f"wait for it there"
            )
        future = None if self._future is None else self._future()
        wait = self._wait()
        if future is not None and wait is not None:
            wait(partial(_result_of, future))
        if self._done is not None:
            self._done.wait()


def _result_of(future: Future[Any] | _Made) -> Any:
    """Wait for a call. A signal's handler may end the wait; that is no error of the call."""
    try:
        return future.result()
    except BaseException as error:
        if not future.done():
            ended_from_outside(error)
        raise
    finally:
        del future  # an error's traceback would hold it, and it holds the error


class _Made(NamedTuple):
    """What a call that was made at once came to."""

    value: Any
    error: Exception | None

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        try:
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            del self  # else the error's traceback would hold the error


def _made(body: Callable[[], Any]) -> _Made:
    try:
        return _Made(body(), None)
    except Exception as error:
        return _Made(None, error)


def keep_for(tensors: Any, stream: Any) -> None:
    """Tell the allocator that ``stream`` uses tensors, also in tuples, of another stream."""
    if isinstance(tensors, torch.Tensor):
        if tensors.is_cuda and tensors.numel():
            tensors.record_stream(stream)
            block: Any = getattr(tensors.untyped_storage(), "tokenyard_block", None)
            if block is not None:  # a ``memory.heap.Block``
                block.keep_for(stream)
    elif isinstance(tensors, (tuple, list)):
        for part in tensors:  # pyright: ignore[reportUnknownVariableType]
            keep_for(part, stream)
