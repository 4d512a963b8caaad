"""Compare the machine code of two source trees, variant by variant. No GPU is needed.

For changes that must leave the code of kernels as it is: the PTX of every variant that the compile
tests know, names normalised, is written to a folder, one file per variant, with its registers,
local memory and numbers of instructions. Two folders are compared::

    python tests/run.py compare_machine_code record FOLDER [--tree TREE] [--known OTHER]
        [--only REGEX] [--jobs N]
    python tests/run.py compare_machine_code compare BEFORE AFTER [--only REGEX]
        (exit status 1 if anything differs)
    python tests/run.py compare_machine_code revisions main HEAD FOLDER [--only REGEX]
        (records both in FOLDER, and compares them)

Variants come from the compile tests of the tree (:data:`SCRIPTS`): they run the engines on memory
that only notes what is launched, under labels such as ``dispatch_kernel FLAT exact fresh bf16
@132``. Labels say what a launch is for, not how its constants are packed, so two trees are paired
by label. What has no partner is paired by the values of its constants, then by equal code.

``record`` continues where it was stopped: a variant is compiled only if Triton's own code for it
(TTIR, a fraction of a second) is not that of its file, nor that of a file in ``--known``.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

Facts = dict[str, Any]
"""Of one variant: label, kernel, constants (flattened), warps, max_registers, source (digest of its
TTIR), SIZES, sass (digest).
"""
Variant = tuple[Facts, str]
"""Facts and normalised PTX."""

SIZES = (
    "registers",
    "stack_bytes",
    "local_bytes",
    "shared_bytes",
    "ptx_instructions",
    "sass_instructions",
)
"""What is compared where code differs; None where a variant is not assembled, as it calls a library
that is not at hand.
"""

LAUNCHES: dict[str, Any] = {}
"""By label. Worker processes inherit it."""


# Variants


def _nvlink(tests: Any) -> Iterator[tuple[str, Any]]:
    return (each for each in tests.variants(True) if each[0] != "planted")


def _twolevel(tests: Any) -> Iterator[tuple[str, Any]]:
    for sms in (132, 24):
        yield from (
            (f"{name} @{sms}", each) for name, each in tests.record(sms, network=False).items()
        )
    yield "two_dispatch_kernel narrow rows, 2 x 8", tests.narrow_rows()
    for words, mapped in (("network", False), ("mapped network", True)):
        yield from (
            (f"{name} {words}", each) for name, each in tests.record(132, True, mapped).items()
        )


def _low_latency(tests: Any) -> Iterator[tuple[str, Any]]:
    for words, tokens in (("", tests.TOKENS), (", few tokens", tests.FEW_TOKENS)):
        yield from ((f"{name}{words}", each) for name, each in tests.record(tokens)[0].items())
    for words, once in (("between nodes", False), ("once per node", True)):
        with mock.patch.dict(os.environ, {tests.PUTS_VARIABLE: "1"}):
            found = tests.record(grid=tests.GRID, once=once)[0]
        yield from ((f"{name}, {words}", found[name]) for name in found if tests.FAR.search(name))


def _layout(tests: Any) -> Iterator[tuple[str, Any]]:
    from tokenyard.kernels.layout import layout_kernel  # pyright: ignore[reportUnknownVariableType]

    for ranks in (4, 16):
        for wide in (True, False):
            constants = tests.constants(256, ranks, 8, wide)
            launch = {
                "kernel": layout_kernel,
                "constants": constants,
                "warps": tests.WARPS,
                "max_registers": None,
            }
            yield f"layout_kernel of {ranks} ranks, {'int64' if wide else 'int32'}", launch


SCRIPTS: dict[str, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    "nvlink_compile": _nvlink,
    "twolevel_compile": _twolevel,
    "low_latency_compile": _low_latency,
    "tokenyard.deep_ep.token_layout": _layout,
}
"""Modules that know variants, and what they say: (label, launch)."""


def flattened(value: Any, name: str = "") -> dict[str, str]:
    """Constants by dotted name: ``{"k": Config(ranks=4, row=Row(words=8))}`` gives ``{"k.ranks":
    "4", "k.row.words": "8"}``.
    """
    value = value.value if type(value).__name__ == "constexpr" else value
    fields = (
        value if isinstance(value, dict) else value._asdict() if hasattr(value, "_fields") else None
    )
    if fields is None:
        return {name: str(value)}
    found: dict[str, str] = {}
    for key, each in fields.items():
        found |= flattened(each, f"{name}.{key}" if name else key)
    return found


# Code


def numbered(text: str, names: re.Pattern[str]) -> str:
    """``text`` with what ``names`` matches numbered as it appears, by its first group."""
    numbers: dict[str, str] = {}
    counts: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        kind = match[1] or "L"
        if match[0] not in numbers:
            counts[kind] = counts.get(kind, 0) + 1
            numbers[match[0]] = f"%{kind}<{counts[kind]}>"
        return numbers[match[0]]

    return names.sub(number, text)


def normalised(ptx: str) -> str:
    """PTX without comments, debug information and names. Parameters are numbered in their order."""
    lines: list[str] = []
    for line in re.sub(r"\.section\s+\.debug.*", "", ptx, flags=re.DOTALL).splitlines():
        line = line.split("//")[0].strip()
        if line and not re.match(
            r"\.(loc|file|version|target|address_size|reg)\b|\$L__(tmp|func|info)\w*:", line
        ):
            lines.append(line)
    text = "\n".join(lines)
    for place, name in enumerate(re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?(\w+)", text)):
        text = re.sub(rf"\b{name}(?=\b|_param_)", f"FUNCTION{place}", text)
    return numbered(text, re.compile(r"%([a-z]{1,2})\d+\b|\$L__\w+"))


def instructions(ptx: str) -> int:
    """How many there are in normalised PTX."""
    return len(re.findall(r"^(?:@!?%\S+ )?[a-z]\S*.*;$", ptx, re.MULTILINE))


def prepared(launch: Any) -> tuple[Any, Any, dict[str, Any], bool]:
    """Source, target and options with which the project compiles a launch, and whether it calls
    NVSHMEM's library.
    """
    from tokenyard.memory import kernel_launch
    from tokenyard.memory.kernel_launch import compile_for, gpu_target

    def caught(source: Any, *, target: Any, options: dict[str, Any]) -> Any:
        return source, target, options

    with (
        mock.patch("triton.compiler.compile", caught),
        mock.patch.object(kernel_launch, "device_library", return_value=""),
    ):
        source, target, options = compile_for(
            launch["kernel"],
            launch["constants"],
            launch["warps"],
            gpu_target(90),
            launch["max_registers"],
        )
    return source, target, options, options.pop("extern_libs", None) is not None


class Stages:
    """Triton's stages for one launch, one after the other."""

    def __init__(self, launch: Any) -> None:
        from triton._C.libtriton import ir
        from triton.compiler import make_backend

        source, target, given, self.calls_library = prepared(launch)
        backend = make_backend(target)
        options = backend.parse_options(given)
        self._context = ir.context()
        ir.load_dialects(self._context)
        backend.load_dialects(self._context)
        self._stages: dict[str, Any] = {}
        backend.add_stages(self._stages, options, source.language)
        codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        self._module: Any = source.make_ir(target, options, codegen, modules, self._context)
        self.metadata: dict[str, Any] = {"hash": "", "target": target, **options.__dict__}
        self._options = given

    def until(self, name: str) -> Any:
        """What stage ``name`` makes."""
        while name in self._stages:
            stage = next(iter(self._stages))
            self._module = self._stages.pop(stage)(self._module, self.metadata)
        return self._module

    def digest(self) -> str:
        """Of the TTIR and the options: equal digests have equal machine code."""
        text = self.until("ttir").str_nodebug()
        text = numbered(re.sub(r"@\w+", "@F", text), re.compile(r"%()\w+(?:#\d+)?"))
        return hashlib.sha256(
            f"{text} {sorted(self._options.items())} {self.calls_library}".encode()
        ).hexdigest()


