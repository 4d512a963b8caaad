"""tokenyard: expert-parallel MoE dispatch and combine in pure Python."""

from tokenyard.api import ExpertParallel
from tokenyard.engines.base import CallOptions
from tokenyard.errors import (
    Mismatch,
    NotSupported,
    PeerError,
    PeerLost,
    PeerTimeout,
    RankExpelled,
    StoreLost,
)
from tokenyard.handle import Handle
from tokenyard.results import Combined, Received
from tokenyard.routing import expert_bounds
from tokenyard.stats import Stats
from tokenyard.topology import Topology
from tokenyard.types import Layout, Quantize, Quantized
from tokenyard.version import __version__

__all__ = [
    "CallOptions",
    "Combined",
    "ExpertParallel",
    "Handle",
    "Layout",
    "Mismatch",
    "NotSupported",
    "PeerError",
    "PeerLost",
    "PeerTimeout",
    "Quantize",
    "Quantized",
    "RankExpelled",
    "Received",
    "Stats",
    "StoreLost",
    "Topology",
    "__version__",
    "expert_bounds",
]
