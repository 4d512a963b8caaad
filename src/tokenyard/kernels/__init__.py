"""Triton kernels. Importing a module of this package needs Triton, but no GPU."""
