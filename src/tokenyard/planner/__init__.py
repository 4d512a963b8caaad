"""What dispatch and combine would take on a machine. See ``docs/how-to/planner.md``."""