def assembled(cubin: bytes) -> Facts:
    """Sizes and the digest of the instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        commands = (
            [tools / "cuobjdump", "-res-usage", file.name],
            [tools / "nvdisasm", "-c", "-ndf", file.name],
        )
        usage, sass = (
            subprocess.run(each, capture_output=True, text=True, check=True).stdout
            for each in commands
        )
    keys = {"registers": "REG", "stack_bytes": "STACK", "local_bytes": "LOCAL"}
    sizes = {name: int(re.findall(rf"\b{key}:(\d+)", usage)[-1]) for name, key in keys.items()}
    lines = [re.sub(r"/\*.*?\*/", "", line).strip() for line in sass.splitlines()]
    lines = [
        line for line in lines if line and not line.startswith((".section", ".text", ".", "//"))
    ]
    found: Facts = {"sass_instructions": sum(line.endswith(";") for line in lines)}
    return found | sizes | {"sass": hashlib.sha256("\n".join(lines).encode()).hexdigest()}


# Folders


def file_of(folder: Path, label: str) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_@.-]+', '_', label)}.ptx"


def write(folder: Path, facts: Facts, ptx: str) -> None:
    path = file_of(folder, facts["label"])
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(f"// {json.dumps(facts)}\n{ptx}\n")
    part.replace(path)


def read(path: Path) -> Variant:
    first, _, ptx = path.read_text().partition("\n")
    return json.loads(first.removeprefix("// ")), ptx.rstrip("\n")


def folder_of(path: Path, only: str = "") -> dict[str, Variant]:
    """The variants in a folder, by label."""
    found = {facts["label"]: (facts, ptx) for facts, ptx in map(read, sorted(path.glob("*.ptx")))}
    return {label: each for label, each in found.items() if re.search(only, label)}


def record_one(label: str, folder: Path, known: dict[str, Path]) -> str:
    """Write the file of one variant. Returns what had to be done for it."""
    launch = LAUNCHES[label]
    stages = Stages(launch)
    facts: Facts = {
        "label": label,
        "kernel": launch["kernel"].__name__,
        "constants": flattened(launch["constants"]),
        "warps": launch["warps"],
        "max_registers": launch["max_registers"],
        "source": stages.digest(),
    }
    if facts["source"] in known:
        old, ptx = read(known[facts["source"]])
        write(folder, old | facts, ptx)
        return "known"
    ptx = normalised(stages.until("ptx"))
    sizes: Facts = dict.fromkeys((*SIZES, "sass"))
    if not stages.calls_library:
        sizes |= assembled(stages.until("cubin"))
    sizes |= {"shared_bytes": stages.metadata["shared"], "ptx_instructions": instructions(ptx)}
    write(folder, facts | sizes, ptx)
    return "compiled"


def record(tree: Path, folder: Path, known: list[Path], only: str, jobs: int) -> None:
    """Write the variants of ``tree`` whose labels ``only`` matches; files of labels that are gone
    are removed.
    """
    tests = tree / "tests"
    lanes = [str(each) for each in tests.iterdir() if each.is_dir()]  # of older trees none
    sys.path[:0] = [str(tree / "src"), str(tests), *lanes]
    folder.mkdir(parents=True, exist_ok=True)
    for script, variants in SCRIPTS.items():
        LAUNCHES.update(
            {label: each for label, each in variants(_imported(script)) if re.search(only, label)}
        )
    for label, (facts, _) in folder_of(folder, only).items():
        if facts["label"] not in LAUNCHES:
            file_of(folder, label).unlink()
    files = {
        read(path)[0]["source"]: path for each in (*known, folder) for path in each.glob("*.ptx")
    }
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        done = [pool.submit(record_one, label, folder, files) for label in LAUNCHES]
        words = [each.result() for each in done]
    print(f"{len(words)} variants in {folder}, {words.count('compiled')} compiled")


def _imported(name: str) -> Any:
    from importlib import import_module

    return import_module(name)


# Comparison


def partners(
    before: dict[str, Variant], after: dict[str, Variant]
) -> Iterator[tuple[str, str | None]]:
    """Each label of ``before`` with its partner's of ``after``; None: it has none."""

    def packed(each: Variant) -> str:
        facts = each[0]
        return json.dumps(
            [
                facts["kernel"],
                facts["warps"],
                facts["max_registers"],
                sorted(facts["constants"].values()),
            ]
        )

    def code(each: Variant) -> str:
        return each[1]

    left = {label for label in after if label not in before}
    for label, each in before.items():
        partner = label if label in after else None
        for alike in (packed, code):
            partner = partner or next(
                (other for other in sorted(left) if alike(after[other]) == alike(each)), None
            )
        left.discard(partner or "")
        yield label, partner


