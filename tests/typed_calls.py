"""What type checkers know of results. Nobody runs this: ``make lint`` checks it."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import assert_type

import tokenyard as ty


def of_dispatch(ep: ty.ExpertParallel, x: Tensor, idx: Tensor) -> ty.Received:
    recv = ep.dispatch(x, idx, async_op=True)
    assert_type(recv.x, Tensor)
    assert_type(recv.row_weights, Tensor | None)
    assert_type(recv.dequantize(), Tensor)
    recv.scale  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    return ep.dispatch(x, handle=recv.handle, after=recv)


def of_combine(ep: ty.ExpertParallel, rows: Tensor, handle: ty.Handle, *, later: bool) -> None:
    assert_type(ep.combine(rows, handle), Tensor)
    assert_type(ep.combine(rows, handle, weighted=True, bias=(rows, rows)), Tensor)
    assert_type(ep.combine(rows, handle, async_op=True, out=rows), ty.Combined)
    assert_type(ep.combine(rows, handle, return_hook=True), ty.Combined)
    assert_type(ep.combine(rows, handle, reduce_weights=rows), ty.Combined)
    assert_type(ep.combine(rows, handle, async_op=later), Tensor | ty.Combined)
    ep.combine(rows, handle, after=ep.combine(rows, handle, async_op=True)).sum()
    ep.combine(rows, handle, weight=True)  # pyright: ignore[reportCallIssue]
