"""Find a test body in a worker: import its module from its file, the way pytest did, with readable
assertions.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any, cast

BODY = "distributed_body"
"""Attribute of a decorated test that holds its body."""

_STAMP = "__tokenyard_stamp__"


class _ReadableAsserts(SourceFileLoader):
    """Compiles a module with pytest's explanations of failed assertions, where pytest is
    installed.
    """

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        with suppress(ImportError):
            from _pytest.assertion.rewrite import rewrite_asserts

            rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def load_module(name: str, path: str) -> ModuleType:
    """The module in file ``path``, called ``name``; read anew when it has changed (workers outlive
    test sessions).
    """
    status = os.stat(path)
    stamp = (path, status.st_mtime_ns, status.st_size)
    known = sys.modules.get(name)
    if known is not None and getattr(known, _STAMP, None) == stamp:
        return known
    package = name.rpartition(".")[0]
    if package:
        with suppress(ModuleNotFoundError):
            importlib.import_module(package)
    loader = _ReadableAsserts(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    setattr(module, _STAMP, stamp)
    return module


def find_body(module: str, path: str, qualname: str) -> Callable[..., Any]:
    """The function that was decorated, whatever was wrapped around it later.

    A script's ``__main__`` is here already: ``multiprocessing`` has imported it.
    """
    found: Any = sys.modules[module] if module == "__main__" else load_module(module, path)
    for part in qualname.split("."):
        found = getattr(found, part)
    while not hasattr(found, BODY):
        found = found.__wrapped__
    return cast("Callable[..., Any]", getattr(found, BODY))
