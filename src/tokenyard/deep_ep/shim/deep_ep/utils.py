"""The name ``deep_ep.utils`` for ``tokenyard.deep_ep.utils``."""

from tokenyard.deep_ep.utils import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
