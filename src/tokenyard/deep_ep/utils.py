"""``deep_ep.utils`` as frameworks import it."""

from tokenyard.deep_ep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
