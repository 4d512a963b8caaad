"""What a dispatch and a combine would take on a machine that may not be at hand. See
``docs/how-to/planner.md``.
"""
