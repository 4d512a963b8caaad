"""What the code of a kernel is made of: instructions that matter, counted in PTX and in machine
code for sm_90.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def code_of(cubin: bytes) -> bytes:
    """The instructions in an object file (ELF)."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    code = b""
    for section in range(table, table + size * count, size):
        flags, _, begin, length = struct.unpack_from("<4Q", cubin, section + 8)
        if flags & 4:  # executable
            code += cubin[begin : begin + length]
    assert code
    return code


def disassembled(codes: Sequence[bytes]) -> list[str]:
    """The text of each, 16 bytes a line: all in one go, as the tool takes long to start."""
    if not codes:
        return []
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(b"".join(codes))
        text = subprocess.run(
            [TOOLS / "nvdisasm", "--binary", "SM90a", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    lines = iter(re.findall(r"^\s*/\*[0-9a-f]+\*/.*", text, re.M))
    found = ["\n".join(islice(lines, len(code) // 16)) for code in codes]
    assert next(lines, None) is None and found[-1]
    return found


def ptx_facts(ptx: str) -> dict[str, int]:
    """Instructions that matter, counted."""
    return {
        # without .cg, which passes by the first-level cache, and .cs, whose lines the second-level
        # one gives up first
        "cached loads": len(re.findall(r"\bld\.global\.v4", ptx)),
        "kept stores": len(re.findall(r"\bst\.global\.v4", ptx)),
        "acquires": len(re.findall(r"ld\.global\.sys\.acquire|atom\.global\.sys\.acquire", ptx)),
        "releases": len(re.findall(r"\.sys\.release\.", ptx)),
        "releases without barrier": unfenced(ptx),
    }


def sass_facts(sass: str) -> dict[str, int]:
    """The same of machine code."""
    return {
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "copies 128": len(re.findall(r"\bLDGSTS\.E[.\w]*\.128", sass)),
        "loads 128": len(re.findall(r"\bLDG\.E[.\w]*\.128", sass)),
        "stores 128": len(re.findall(r"\bSTG\.E[.\w]*\.128", sass)),
        "strong loads": len(re.findall(r"\bLDG\.E[.\w]*STRONG\.SYS", sass)),
        "fences": len(re.findall(r"\bMEMBAR[.\w]*\.SYS", sass)),
        "invalidations": len(re.findall(r"\bCCTL\.IVALL", sass)),
        "fused": len(re.findall(r"\bFFMA", sass)),
    }


def unfenced(ptx: str) -> int:
    """Releases to the whole system that follow a store without a barrier of the program in between,
    as the text goes.
    """
    count, barrier = 0, True
    for line in ptx.splitlines():
        if "bar.sync" in line:
            barrier = True
        elif re.search(r"\bst\.global", line):
            barrier = False
        elif ".sys.release." in line and not barrier:
            count += 1
    return count
