"""The name ``deep_ep`` for ``tokenyard.deep_ep``."""

from tokenyard.deep_ep.generations import present as _present

_present(__name__, "2")
