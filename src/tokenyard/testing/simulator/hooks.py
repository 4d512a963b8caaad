# pyright: basic
# (Triton's interpreter has no types)
"""Where the interpreter meets the simulator: kernels' memory operations, barriers and clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle

from tokenyard.kernels import two_net
from tokenyard.testing import interpreter
from tokenyard.testing.simulator.machine import Machine
from tokenyard.testing.simulator.network import Network
from tokenyard.testing.simulator.pages import UNSIGNED, raw
from tokenyard.testing.simulator.program import Program

_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


@contextmanager
def installed(machine: Machine, network: Network) -> Iterator[None]:
    """Send what kernels do to ``machine``, and what they ask of NVSHMEM to ``network``."""
    changes: list[tuple[Any, str, Any]] = [
        (interpreter.Builder, name, method) for name, method in _Hooks(machine).methods().items()
    ]
    copies = [module for name, module in sys.modules.items() if name.endswith(".two_net")]
    for module in {two_net, *copies}:  # which an object may be the first to import
        changes += [
            (module, "nvshmem_put_signal", lambda *args: network.put_signal(*map(_number, args))),
            (module, "nvshmem_fence", network.fence),
        ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    with interpreter.patched_language(), interpreter.clock(machine.read_clock):
        for change in changes:
            setattr(*change)
        try:
            yield
        finally:
            for change in before:
                setattr(*change)


def place(p: Program) -> None:
    builder = upstream.interpreter_builder
    builder.grid_dim, builder.grid_idx = p.launch.grid, p.index


def roles(p: Program) -> list[str]:
    """The device functions that a program is inside of, outermost first."""
    call: Any = upstream.InterpretedFunction.__call__
    found: list[str] = []
    frame = p.frame
    while frame is not None and frame.f_back is not None:
        if frame.f_back.f_code is call.__code__:
            found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found[::-1]


class _Hooks:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Of the builder, by name. (Functions: they are called with the builder first.)"""
        builder = interpreter.Builder
        methods: dict[str, Callable[..., Any]] = {
            "create_load": lambda _, ptrs, *__: self.load(ptrs, None, None),
            "create_store": lambda _, ptrs, value, *__: self.store(ptrs, value, None),
            "create_masked_load": lambda _, *args, **kwargs: self.load(*args, **kwargs),
            "create_masked_store": lambda _, *args, **kwargs: self.store(*args, **kwargs),
            "create_atomic_rmw": lambda builder, *args: self.rmw(builder, *args),
            "create_atomic_cas": lambda builder, *args: self.cas(builder, *args),
            "create_barrier": lambda _: self._machine.barrier(),
        }
        for name in ("SLE", "SLT", "SGE", "SGT", "ULE", "ULT", "UGE", "UGT", "EQ", "NE"):
            methods[f"create_icmp{name}"] = self._comparing(getattr(builder, f"create_icmp{name}"))
        for name in ("create_add", "create_sub"):
            methods[name] = _passing_on(getattr(builder, name))
        return methods

    def load(self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any) -> TensorHandle:
        element = ptrs.get_element_ty()
        dtype = upstream._get_np_dtype(element)
        shape = ptrs.data.shape
        addresses, lanes = _lanes(ptrs.data, mask)
        if addresses.size:
            bits = self._machine.load(addresses, dtype.itemsize, shape, lanes)
            values = bits.astype(bool) if dtype == np.bool_ else bits.view(dtype)
            if lanes is _ALL:
                return self._noted(TensorHandle(values.reshape(shape), element), addresses, lanes)
        out = np.zeros(shape, dtype)
        if other is not None:
            out[...] = other.data
        if addresses.size:
            out.reshape(-1)[lanes] = values
        return self._noted(TensorHandle(out, element), addresses, lanes)

    def store(self, ptrs: Any, value: Any, mask: Any, *_: Any, **__: Any) -> None:
        addresses, lanes = _lanes(ptrs.data, mask)
        if addresses.size:
            shape = ptrs.data.shape
            data = _spread(value.data, shape).reshape(-1)[lanes]
            self._machine.store(addresses, data.view(UNSIGNED[data.itemsize]), shape, lanes)

    def rmw(
        self, builder: Any, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        out = np.zeros(ptr.data.shape, value.data.dtype)
        addresses, lanes = _lanes(ptr.data, mask)
        if addresses.size:
            data = np.ascontiguousarray(_spread(value.data, ptr.data.shape).reshape(-1)[lanes])
            kind = builder.ir_rmw_op_to_interpreter_rmw_op[op]
            bits = data.view(UNSIGNED[data.itemsize]) if op == ir.ATOMIC_OP.XCHG else data
            all_lanes = np.ones(addresses.size, bool)

            def act() -> np.ndarray:
                if value.dtype.scalar == tl.bfloat16:
                    return _add_narrow(addresses, data, value.dtype.scalar)
                return native.atomic_rmw(
                    kind, addresses, bits, all_lanes, native.MEM_SEMANTIC.RELAXED
                )

            out.reshape(-1)[lanes] = self._atomic(addresses, data.itemsize, act, sem, scope).view(
                data.dtype
            )
        return self._noted(TensorHandle(out, value.dtype.scalar), addresses, lanes)

    def cas(
        self, builder: Any, ptr: Any, compare: Any, value: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        kind = UNSIGNED[value.data.itemsize]
        shape = ptr.data.shape
        addresses = np.ascontiguousarray(ptr.data).reshape(-1)
        wants, news = (
            np.ascontiguousarray(np.broadcast_to(h.data, shape)).reshape(-1).view(kind)
            for h in (compare, value)
        )

        def act() -> np.ndarray:
            return native.atomic_cas(addresses, wants, news, native.MEM_SEMANTIC.RELAXED)

        old = self._atomic(addresses, value.data.itemsize, act, sem, scope)
        handle = TensorHandle(old.view(value.data.dtype).reshape(shape), compare.dtype.scalar)
        return self._noted(handle, addresses, _ALL)

    def _atomic(
        self, addresses: Any, size: int, act: Callable[[], Any], sem: Any, scope: Any
    ) -> Any:
        everywhere = scope == ir.MEM_SYNC_SCOPE.SYSTEM
        wide = scope != ir.MEM_SYNC_SCOPE.CTA
        order = (wide and sem in _ACQUIRES, wide and sem in _RELEASES, everywhere)
        return self._machine.atomic(addresses, size, act, order)

    def _noted(self, handle: TensorHandle, addresses: np.ndarray, lanes: Any) -> TensorHandle:
        """What was read, marked for :meth:`_comparing` if the program is to say what it awaits."""
        p = self._machine.caller
        if p.notes and addresses.size:
            where = addresses.tolist()
            handle.set_attr("read", (where, lanes))
            for address in where:
                p.compared.pop(address, None)
        return handle

    def _comparing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A comparison of the clock with something says when the program will wake up by itself,
        that of something read what it waits for."""

        def compare(builder: Any, left: Any, right: Any) -> Any:
            if "clock" in left.attr or "clock" in right.attr:
                ahead = int(right.data.reshape(-1)[0]) - int(left.data.reshape(-1)[0])
                newer = left.attr.get("clock", -1) - right.attr.get("clock", -1)
                self._machine.compares_clock(
                    ahead if newer > 0 else -ahead if newer else abs(ahead)
                )
            for read, other in ((left, right), (right, left)):
                if "read" in read.attr and "clock" not in other.attr:
                    addresses, lanes = read.attr["read"]
                    values = _spread(other.data, read.data.shape).reshape(-1)[lanes]
                    compared = self._machine.caller.compared
                    for address, value in zip(addresses, values.tolist(), strict=True):
                        known = compared.setdefault(address, [])
                        if value not in known:
                            known.append(value)
            return original(builder, left, right)

        return compare


def _passing_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """A sum or difference with the clock in it changes as the clock does."""

    def op(builder: Any, left: Any, right: Any) -> Any:
        result = original(builder, left, right)
        times = [each.attr["clock"] for each in (left, right) if "clock" in each.attr]
        if times:
            result.set_attr("clock", max(times))
        return result

    return op


_ALL = slice(None)


def _lanes(ptrs: np.ndarray, mask: Any) -> tuple[np.ndarray, Any]:
    """Flat addresses of the lanes that take part (all without a mask), and which they are."""
    flat = np.ascontiguousarray(ptrs).reshape(-1)
    if mask is None:
        return flat, _ALL
    wanted = np.asarray(mask.data, bool)
    if b"\0" not in wanted.tobytes():
        return flat, _ALL
    if wanted.size == 1:
        return flat[:0], slice(0, 0)
    lanes = np.flatnonzero(_spread(wanted, ptrs.shape).reshape(-1))
    return flat[lanes], lanes


def _spread(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return data if data.shape == shape else np.broadcast_to(data, shape)


def _add_narrow(addresses: np.ndarray, data: np.ndarray, dtype: Any) -> np.ndarray:
    """Atomic additions of a float that numpy lacks, one lane after the other."""
    old = np.empty_like(data)
    for lane, address in enumerate(addresses.tolist()):
        cell = raw(address, data.itemsize).view(data.dtype)
        old[lane] = cell[0]
        both = interpreter.widen(np.array([cell[0], data[lane]]), dtype)
        cell[:] = interpreter.narrow(both[:1] + both[1:], dtype)
    return old


def _number(value: Any) -> int:
    """What the interpreter wraps."""
    handle = getattr(value, "handle", None)
    return int(getattr(value, "value", value) if handle is None else handle.data.reshape(-1)[0])
