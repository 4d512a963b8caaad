"""Compile kernels for a GPU and launch them with little Python.

Every parameter of a kernel that is no ``tl.constexpr`` is compiled as an int64, or as a NamedTuple
of int64 if it is annotated with one; it is specialised on nothing, however the kernel is decorated.
So there is one machine code per (kernel, constants, warps, registers), the same on all ranks.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch


class Parameters(NamedTuple):
    """Names of a kernel's parameters: int64 arguments first, then constants."""

    args: tuple[str, ...]
    constants: tuple[str, ...]


def parameters(kernel: Any) -> Parameters:
    """The parameters of a ``@triton.jit`` function. ValueError: an argument after a constant."""
    given = inspect.signature(kernel.fn).parameters
    constants = tuple(name for name in given if "constexpr" in str(given[name].annotation))
    args = tuple(name for name in given if name not in constants)
    if (*args, *constants) != tuple(given):
        raise ValueError(f"{kernel.__name__}: tl.constexpr parameters must come after the others")
    return Parameters(args, constants)


def with_defaults(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """``constants``, and the kernel's own values of those that are left out."""
    given, names = inspect.signature(kernel.fn).parameters, parameters(kernel).constants
    usual = [name for name in names if given[name].default is not inspect.Parameter.empty]
    return {name: given[name].default for name in usual} | constants


def signature_of(kernel: Any) -> dict[str, Any]:
    """Triton's type of each parameter: ``"i64"``, a NamedTuple of them, or ``"constexpr"``."""
    names, given = parameters(kernel), inspect.signature(kernel.fn).parameters
    known = {name: kernel.fn.__globals__.get(str(given[name].annotation)) for name in names.args}
    arguments = {
        name: each(*["i64"] * len(each._fields)) if hasattr(each, "_fields") else "i64"
        for name, each in known.items()
    }
    return arguments | dict.fromkeys(names.constants, "constexpr")


def wrapped(value: Any) -> Any:
    """A struct of constants as the compiler, not the interpreter, takes it: of ``tl.constexpr``."""
    if not hasattr(value, "_fields"):
        return value
    constexpr: Any = importlib.import_module("triton.language").constexpr
    return type(value)(*(constexpr(wrapped(each)) for each in value))


def is_set(constants: dict[str, Any], *names: str) -> bool:
    """Whether one of these constants is true, or a field of such a name of a struct."""
    return any(constants.get(name) for name in names) or any(
        is_set(each._asdict(), *names) for each in constants.values() if hasattr(each, "_fields")
    )


def calls_network(constants: dict[str, Any]) -> bool:
    """Whether a kernel with these constants calls NVSHMEM."""
    return is_set(constants, "NET", "network")


def device_library() -> str:
    """The library that kernels with NVSHMEM's calls are linked with. RuntimeError: not found."""
    found: Any = importlib.import_module("torch.distributed._symmetric_memory._nvshmem_triton")
    return str(found.NvshmemLibFinder.find_device_library())


def gpu_target(architecture: int | str) -> Any:
    """Triton's name of a target: ``90`` is sm_90, ``"gfx942"`` an AMD GPU."""
    triton: Any = importlib.import_module("triton.backends.compiler")
    if isinstance(architecture, int):
        return triton.GPUTarget("cuda", architecture, 32)
    return triton.GPUTarget("hip", architecture, 64)


def compile_for(
    kernel: Any,
    constants: dict[str, Any],
    num_warps: int,
    target: Any,
    max_registers: int | None = None,
) -> Any:
    """Compile for ``target`` (:func:`gpu_target`), without a GPU, to Triton's ``CompiledKernel``
    (``.asm["ptx"]``, ...). Multiply-adds are not fused, so that sums have the same bits as torch's.
    ValueError: ``constants`` are not the kernel's constexprs, or this process interprets kernels.
    """
    names, constants = parameters(kernel), with_defaults(kernel, constants)
    if set(constants) != set(names.constants):
        raise ValueError(
            f"{kernel.__name__}: constants ({sorted(constants)}) must be {sorted(names.constants)}"
        )
    compiler: Any = importlib.import_module("triton.compiler")
    jit: Any = importlib.import_module("triton.runtime.jit")
    if not isinstance(kernel, jit.JITFunction):
        why = "this process interprets kernels (TRITON_INTERPRET=1)"
        raise ValueError(f"{kernel.__name__} cannot be compiled: {why}")
    constexprs = {name: wrapped(constants[name]) for name in names.constants}
    source = compiler.ASTSource(fn=kernel, signature=signature_of(kernel), constexprs=constexprs)
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    if calls_network(constants):
        options["extern_libs"] = {"libnvshmem_device": device_library()}
    return compiler.compile(source, target=target, options=options)


class Processor(NamedTuple):
    """What one multiprocessor of a device has."""

    registers: int
    threads: int
    shared_bytes: int
    programs: int = 32


def resident_programs(
    processor: Processor, num_warps: int, registers: int, shared_bytes: int
) -> int:
    """Programs that fit on one multiprocessor together. ``registers``: of one thread."""
    # Handed out by 8 per thread, from four equal files.
    per_warp = -(-max(registers, 1) // 8) * 8 * 32
    warps = min(4 * (processor.registers // 4 // per_warp), processor.threads // 32)
    fit = min(warps // num_warps, processor.programs)
    if shared_bytes:
        # 1 KiB of each is the driver's.
        fit = min(fit, processor.shared_bytes // (shared_bytes + 1024))
    return fit


class Loaded(NamedTuple):
    """A kernel on a device, ready to launch."""

    call: Callable[..., None]  # Triton's launcher for this signature, written in C
    function: int  # the driver's handle
    shared_bytes: int
    early: bool  # whether to set programs up while the launch before runs: the kernel waits itself
    most: int  # programs that fit on the device together
    kept: tuple[Any, Any]  # the kernel (its id is in the key) and its module


CLUSTER = 4
"""Programs that are placed together where few run, as NCCL places its own. Else an H200 puts the
first eight into one GPC; each GPC gets as much of NVLink as any other, so those eight are late
(docs/benchmarks/experiments-nvlink.md, Few multiprocessors)."""


class Kernels:
    """The kernels that are loaded on one GPU, and the fast way to launch them, over ``num_sms``
    multiprocessors each. Threads may share it. RuntimeError: another Triton than 3.6.

    ``clustered``: programs of the largest launch that is placed in clusters of :data:`CLUSTER`.
    They must all find room at once, beside what they wait for: 0, none, where launches of several
    ranks share the GPU.
    """

    def __init__(self, device: torch.device, num_sms: int, clustered: int = 0) -> None:
        self._index, self._num_sms, self._clustered = device.index, num_sms, clustered
        self._loaded: dict[tuple[Any, ...], Loaded] = {}
        self._lock = threading.Lock()
        triton: Any = importlib.import_module("triton")
        if not triton.__version__.startswith("3.6."):
            this = f"this is {triton.__version__}: install 3.6"
            raise RuntimeError(f"kernels are launched in the way of Triton 3.6; {this}")
        self._hooks: Any = triton.knobs.runtime
        self._current_device: Callable[[], int] = torch._C._cuda_getDevice  # pyright: ignore
        self._captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # pyright: ignore

    def bind(
        self,
        kernel: Any,
        grid: int,
        num_warps: int,
        max_registers: int | None,
        constants: dict[str, Any],
        *,
        together: bool = True,
    ) -> Callable[..., None]:
        """``grid`` programs of ``kernel``, compiled and loaded, as a function of the arguments; it
        launches on the current stream. ValueError: not all programs would run ``together``: those
        that do could wait for ever for those that do not."""
        loaded = self._prepare(kernel, num_warps, max_registers, constants)
        if together and grid > loaded.most:
            limit = f"must be at most {loaded.most}: all programs run together"
            raise ValueError(f"grid ({grid}) of {kernel.__name__} {limit}")
        cluster = CLUSTER if grid <= self._clustered and grid % CLUSTER == 0 else 1
        # names of this function, not attributes: a launch looks up as little as possible
        call, function, shared_bytes, early, _, kept = loaded
        packed = num_warps, cluster, shared_bytes
        nothing = (None,) * len(constants)  # the launcher skips them
        current_device, stream_of, index = self._current_device, self._stream, self._index
        hooks, captures, clusters = self._hooks, self._captures, grid // cluster

        def launch(*args: int) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    return launch(*args)
            enter, leave, details = hooks.launch_enter_hook, hooks.launch_exit_hook, None
            stream = stream_of(index)
            if enter.calls or leave.calls:  # a profiler listens
                metadata = kept[1].launch_metadata
                details = metadata((grid, 1, 1), stream, *args, *nothing)
            else:
                enter = leave = None
            # early in graphs only: else profilers would count the wait as time of the kernel
            call(
                clusters, 1, 1, stream, function, False, early and captures(), None, None, packed,
                details, enter, leave, *args, *nothing,
            )  # fmt: skip

        return launch

    def _prepare(
        self, kernel: Any, num_warps: int, max_registers: int | None, constants: dict[str, Any]
    ) -> Loaded:
        """Compile and load, once. May wait for everything that runs on the device."""
        # 1, True and 1.0 are equal, also in structs.
        key = (id(kernel), num_warps, max_registers, repr(constants))
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = self._load(kernel, num_warps, max_registers, constants)
            return self._loaded[key]

    def _load(
        self, kernel: Any, num_warps: int, max_registers: int | None, constants: dict[str, Any]
    ) -> Loaded:
        major, minor = torch.cuda.get_device_capability(self._index)
        compiled = compile_for(
            kernel, constants, num_warps, gpu_target(10 * major + minor), max_registers
        )
        with torch.cuda.device(self._index):
            launcher: Any = compiled.run  # loads the module, makes the launcher
            if calls_network(constants):  # NVSHMEM must know a module before its kernels run
                from torch._C._distributed_c10d import _nvshmemx_cumodule_init  # pyright: ignore

                _nvshmemx_cumodule_init(compiled.module)
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise ValueError(
                f"{kernel.__name__} needs scratch memory, which launches here do not give"
            )
        processor, shared = processor_of(self._index), compiled.metadata.shared
        residents = resident_programs(processor, num_warps, compiled.n_regs, shared)
        early, most = is_set(constants, "EARLY", "early"), residents * self._num_sms
        kept = (kernel, compiled)
        return Loaded(launcher.launch, compiled.function, shared, early, most, kept)


@cache
def kernels_of(index: int, num_sms: int) -> Kernels:
    """Of CUDA device ``index``, for the whole process: a second object loads nothing."""
    device = torch.device("cuda", index)
    able = torch.cuda.get_device_capability(device) >= (9, 0)
    return Kernels(device, num_sms, multiprocessors(device) // 2 if able else 0)


def properties_of(device: torch.device | int) -> Any:
    """What torch knows of a CUDA device."""
    return cast("Any", torch.cuda.get_device_properties(device))


def processor_of(index: int) -> Processor:
    """What a multiprocessor of CUDA device ``index`` has."""
    seen = properties_of(index)
    registers = getattr(seen, "regs_per_multiprocessor", 65536)  # torch does not promise this one
    return Processor(
        registers, seen.max_threads_per_multi_processor, seen.shared_memory_per_multiprocessor
    )


def multiprocessors(device: torch.device) -> int:
    """How many a CUDA device has."""
    return properties_of(device).multi_processor_count


def wait_until(ready: Callable[[], bool], timeout: float, brisk: float = 10e-3) -> bool:
    """Poll ``ready`` until it is true, letting other threads run (every 100 microseconds after
    ``brisk`` seconds); False after ``timeout`` seconds."""
    start = time.monotonic()
    while not ready():
        waited = time.monotonic() - start
        if waited >= timeout:
            return False
        if waited > brisk:
            time.sleep(100e-6)
        else:
            os.sched_yield()  # gives up the interpreter; sleep(0) would cost 50 us
    return True
