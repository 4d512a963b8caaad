"""A test body's module in a worker, with pytest's assertions; compiled once for all ranks."""

from __future__ import annotations

import ast
import functools
import importlib
import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, cast

BODY = "distributed_body"
"""Attribute of a decorated test that holds its body."""

_CODE = "__tokenyard_code__"


def code_of(path: str) -> bytes:
    """The module compiled, with pytest's assertions if it is installed; anew when changed."""
    status = os.stat(path)
    return _compiled(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _compiled(path: str, *_: int) -> bytes:
    source = Path(path).read_bytes()
    tree = ast.parse(source, path)
    with suppress(ImportError):
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, path)
    return marshal.dumps(compile(tree, path, "exec", dont_inherit=True))


def load_module(name: str, path: str, code: bytes) -> ModuleType:
    """The module with this ``code``; anew when that has changed (workers outlive test sessions)."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, _CODE, None) == code:
        return known
    package = name.rpartition(".")[0]
    if package:
        with suppress(ModuleNotFoundError):
            importlib.import_module(package)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    exec(marshal.loads(code), vars(module))
    setattr(module, _CODE, code)
    return module


def find_body(module: str, path: str, qualname: str, code: bytes) -> Callable[..., Any]:
    """The function that was decorated, whatever was wrapped around it later. A script's
    ``__main__`` is here already: ``multiprocessing`` has imported it."""
    found: Any = sys.modules[module] if module == "__main__" else load_module(module, path, code)
    for part in qualname.split("."):
        found = getattr(found, part)
    while not hasattr(found, BODY):
        found = found.__wrapped__
    return cast("Callable[..., Any]", getattr(found, BODY))
