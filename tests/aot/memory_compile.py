"""What ``tokenyard.memory.kernel_launch`` compiles for sm_90 and how it launches, as JSON.

A program of its own: kernels must not be interpreted here. The launch goes through Triton's own
launcher to a driver that only writes down what it was given (``python memory_compile.py DIRECTORY``
builds it there, if there is a C compiler).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton

import memory_kernels as kernels
from tokenyard.memory.kernel_launch import (
    Kernels,
    Loaded,
    compile_for,
    gpu_target,
    parameters,
    signature_of,
)

SM_90 = gpu_target(90)
CONSTANTS: dict[str, dict[str, Any]] = {
    "everybody": {"R": 4, "W": 16},
    "double": {"W": 16},
    "widths": {},
    "multiply_add": {"W": 256},
    "count_up": {"W": 16},
}
DRIVER = """
#include "cuda.h"
unsigned long long seen[16];
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  seen[0] += 1; seen[1] = c->gridDimX; seen[2] = c->gridDimY * c->gridDimZ; seen[3] = c->blockDimX;
  seen[4] = c->sharedMemBytes; seen[5] = (unsigned long long)c->hStream;
  seen[6] = (unsigned long long)f;
  seen[7] = c->numAttrs; seen[14] = 1;
  for (int i = 0; i < c->numAttrs; ++i)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      seen[14] = c->attrs[i].value.clusterDim.x;
  /* every kernel here has five parameters */
  for (int i = 0; i < 4; ++i) seen[8 + i] = *(unsigned long long *)params[i];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) {
  *c = (CUcontext)1; return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult e, const char **s) { *s = ""; return CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) {
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
"""


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


def compiled_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, constants in CONSTANTS.items():
        kernel = getattr(kernels, name)
        compiled = compile_for(kernel, constants, 4, SM_90, max_registers=40)
        ptx = compiled.asm["ptx"]
        entry = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
        facts[name] = {
            "signature": signature_of(kernel),
            "args": len(parameters(kernel).args),
            "params": re.findall(r"\.param \.(\w+) (?!\.ptr)", entry),
            "maxnreg": re.findall(r"\.maxnreg (\d+)", ptx),
        }
    sass = compile_for(kernels.multiply_add, {"W": 256}, 4, SM_90).asm["sass"]
    waits = {
        early: compile_for(kernels.follower, {"EARLY": early}, 4, SM_90).asm["ptx"]
        for early in (True, False)
    }
    waits["old"] = compile_for(kernels.follower, {"EARLY": False}, 4, gpu_target(80)).asm["ptx"]
    facts["waits"] = [ptx.count("griddepcontrol.wait") for ptx in waits.values()]
    facts["multiplications"] = {
        op: len(re.findall(rf"\b{op}\b", sass)) for op in ("FMUL", "FADD", "FFMA")
    }
    facts["free"] = re.findall(
        r"\.maxnreg", compile_for(kernels.double, {"W": 16}, 1, SM_90).asm["ptx"]
    )
    facts["wrong constants"] = refusal(compile_for, kernels.double, {"V": 16}, 4, SM_90)
    facts["wrong order"] = refusal(compile_for, kernels.constant_in_front, {"W": 1}, 4, SM_90)
    return facts


def driver(directory: Path) -> ctypes.CDLL:
    """Build and load the driver that writes down launches."""
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library, source = directory / "libcuda.so.1", directory / "driver.c"
    source.write_text(DRIVER)
    flags = ["-shared", "-fPIC", f"-I{include}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", str(source), *flags, "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


class Pretended(Kernels):
    """Kernels of a GPU that is not there."""

    loads = 0

    def _load(
        self, kernel: Any, num_warps: int, max_registers: int | None, constants: dict[str, Any]
    ) -> Loaded:
        from triton.backends.nvidia.driver import CudaLauncher

        self.loads += 1
        compiled = compile_for(kernel, constants, num_warps, SM_90, max_registers)
        compiled.module, compiled.function = 1, 77
        call = CudaLauncher(compiled.src, compiled.metadata).launch
        early, shared = bool(constants.get("EARLY")), compiled.metadata.shared
        return Loaded(call, compiled.function, shared, early, 100, (kernel, compiled))


def launched_facts(directory: Path) -> dict[str, Any]:
    seen = (ctypes.c_ulonglong * 16).in_dll(driver(directory), "seen")
    torch._C._cuda_getDevice = lambda: 3
    torch._C._cuda_getCurrentRawStream = lambda index: 1000 + index
    pretended = Pretended(torch.device("cuda", 3), 10, clustered=24)
    large = (1 << 47) + 1
    facts: dict[str, Any] = {}
    pretended.bind(kernels.everybody, 24, 8, None, {"R": 4, "W": 16})(*(large, 1, 16, -5))
    facts["first"] = list(seen)[:12]
    facts["clusters"] = {}
    for grid in (1, 8, 22, 24, 28):
        pretended.bind(kernels.everybody, grid, 8, None, {"R": 4, "W": 16})(*(2, 3, 4, 5))
        facts["clusters"][str(grid)] = [seen[1], seen[14]]
    pretended.bind(kernels.everybody, 1, 8, None, {"R": 4, "W": 16})(*(2, 3, 4, 5))
    facts["second"] = list(seen)[:12]
    facts["loads"] = pretended.loads
    for constants in ({"W": 1}, {"W": True}, {"W": 1}):
        pretended.bind(kernels.double, 1, 4, None, constants)(*(1, 2, 3))
    facts["loads of 1 and True"] = pretended.loads - facts["loads"]
    facts["too many"] = refusal(pretended.bind, kernels.double, 101, 4, None, {"W": 1})
    heard: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(
        lambda metadata: heard.append(metadata.get()["name"])
    )
    pretended.bind(kernels.double, 1, 4, None, {"W": 1})(*(1, 2, 3))
    facts["heard"] = heard[:]
    facts["launches"] = seen[0] - len(facts["clusters"])
    facts["attributes"] = {}
    for captures in (False, True):
        pretended._captures = lambda captures=captures: captures
        for early in (False, True):
            pretended.bind(kernels.follower, 1, 4, None, {"EARLY": early})(*(1, 2, 3, 4, 5, 6))
            facts["attributes"][f"early {early}, captured {captures}"] = seen[7]
    before = pretended.loads
    for factor in (1, True, 1):
        k = kernels.Outer(16, kernels.Inner(factor))
        pretended.bind(kernels.in_structs, 1, 4, None, {"k": k})(large, kernels.Pair(1, -2), 3)
    facts["structs"] = [pretended.loads - before, *list(seen)[8:12]]
    return facts


if __name__ == "__main__":
    everything = compiled_facts()
    if shutil.which("cc"):
        everything["launched"] = launched_facts(Path(sys.argv[1]))
    print(json.dumps(everything))
