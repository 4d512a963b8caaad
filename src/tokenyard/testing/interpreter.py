# pyright: basic
# (it mends an interpreter that has no types)
"""Repairs of Triton 3.6's interpreter, made once, when this is imported with ``TRITON_INTERPRET=1``
set; otherwise nothing is done.

What was wrong, and is right afterwards:

- casts to bf16 and fp8 truncated, and casts between these and integers or fp64 took the bits for a
  number; now they round as torch does, and fp8 saturates as ``cvt.rn.satfinite`` does;
- arithmetic and comparisons of bf16 and fp8 worked on the bits; a bf16 constant could not be made;
- ``for i in range(...)`` gave plain Python ints (no ``.to``, no overflow); now ``i`` is an integer
  tensor, as compiled;
- a tensor could not be an index under numpy 2.4; a 32-bit integer could not become a pointer;
- ``tl.histogram`` failed for int64 and overflowed for small integers;
- masked lanes of atomics returned garbage; ``atomic_xchg`` of floats failed;
- inline assembly: the strings of :data:`ASSEMBLY` are emulated, with a clock that can be exchanged
  (:func:`clock`);
- every call of a device function patched ``triton.language`` anew (:func:`patched_language`), and
  much else was made again and again (:mod:`.interpreter_speed`): that took most of the time.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

from tokenyard.memory.kernel_launch import parameters, with_defaults
from tokenyard.testing import interpreter_operators, interpreter_speed

Builder = upstream.InterpreterBuilder

_NARROW = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
"""Floats that numpy lacks: their tensors hold the bits."""
_LARGEST = {kind: torch.finfo(_NARROW[kind]).max for kind in (tl.float8e4nv, tl.float8e5)}
_TORCH_BITS = {1: torch.uint8, 2: torch.int16}
_OF_BITS = (
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift, np.where
)  # fmt: skip

_state = SimpleNamespace(clock=time.monotonic_ns, patched=False)


def is_interpreting() -> bool:
    """Whether kernels defined from now on are interpreted."""
    return bool(triton.knobs.runtime.interpret)  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def clock(now_ns: Callable[[], int]) -> Iterator[None]:
    """Let kernels read ``now_ns()`` (nanoseconds) as their clock."""
    before, _state.clock = _state.clock, now_ns
    try:
        yield
    finally:
        _state.clock = before


ASSEMBLY: dict[str, Callable[[], int]] = {"mov.u64 $0, %globaltimer;": lambda: _state.clock()}
"""What is emulated of inline assembly: strings without inputs, with one int64 output."""


@contextmanager
def patched_language() -> Iterator[None]:
    """Let kernels' bodies be called as Python functions, all in here; calls of device functions
    cost little."""
    if _state.patched:
        yield
        return
    scope = upstream._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    options = upstream.interpreter_builder.options
    # Its checks go nowhere.
    upstream.interpreter_builder.options = upstream.InterpreterOptions(sanitize_overflow=False)
    _state.patched = True
    try:
        yield
    finally:
        _state.patched = False
        upstream.interpreter_builder.options = options
        scope.restore()


# Casts


def widen(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The float32 numbers behind the bits of a narrow float."""
    bits = torch.from_numpy(np.array(data, copy=True)).view(_TORCH_BITS[data.itemsize])
    return bits.view(_NARROW[dtype]).float().numpy()


