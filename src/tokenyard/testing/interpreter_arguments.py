"""Arguments of an interpreted kernel: checked, and as int64, as on a GPU."""

from __future__ import annotations

import importlib
from functools import cache
from numbers import Integral
from typing import Any

from tokenyard.memory.kernel_launch import parameters, with_defaults


def bind(kernel: Any, args: tuple[int, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: int64 as on a GPU (the interpreter would make small integers int32), and
    constants, which may be left out where the kernel has defaults.

    Raises:
        ValueError: they do not fit the kernel, are no integers, or kernels are not interpreted in
            this process.
    """
    names = parameters(kernel)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise ValueError(
            f"{kernel.__name__} would be compiled, but on CPU processes kernels are interpreted: "
            "set TRITON_INTERPRET=1 before anything imports triton"
        )
    constants = with_defaults(kernel, constants)
    if len(args) != len(names.args) or set(constants) != set(names.constants):
        raise ValueError(
            f"{kernel.__name__} takes {names.args} and {names.constants}, not {len(args)} and "
            f"{[*constants]}"
        )
    given = zip(names.args, args, strict=True)
    arguments = {name: _int64(interpreter, kernel, name, value) for name, value in given}
    _rewrite(kernel, interpreter.InterpretedFunction)
    return arguments | constants


def _int64(interpreter: Any, kernel: Any, name: str, value: Any) -> Any:
    """An argument; of a struct all fields."""
    if hasattr(value, "_fields"):
        fields: dict[str, Any] = value._asdict()
        return type(value)(
            *(_int64(interpreter, kernel, f"{name}.{each}", at) for each, at in fields.items())
        )
    # a tensor of one number would pass as that number, a float without its fraction
    if not isinstance(value, Integral):
        raise ValueError(
            f"{name} of {kernel.__name__} is a {type(value).__name__}, but arguments are whole "
            "numbers: give tensors by their data_ptr(), and other numbers as constants"
        )
    kind: Any = interpreter.tl.int64
    bits = interpreter.np.array([value], interpreter.np.int64)
    return interpreter.tl.tensor(interpreter.TensorHandle(bits, kind), kind)


@cache
def _rewrite(kernel: Any, kind: type) -> None:
    """Have the interpreter read the kernel, and what it calls, here rather than in every child, and
    once."""
    seen: set[int] = set()
    pending = [kernel]
    while pending:
        function = pending.pop()
        if id(function) not in seen:
            seen.add(id(function))
            function.rewrite()
            pending += [
                value for value in function.fn.__globals__.values() if isinstance(value, kind)
            ]