def compare(before: dict[str, Variant], after: dict[str, Variant]) -> int:
    """Print what differs, and a line per kernel. Returns how many variants are not identical."""
    kernels: dict[str, list[bool]] = {}
    met: set[str] = set()
    for label, partner in partners(before, after):
        met.add(partner or "")
        same = partner is not None and _same(before[label], after[partner])
        kernels.setdefault(before[label][0]["kernel"], []).append(same)
        if partner is None:
            print("no partner", label)
        elif not same:
            print("\n".join(["differs", label, *_shown(before[label], after[partner])]))
    new = sorted(set(after) - met)
    print("".join(f"new {label}\n" for label in new), end="")
    for kernel, alike in sorted(kernels.items()):
        print(f"{kernel:24} {sum(alike):4} of {len(alike):4} identical")
    wrong = sum(not same for alike in kernels.values() for same in alike) + len(new)
    print(f"{'all':24} {sum(map(sum, kernels.values())):4} of {len(before):4} identical")
    return wrong


def _same(old: Variant, new: Variant) -> bool:
    """Equal PTX; or, where parameters changed places or registers their order, equal instructions
    of the machine.
    """
    return old[1] == new[1] or (old[0]["sass"] is not None and old[0]["sass"] == new[0]["sass"])


def _shown(old: Variant, new: Variant, most: int = 14) -> list[str]:
    """Sizes, then the first lines that differ."""
    sizes = ", ".join(
        f"{key} {old[0][key]}" + (f" -> {new[0][key]}" if old[0][key] != new[0][key] else "")
        for key in SIZES
    )
    lines = difflib.unified_diff(old[1].splitlines(), new[1].splitlines(), lineterm="", n=0)
    return [f"  {sizes}", *(f"    {line}" for line in [*lines][2 : 2 + most])]


