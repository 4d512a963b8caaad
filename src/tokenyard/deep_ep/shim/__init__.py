"""A directory to put on ``PYTHONPATH``: it holds ``deep_ep`` and ``deep_ep_cpp``. Nobody imports it
as a package.
"""
