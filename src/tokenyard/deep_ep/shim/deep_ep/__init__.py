"""The name ``deep_ep`` for ``tokenyard.deep_ep``."""

from tokenyard.deep_ep import Buffer, Config, EventHandle, EventOverlap, __version__, topk_idx_t

from . import utils

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__version__", "topk_idx_t", "utils"]
