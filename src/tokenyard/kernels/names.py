"""What profilers call the kernels: ``tokenyard::low_latency::dispatch()`` instead of a Python
function's name.

A launch has the name of its machine code. Profilers turn symbols back into C++ names, so a symbol
made like those of a C++ compiler gives kernels a namespace of their own. Programs that look for
DeepEP's kernels in a trace search ``::dispatch`` and ``::combine``: here too launches that move
rows bear these names, both launches of a call in two the same one, and others do not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.profiler import record_function

NAMESPACE = "tokenyard"

_NOTHING = nullcontext()


def symbol_of(name: str) -> str:
    """The symbol of a C++ function without arguments.

    >>> symbol_of("low_latency::dispatch")  # tokenyard::low_latency::dispatch()
    '_ZN9tokenyard11low_latency8dispatchEv'
    """
    parts = (NAMESPACE, *name.split("::"))
    return f"_ZN{''.join(f'{len(part)}{part}' for part in parts)}Ev"


def shown_as(name: str) -> Callable[[Any], str]:
    """For ``triton.jit(repr=...)``: one name whatever the constants, so a table of kernels has one
    line for it."""
    symbol = symbol_of(name)
    return lambda _: symbol


def span(name: str) -> Any:
    """A name for what the host does inside, if a profiler is listening: otherwise it would cost as
    much as a launch."""
    listening = torch.autograd._profiler_enabled()  # pyright: ignore
    return record_function(name) if listening else _NOTHING
