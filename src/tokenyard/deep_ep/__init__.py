"""The API of DeepEP (V1) on ``tokenyard``: ``import tokenyard.deep_ep as deep_ep``. See
``docs/how-to/deep_ep.md``.

``ElasticBuffer`` and its like are missing on purpose: frameworks ask for those names to see what
they can use. ``generations`` has what programs see of each generation.
"""

import torch

from tokenyard.deep_ep import utils
from tokenyard.deep_ep.buffer import Buffer
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.generations import GENERATIONS as _GENERATIONS
from tokenyard.deep_ep.runtime import Config

topk_idx_t = torch.int64
"""The dtype that DeepEP takes for ids; here int32 is as good."""

__version__ = _GENERATIONS["1"].version
"""The version of DeepEP whose API this is."""

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t", "utils"]
