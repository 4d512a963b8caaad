"""What a simulation can find."""

from __future__ import annotations


class SimulationError(RuntimeError):
    """Base of what the simulator raises about the code that it runs."""


class Deadlock(SimulationError):
    """Everybody waits, and nothing that could happen would wake anyone; the message lists every
    waiter.
    """


class Livelock(SimulationError):
    """The limit of steps is reached."""


class AddressError(SimulationError):
    """A program touched memory that is not its to touch."""


class Race(SimulationError):
    """A program told others that it has read something while some of its threads may not have read
    it yet.
    """


class ProgramError(SimulationError):
    """A program raised; its exception is the cause."""


class RanksFailed(SimulationError):
    """Host code of some ranks raised.

    Attributes:
        errors: by rank, in the order in which they were raised.
    """

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors
