"""A directory per generation to put on ``PYTHONPATH``. Nobody imports it as a package."""
