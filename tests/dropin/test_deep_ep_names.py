"""What profilers show: DeepEP's own test programs look for ``::dispatch`` and ``::combine`` in
tables and traces of kernels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from compiling import compiled
from nvlink_pool import without_devices
from tokenyard.kernels.names import symbol_of

pytestmark = without_devices


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return compiled("deep_ep_names")


def shown(symbol: str) -> str:
    """A symbol as the C++ library that profilers ask turns it back."""
    library = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_char_p
    status = ctypes.c_int(1)
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    assert status.value == 0, symbol
    return text.decode()


def test_symbols_are_those_of_a_cpp_compiler() -> None:
    assert shown(symbol_of("plan")) == "tokenyard::plan()"
    assert shown(symbol_of("low_latency::dispatch")) == "tokenyard::low_latency::dispatch()"


def test_each_kernel_has_a_name_of_its_own(found: dict[str, Any]) -> None:
    names = {kernel: shown(symbol) for kernel, symbol in found["kernels"].items()}
    assert len(names) >= 12 and len(set(names.values())) == len(names)
    assert all(name.startswith("tokenyard::") for name in names.values()), names
    for word in ("dispatch", "combine"):
        moving = {kernel for kernel, name in names.items() if word in name}
        assert moving == {kernel for kernel, name in names.items() if f"::{word}" in name}
        assert moving >= {f"{kind}{word}_kernel" for kind in ("low_", "two_")}
    assert names["low_dispatch_kernel"] == "tokenyard::low_latency::dispatch()"


def test_every_launch_of_a_low_latency_call_has_one_name(found: dict[str, Any]) -> None:
    """Whatever the dtype, the options and the part: a table of kernels has one line for them."""
    for word in ("dispatch", "combine"):
        labels = [label for label in found["parts"] if label.startswith(f"low_{word}_kernel")]
        assert {"send", "receive"} <= {label.split()[-1] for label in labels}
        assert {shown(found["parts"][label]) for label in labels} == {
            f"tokenyard::low_latency::{word}()"
        }


def test_compiled_code_has_the_name(found: dict[str, Any]) -> None:
    assert found["compiled"] == found["entry"] == symbol_of("low_latency::refuse")


def test_the_layout_as_machine_code(found: dict[str, Any]) -> None:
    """For one node and for two; nothing is spilled, and no other rank is asked."""
    want = {"name": symbol_of("layout"), "spills": 0, "scopes": ["gpu"]}
    assert found["layouts"] == [want] * 2
