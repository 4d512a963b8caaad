"""The project's own measurements: suites of cases and their bars. Not part of the wheel."""
