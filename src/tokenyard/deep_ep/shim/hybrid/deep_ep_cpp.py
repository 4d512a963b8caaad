"""The name of DeepEP's compiled module, with what others import from it."""

from tokenyard.deep_ep.generations import present as _present

_present(__name__, "hybrid")
