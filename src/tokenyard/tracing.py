"""Calls that Dynamo traces, and what it cannot follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenyard.handle import Spec


def _follows_data() -> bool:
    """Whether sizes may be known from data only, as with fullgraph=True."""
    shapes: Any = getattr(torch._guards.detect_fake_mode(), "shape_env", None)  # pyright: ignore
    return shapes is None or shapes.allow_dynamic_output_shape_ops


# Asked while it traces. (assume_constant_result() would import Dynamo.)
_follows_data._dynamo_marked_constant = True  # pyright: ignore


def _make(call: Callable[[Any], Any], request: Any) -> Any:
    return call(request)


_outside = torch._disable_dynamo(_make)  # pyright: ignore


def traced(call: Callable[[Any], Any], request: Any, spec: Spec, fresh: bool = False) -> Any:
    """``call(request)``, outside of graphs if it has sizes that torch does not follow: else it
    would break the graph in each function that it goes through, and have compiled what is between.
    """
    if (spec.exact if fresh else not spec.placed) and not _follows_data():
        return _outside(call, request)
    return call(request)
