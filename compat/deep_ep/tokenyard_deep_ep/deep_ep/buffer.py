"""The name ``deep_ep.buffer`` for ``tokenyard.deep_ep.buffer``."""

from tokenyard.deep_ep.buffer import Buffer

__all__ = ["Buffer"]
