"""Errors with names. Bad input is a ``ValueError``; what a peer did is a ``RuntimeError``."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


class Mismatch(ValueError):
    """Ranks passed different arguments to one collective call. Every rank raises.

    The object stays usable where ranks compare before rows move: always over gloo, and in a fresh
    dispatch with exact shapes. Elsewhere make a new one.
    """


class NotSupported(NotImplementedError):
    """This engine cannot do what was asked; the message names one that can."""


class PeerError(RuntimeError):
    """Another rank refused its side of the call (its own error says why). The object stays usable
    as after :class:`Mismatch`."""


class PeerTimeout(RuntimeError):
    """A peer stayed silent past the timeout. Afterwards the object accepts only ``recover``,
    ``stats`` and ``close``.

    Attributes:
        rank: the silent rank (group rank), or -1 if it could not be told.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLost(PeerTimeout):
    """The connection to a peer closed: it exited, crashed or gave up on another peer."""


class RankExpelled(RuntimeError):
    """The other ranks have recovered without this one, which they took for dead: its object is of
    no more use, and so is every handle.

    Attributes:
        survivors: the ranks that went on.
    """

    def __init__(self, message: str, survivors: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.survivors = survivors


class StoreLost(RuntimeError):
    """The store through which survivors agree does not answer: its process is gone."""


def afresh(error: _Error) -> _Error:
    """The same error without a traceback, which keeps all that its frames had."""
    kind = type(error)
    try:
        # Not made again: that may take other arguments than it shows.
        new = kind.__new__(kind, *error.args)
        new.__dict__.update(error.__dict__)
    except Exception:
        return error
    return new


def ended_from_outside(error: BaseException) -> BaseException:
    """``error`` of a signal's handler in a wait, marked for :func:`is_from_outside`."""
    error.__dict__["_tokenyard_ended_a_wait"] = True
    return error


def is_from_outside(error: BaseException) -> bool:
    """Whether Ctrl-C or a signal's handler raised ``error`` in a call, and so ended it."""
    return not isinstance(error, Exception) or "_tokenyard_ended_a_wait" in error.__dict__
