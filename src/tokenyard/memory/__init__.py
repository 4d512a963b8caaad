"""Symmetric memory: regions that every rank can address, and launches of kernels that use them."""
