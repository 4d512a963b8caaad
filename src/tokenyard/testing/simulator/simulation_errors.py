"""What a simulation can find."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """Base of what the simulator raises about the code that it runs."""


class Deadlock(SimulationError):
    """Everybody waits, and nothing would wake anyone; the message lists every waiter."""


class Livelock(SimulationError):
    """The limit of steps is reached."""


class AddressError(SimulationError):
    """A program touched memory that is not its to touch."""


class Race(SimulationError):
    """A program says that it has read something; some of its threads may still have to."""


class ProgramError(SimulationError):
    """A program raised; its exception is the cause."""


class RanksFailed(SimulationError):
    """Host code raised. ``errors``: by rank, in the order in which they were raised."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors
