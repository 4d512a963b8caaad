# pyright: basic
# (Triton's interpreter has no types)
"""Whether a program is where it was before, with the same values in all variables."""

from __future__ import annotations

from itertools import count
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

_PLAIN = (bool, int, float, str, bytes, type(None))
_LASTING = (FunctionType, ModuleType, type, tl.dtype, upstream.InterpretedFunction)
_unequal = count()


def state_of(frame: FrameType | None, outermost: CodeType) -> int:
    """Of the kernel's functions that ``frame`` is inside of, up to one called by ``outermost``:
    where each stands, and its variables. Values that cannot be compared are never the same."""
    call: Any = upstream.InterpretedFunction.__call__
    callers, state = (call.__code__, outermost), []
    while frame is not None and frame.f_code is not outermost:
        if frame.f_back is not None and frame.f_back.f_code in callers:
            state.append((frame.f_code, frame.f_lasti, _value(tuple(frame.f_locals.values()))))
        frame = frame.f_back
    return hash(tuple(state))


def _value(of: Any) -> Any:
    kind = type(of)
    if kind is tl.tensor:
        return of.handle.data.tobytes()
    if kind in _PLAIN:
        return kind, of
    if isinstance(of, tuple | list):
        return tuple([_value(each) for each in of])
    if kind is tl.tuple:
        return _value(of.values)
    if kind is tl.constexpr:
        return _value(of.value)
    if kind is TensorHandle or isinstance(of, np.ndarray):
        return (of.data if kind is TensorHandle else of).tobytes()
    return id(of) if isinstance(of, _LASTING) else next(_unequal)
