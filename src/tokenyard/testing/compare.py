"""Comparisons that say where the difference is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def assert_same_bits(
    actual: Tensor,
    expected: Tensor,
    *,
    what: str,
    source: Tensor | None = None,
    experts: Tensor | None = None,
    rank: int | None = None,
) -> None:
    """Raise ``AssertionError`` unless shape, dtype and every bit agree (the same NaN is equal, 0.0
    and -0.0 are not).

    A row is what the last dimension spans; in a vector every element is a row. The message shows
    the first wrong row and the expected row whose bits it has, if there is one.

    Args:
        what: name of the tensor, for the message.
        source: int64, where each expected row comes from: ``source_rank << 32 | source_token``, -1
            for padding.
        experts: the expert of each expected row, or its K experts.
        rank: that checks, for the message.
    """
    __tracebackhide__ = True
    where = what if rank is None else f"rank {rank}: {what}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{where}: got {_kind(actual)}, expected {_kind(expected)}")
    got, wanted = _bits(actual), _bits(expected.to(actual.device))
    wrong = (got != wanted).any(1).nonzero().flatten()
    if wrong.numel():
        shape = tuple(expected.shape[:-1]) or tuple(expected.shape)
        name = partial(_name, shape, source, experts)
        first = int(wrong[0])
        raise AssertionError(
            f"{where}: {len(wrong)} of {len(wanted)} rows are wrong, first {name(first)}\n"
            f"{_first_column(got[first], wanted[first], actual.dtype)}\n"
            f"{_whose(got[first], wanted, name)}"
        )


def assert_close(actual: Tensor, expected: Tensor, *, relative: float, what: str) -> None:
    """Raise ``AssertionError`` unless ``||actual - expected|| <= relative * ||expected||``, in
    float64 (complex128). NaN and infinity never pass, on neither side. Shapes must agree, dtypes
    may differ. ValueError: ``relative`` is negative or not finite: nothing, or everything, would
    pass."""
    __tracebackhide__ = True
    if not 0 <= relative < math.inf:
        raise ValueError(f"relative ({relative}) must be a finite number of at least 0")
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: got {_kind(actual)}, expected {_kind(expected)}")
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    got, wanted = (each.detach().to(actual.device, wide).flatten() for each in (actual, expected))
    for name, values in (("got", got), ("expected", wanted)):
        if bad := int((~values.isfinite()).sum()):
            raise AssertionError(
                f"{what}: {name} {bad} of {len(values)} values that are not finite"
            )
    if not got.numel():
        return
    # Squares neither overflow nor vanish.
    unit = max(float(got.abs().max()), float(wanted.abs().max())) or 1.0
    gap = (got / unit - wanted / unit).abs()
    error = float(gap.square().sum().sqrt())
    bound = relative * float((wanted / unit).abs().square().sum().sqrt())
    if error > bound:
        worst = int(gap.argmax())
        raise AssertionError(
            f"{what}: norm of the difference is {error * unit:.3e}, allowed {bound * unit:.3e} "
            f"({relative} of the expected norm); "
            f"largest at {_index(worst, tuple(expected.shape))}: {got[worst].item()}, expected "
            f"{wanted[worst].item()}"
        )


def _name(shape: tuple[int, ...], source: Tensor | None, experts: Tensor | None, row: int) -> str:
    """Of a row of a tensor whose leading dimensions are ``shape``."""
    known: list[str] = []
    if source is not None:
        packed = int(source.flatten()[row])
        place = f"source rank {packed >> 32}, token {packed & 0xFFFFFFFF}"
        known.append("padding" if packed < 0 else place)
    if experts is not None:
        ids = [int(expert) for expert in experts.reshape(math.prod(shape), -1)[row]]
        known.append(f"expert {ids[0]}" if len(ids) == 1 else f"experts {ids}")
    return f"row {_index(row, shape)}" + (f" ({', '.join(known)})" if known else "")


def _index(flat: int, shape: tuple[int, ...]) -> str:
    """Position ``flat`` as an index into ``shape``: ``7`` or ``[1, 3]``."""
    if len(shape) < 2:
        return str(flat)
    return str([int(i) for i in torch.unravel_index(torch.tensor(flat), shape)])


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _bits(tensor: Tensor) -> Tensor:
    """The elements' bits as integers ``[rows, columns]``; one of 16 bytes has two columns."""
    columns = tensor.shape[-1] if tensor.ndim > 1 else 1
    rows = math.prod(tensor.shape[:-1]) if tensor.ndim > 1 else tensor.numel()
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(rows, columns).contiguous()
    return plain.view(_BITS[tensor.element_size()])


def _first_column(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    wrong = (got != wanted).nonzero().flatten()
    words = max(1, dtype.itemsize // got.element_size())
    column = int(wrong[0]) // words
    value, right = (
        f"{part.view(dtype).item()} ({', '.join(map(_hex, part))})"
        for part in (row[column * words : (column + 1) * words] for row in (got, wanted))
    )
    differ = len({int(at) // words for at in wrong})
    return (
        f"column {column} is {value}, expected {right}; {differ} of {len(got) // words} columns "
        f"differ"
    )


def _hex(element: Tensor) -> str:
    width = 2 * element.element_size()
    return f"0x{int(element) & ((1 << 4 * width) - 1):0{width}x}"


def _whose(row: Tensor, wanted: Tensor, name: Callable[[int], str]) -> str:
    same = (wanted == row).all(1).nonzero().flatten()
    if same.numel() == 0:
        return "it equals no expected row"
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return f"it is misplaced: it equals expected {name(int(same[0]))}{more}"
