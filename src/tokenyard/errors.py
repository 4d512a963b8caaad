"""Errors with names. Bad input is a ``ValueError``; what a peer did is a ``RuntimeError``."""


class Mismatch(ValueError):
    """Ranks passed different arguments to one collective call. Every rank raises; the object stays usable."""


class NotSupported(NotImplementedError):
    """This engine cannot do what was asked; the message names one that can."""


class PeerError(RuntimeError):
    """Another rank refused its side of the call (its own error says why). The object stays usable."""


class PeerTimeout(RuntimeError):
    """A peer stayed silent past the timeout. Afterwards the object accepts only ``stats`` and ``close``.

    Attributes:
        rank: the silent rank (group rank), or -1 if it could not be told.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(PeerTimeout):
    """The connection to a peer closed: it exited, crashed or gave up on another peer."""
