"""DeepEP's events: points in a CUDA stream that another waits for. Without CUDA all is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class EventHandle:
    """The current CUDA stream as it is now; nothing if this process does not use CUDA."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: tuple[Any, ...] = ()
        if torch.cuda.is_initialized():
            self._events = (torch.cuda.current_stream().record_event(),)

    @classmethod
    def of(cls, stream: Any) -> EventHandle:
        made = cls.__new__(cls)
        made._events = (stream.record_event(),)
        return made

    def with_other(self, other: EventHandle) -> EventHandle:
        """What waits for both."""
        made = EventHandle.__new__(EventHandle)
        made._events = self._events + other._events
        return made

    def current_stream_wait(self) -> None:
        """Let the current stream wait; waiting twice is harmless."""
        for each in self._events:
            each.wait()

    def wait_on(self, stream: Any) -> None:
        for each in self._events:
            each.wait(stream)


class EventOverlap:
    """An event to wait for, or none; ``with event:`` waits at the end of the block.

    Attributes:
        event: an :class:`EventHandle`, or None if there is nothing to wait for.
        extra_tensors: kept alive as long as this object.
        hook_after_wait: called by the next wait, once; None if there is none.

    Raises:
        ValueError: ``event`` is something else.
    """

    __slots__ = ("__weakref__", "_releases", "event", "extra_tensors", "hook_after_wait")

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: Sequence[Tensor] | None = None
    ) -> None:
        if event is not None and not isinstance(event, EventHandle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"event ({event!r}) must be an EventHandle or None")
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Let the current stream wait for the event, which must be there (as in DeepEP).

        ``release_handle``: let go of the event. Returns what the hook returns, if there is one.
        """
        assert self.event is not None, (
            "this call was not asynchronous, so there is no event to wait for"
        )
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """:meth:`current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call ``hook_after_wait()`` in the next wait.

        Raises:
            ValueError: there is a hook already.
        """
        if self.hook_after_wait is not None:
            raise ValueError("this EventOverlap has a hook already: wait for it first")
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For ``with event(release_handle=True):``, which lets go of the event at its end."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        releases, self._releases = self._releases, False
        if self.event is not None:
            self.current_stream_wait(releases)
