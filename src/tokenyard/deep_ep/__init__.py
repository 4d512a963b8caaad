"""The API of DeepEP (V1) on ``tokenyard``: ``import tokenyard.deep_ep as deep_ep``. See
``docs/how-to/deep_ep.md``.

``ElasticBuffer`` and ``HybridEPBuffer`` are missing on purpose: frameworks ask for those names to
see what they can use.
"""

import torch

from tokenyard.deep_ep import utils
from tokenyard.deep_ep.buffer import Buffer
from tokenyard.deep_ep.chunks import Config
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.version import __version__ as _version

topk_idx_t = torch.int64
"""The dtype that DeepEP takes for ids; here int32 is as good."""

__version__ = f"1.2.1+tokenyard.{_version}"
"""The version of DeepEP whose API this is."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
