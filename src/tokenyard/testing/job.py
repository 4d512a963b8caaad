"""What crosses the pipe to a rank: a :class:`Job` goes in, an :class:`Outcome` comes back."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a test body runs; the body's ``ranks`` parameter.

    Attributes:
        device: to put tensors on. engine: name of the engine under test.
        group: of all ranks: a process group kept from test to test, or a
            :class:`tokenyard.memory.symmetric.MemoryGroup`.
    """

    rank: int
    world_size: int
    device: torch.device
    engine: str
    group: Any = field(repr=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A test body and its arguments, in words that another process understands.

    Attributes:
        module, path: name under which pytest imported the test module, and its file.
        qualname: of the body inside its module.
        code: of that module, see :func:`tokenyard.testing.modules.code_of`.
        engine: name of the engine under test.
        arguments: pickled value of each argument, without ``ranks``.
        sys_path: where the test process finds its modules.
    """

    module: str
    path: str
    qualname: str
    code: bytes = field(repr=False)
    engine: str
    arguments: dict[str, bytes]
    sys_path: list[str]


class Ending(enum.Enum):
    """How a body ended on one rank; what explains most comes first. ``DIED``: by exit or SIGKILL,
    which may be on purpose; ``CRASHED``: by any other signal."""

    FAILED = 0
    CRASHED = 1
    DIED = 2
    STUCK = 3
    SKIPPED = 4
    PASSED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a body ended on one rank. ``error``: the exception's text, the reason of a skip, or how
    the process ended. ``stack``: where; may be empty."""

    ending: Ending
    error: str = ""
    stack: str = ""
