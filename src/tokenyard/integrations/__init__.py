"""Frameworks that run on this library. Each module needs its framework, and is imported by name."""
