"""What each launched kernel is called, what compiled code of the smallest is called, and the code
of the layout's, as JSON.

A program of its own, like ``nvlink_compile.py``: kernels must not be interpreted here.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import tokenyard.kernels
from low_latency_compile import record
from tokenyard.deep_ep import token_layout
from tokenyard.kernels.layout import layout_kernel
from tokenyard.memory.kernel_launch import compile_for, gpu_target


def launched() -> dict[str, Any]:
    """Every kernel of the package, by the name of its function."""
    modules = [
        import_module(f"tokenyard.kernels.{each.name}")
        for each in iter_modules(tokenyard.kernels.__path__)
    ]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    }


def layout_code(num_experts: int, num_ranks: int, num_topk: int, wide: bool) -> dict[str, Any]:
    """Of the layout's kernel: its name, local loads and stores, scopes of its atomics."""
    constants = token_layout.constants(num_experts, num_ranks, num_topk, wide)
    compiled = compile_for(layout_kernel, constants, token_layout.WARPS, gpu_target(90))
    scopes = re.findall(r"(?:atom|red)\.global\.(\w+)", compiled.asm["ptx"])
    spills = len(re.findall(r"\b(?:LDL|STL)\b", compiled.asm["sass"]))
    return {"name": compiled.metadata.name, "spills": spills, "scopes": sorted(set(scopes))}


def main() -> dict[str, Any]:
    kernels = {name: kernel.repr(None) for name, kernel in launched().items()}
    launches = record()[0]
    parts = {label: launch["kernel"].repr(None) for label, launch in launches.items()}
    smallest = next(
        launch for label, launch in launches.items() if label.startswith("low_refuse_kernel")
    )
    compiled = compile_for(
        smallest["kernel"], smallest["constants"], smallest["warps"], gpu_target(90)
    )
    return {
        "kernels": kernels,
        "parts": parts,
        "layouts": [layout_code(256, 8, 8, True), layout_code(13, 9, 3, False)],
        "compiled": compiled.metadata.name,
        "entry": compiled.asm["ptx"].partition(".entry ")[2].partition("(")[0],
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