def revisions(first: str, second: str, folder: Path, only: str, jobs: int) -> int:
    """Record two revisions of this repository in folders of their names, and compare them."""
    for at, revision in enumerate((first, second)):
        with tempfile.TemporaryDirectory() as tree:
            archive = subprocess.run(
                ["git", "archive", revision, "src", "tests"], check=True, capture_output=True
            ).stdout
            subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
            known = ["--known", str(folder / first)] if at else []
            command = [
                sys.executable,
                __file__,
                "record",
                str(folder / revision),
                "--tree",
                tree,
                "--only",
                only,
            ]
            subprocess.run([*command, "--jobs", str(jobs), *known], check=True)
    return compare(folder_of(folder / first, only), folder_of(folder / second, only))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare", "revisions"))
    parser.add_argument("names", nargs="+", help="folders; of revisions: two of them, and a folder")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[2])
    parser.add_argument(
        "--known",
        type=Path,
        action="append",
        default=[],
        help="a folder whose files may be taken over",
    )
    parser.add_argument("--only", default="", help="labels to look at")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    given = parser.parse_args()
    if given.action == "record":
        record(given.tree.resolve(), Path(given.names[0]), given.known, given.only, given.jobs)
        return 0
    if given.action == "compare":
        return compare(*(folder_of(Path(name), given.only) for name in given.names)) > 0
    return (
        revisions(given.names[0], given.names[1], Path(given.names[2]), given.only, given.jobs) > 0
    )


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # before Triton is imported
    sys.exit(main())