def narrow(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """The bits of the nearest (ties to even) narrow floats; fp8 saturates, and has one NaN, as
    ``cvt.rn.satfinite`` does."""
    values = torch.from_numpy(np.array(numbers, copy=True))
    if dtype in _LARGEST:
        most = _LARGEST[dtype]
        values = torch.where(values.isnan(), values.abs(), values.clamp(-most, most))
    rounded = values.to(_NARROW[dtype])
    return rounded.view(_TORCH_BITS[rounded.itemsize]).numpy().view(upstream._get_np_dtype(dtype))


def _numbers(handle: TensorHandle) -> np.ndarray:
    dtype = handle.dtype.scalar
    return widen(handle.data, dtype) if dtype in _NARROW else handle.data


def _cast(self: Any, source: TensorHandle, to: Any) -> TensorHandle:
    dtype, numbers = to.scalar, _numbers(source)
    if dtype in _NARROW:
        if numbers.dtype not in (np.float32, np.float64):
            numbers = numbers.astype(np.float32)
        return TensorHandle(narrow(numbers, dtype), dtype)
    return TensorHandle(numbers.astype(upstream._get_np_dtype(dtype)), dtype)


def _fp_to_fp(self: Any, source: TensorHandle, to: Any, rounding: Any) -> TensorHandle:
    known = all(
        dtype in _NARROW or dtype.is_standard_floating()
        for dtype in (source.dtype.scalar, to.scalar)
    )
    if known and rounding != ir.ROUNDING_MODE.RTZ:
        return _cast(self, source, to)
    return _upstream["create_fp_to_fp"](self, source, to, rounding)


def _int_to_ptr(self: Any, source: TensorHandle, to: Any) -> TensorHandle:
    return TensorHandle(source.data.astype(np.uint64), to.scalar)


def _get_narrow(dtype: Any) -> Callable[[Any, float], TensorHandle]:
    return lambda self, value: TensorHandle(narrow(np.array([value], np.float32), dtype), dtype)


# Arithmetic


def _rounded(result: np.ndarray, dtype: Any) -> TensorHandle:
    if result.dtype == np.bool_ or dtype not in _NARROW:
        return TensorHandle(result, dtype)
    return TensorHandle(narrow(result.astype(np.float32), dtype), dtype)


def _on_numbers(name: str) -> Callable[..., TensorHandle]:
    """Upstream's ``name``, of handles and a function of arrays, which gets numbers, not bits."""

    def operate(self: Any, *given: Any) -> TensorHandle:
        *handles, op = given
        dtype = handles[-1].dtype.scalar
        if dtype not in _NARROW or op in _OF_BITS:
            return _upstream[name](self, *given)
        return _rounded(op(*map(_numbers, handles)), dtype)

    return operate


def _fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    return _rounded(_numbers(x) * _numbers(y) + _numbers(z), z.dtype.scalar)


def _histogram(self: Any, data: TensorHandle, bins: int, mask: TensorHandle | None) -> TensorHandle:
    values = data.data if mask is None else data.data[mask.data]
    inside = values[(values >= 0) & (values < bins)].astype(np.int64)
    return TensorHandle(np.bincount(inside, minlength=bins).astype(np.int32), tl.int32)


def _sum(self: Any, source: Any) -> Any:
    """Of narrow floats: in float32, rounded once."""
    dtype = source.dtype
    if dtype not in _NARROW:
        return _upstream["sum"](self, source)
    total = np.sum(widen(source.handle.data, dtype), axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(narrow(np.asarray(total), dtype)[()], dtype)


# Atomics


def _atomic_rmw(
    self: Any, op: Any, ptr: Any, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
) -> TensorHandle:
    """As upstream, with contiguous lanes, zeros for masked ones, and exchanges of anything by its
    bits."""
    data = np.ascontiguousarray(value.data)
    mode, kind = self.ir_sem_to_interpreter_sem[sem], self.ir_rmw_op_to_interpreter_rmw_op[op]
    if op == ir.ATOMIC_OP.XCHG:
        data = data.view(f"u{data.itemsize}")
    at = np.ascontiguousarray(ptr.data)
    lanes = np.ascontiguousarray(np.broadcast_to(mask.data, at.shape))
    old = native.atomic_rmw(kind, at, data, lanes, mode).view(value.data.dtype)
    return TensorHandle(np.where(lanes, old, np.zeros_like(old)), value.dtype.scalar)


# Inline assembly


def _inline_asm(
    self: Any, text: str, constraints: str, values: Any, types: Any, pure: bool, pack: int
) -> SimpleNamespace:
    """Returns an op, whose only result is asked for."""
    if text not in ASSEMBLY or values:
        raise NotImplementedError(
            f"inline assembly {text!r} is not emulated: add it to "
            f"tokenyard.testing.interpreter.ASSEMBLY"
        )
    now = ASSEMBLY[text]()
    handle = TensorHandle(np.array([now], np.int64), tl.int64)
    handle.set_attr("clock", now)  # when it was read
    return SimpleNamespace(get_result=lambda _: handle)


# Loops


def tensor_range(*bounds: Any) -> Iterator[Any]:
    """``range`` as compiled: its numbers are tensors of the widest integer type of its bounds."""
    values = [int(bound) for bound in bounds]
    wide = any(
        isinstance(bound, tl.tensor) and bound.dtype.primitive_bitwidth > 32 for bound in bounds
    )
    wide = wide or any(not -(2**31) <= value < 2**31 for value in values)
    dtype, kind = (np.int64, tl.int64) if wide else (np.int32, tl.int32)
    for number in range(*values):
        yield tl.tensor(TensorHandle(np.array([number], dtype), kind), kind)


class _Rewriter(upstream.ASTTransformer):
    """Upstream's, of statements only, with loops of tensors."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for each in (*getattr(node, "body", ()), *getattr(node, "orelse", ())):
            self.visit(each)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:  # noqa: N802 (ast's name)
        call: Any = super().visit_Assign(node).value
        for new in (call, call.func, call.func.value, call.args[1]):
            ast.copy_location(new, node)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:  # noqa: N802 (ast's name)
        call = node.iter
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("range", "tl.range"):
            call.func = ast.copy_location(ast.Name("tensor_range", ast.Load()), call)
            call.keywords = []  # num_stages and the like
        return self.generic_visit(node)


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _state.patched:
        return (self.rewritten_fn.get(self.fn) or self.rewrite())(*args, **kwargs)
    return _upstream["__call__"](self, *args, **kwargs)


def _patch_tensor(tensor: Any, scope: Any) -> None:
    _upstream["_patch_lang_tensor"](tensor, scope)
    scope.set_attr(
        tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
    )


# Arguments


def bind(kernel: Any, args: tuple[int, ...], constants: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name: int64 as on a GPU (the interpreter would make small integers int32), and
    constants, which may be left out where the kernel has defaults.

    Raises:
        ValueError: they do not fit the kernel, are no integers, or kernels are not interpreted in
            this process.
    """
    names = parameters(kernel)
    if not isinstance(kernel, upstream.InterpretedFunction):
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
    arguments = {name: _int64(kernel, name, value) for name, value in given}
    _rewrite(kernel)
    return arguments | constants


def _int64(kernel: Any, name: str, value: Any) -> Any:
    """An argument; of a struct all fields."""
    if hasattr(value, "_fields"):
        fields = value._asdict().items()
        return type(value)(*(_int64(kernel, f"{name}.{each}", part) for each, part in fields))
    # a tensor of one number would pass as that number, a float without its fraction
    if not isinstance(value, Integral):
        raise ValueError(
            f"{name} of {kernel.__name__} is a {type(value).__name__}, but arguments are whole "
            "numbers: give tensors by their data_ptr(), and other numbers as constants"
        )
    return tl.tensor(TensorHandle(np.array([value], np.int64), tl.int64), tl.int64)


@cache
def _rewrite(kernel: Any) -> None:
    """Read a kernel, and what it calls, once, and here rather than in every child."""
    known, pending = set[Any](), [kernel]
    while pending:
        function = pending.pop()
        function.rewrite()
        known.add(function)
        used = function.fn.__globals__.values()
        pending += {f for f in used if isinstance(f, upstream.InterpretedFunction)} - known


_upstream: dict[str, Any] = {}


def _replace(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _upstream[name] = getattr(owner, name)
    setattr(owner, name, value)


def _repair() -> None:
    for name, method in {
        "cast_impl": _cast,
        "create_fp_to_fp": _fp_to_fp,
        "create_int_to_ptr": _int_to_ptr,
        **{f"get_{kind}": _get_narrow(kind) for kind in _NARROW},
        **{name: _on_numbers(name) for name in ("unary_op", "binary_op", "ternary_op")},
        "create_fma": _fma,
        "create_histogram": _histogram,
        "create_atomic_rmw": _atomic_rmw,
        "create_inline_asm": _inline_asm,
    }.items():
        _replace(Builder, name, method)
    _replace(upstream.ReduceOps, "sum", _sum)
    _replace(upstream, "_patch_lang_tensor", _patch_tensor)
    interpreter_speed.install(_replace)
    interpreter_operators.install(_replace)
    _replace(upstream, "tensor_range", tensor_range)  # where rewritten kernels find their globals
    _replace(upstream.InterpretedFunction, "__call__", _call_device_function)
    upstream.FunctionRewriter.ast_transformer = _Rewriter()


if is_interpreting() and not _upstream:
    _repair()
