"""What engine nvlink says of refusals its own way, on simulated ranks.

Kernels are interpreted here, so tests reach this module through ``nvlink_pool.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import tokenyard as ty
from bad_input import Inputs, assert_works, check, complaint, error_of, make
from test_bad_input import CACHED, COMBINE, Bad
from test_limits import GIB, ROWS
from tokenyard import limits
from tokenyard.testing import Ranks
from tokenyard.testing.one_process import run_in_simulator

FAILED_RANK = 1
REFUSED: dict[str, tuple[str, Bad]] = {
    "cached: x is float64": ("cached dispatch", CACHED[12]),
    "combine: x is float64": ("combine", COMBINE["x"][4]),
    "combine: weighted rows of FLAT": ("combine", COMBINE["weights"][0]),
    "combine: a bias for other tokens": ("combine", COMBINE["bias and out"][3]),
}
"""The call, and what is wrong with it."""


def refused(name: str, seed: int) -> None:
    """One rank refuses a cached dispatch or a combine, which return before anybody has heard of it:
    all learn by ``check()``.
    """
    run_in_simulator(_refused, "nvlink", {"name": name}, 2, seed)


def _refused(ranks: Ranks, name: str) -> None:
    op, bad = REFUSED[name]
    inputs, wrong = Inputs.of(ranks), ranks.rank == FAILED_RANK
    with make(ranks) as ep:
        recv = ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights)
        good = {"x": recv.x if op == "combine" else inputs.x, "handle": recv.handle}
        changed = bad.change(SimpleNamespace(x=inputs.x, flat=recv, inputs=inputs)) if wrong else {}
        error = error_of(
            lambda: (ep.combine if op == "combine" else ep.dispatch)(**{**good, **changed})
        )
        assert not (
            why := complaint(error, bad.kind if wrong else None, bad.words if wrong else ())
        ), why
        says = (
            f"this rank refused {op} #1"
            if wrong
            else f"rank {FAILED_RANK} refused its side of {op} #1"
        )
        for call in (
            ep.check,
            lambda: ep.dispatch(inputs.x, inputs.topk_idx),
        ):  # the object is finished
            check(error_of(call), ty.PeerError, says)
    with make(ranks) as ep:
        assert_works(ranks, ep)


def too_large(at: int, alone: bool, seed: int) -> None:
    """A result that is refused for its size, ``ROWS[at]``, by rank 1 ``alone`` or by both."""
    with mock.patch.object(limits, "memory_of", return_value=16 * GIB):
        run_in_simulator(_too_large, "nvlink", {"at": at, "alone": alone}, 2, seed)


def _too_large(ranks: Ranks, at: int, alone: bool) -> None:
    """Of an exact call, which waits for all, peers learn why, and the object goes on. A static one
    returns before anybody has heard of the refusal, so they learn who refused it, and the object is
    finished.
    """
    inputs, bad = Inputs.of(ranks), ROWS[at]
    wrong, exact = not alone or ranks.rank == FAILED_RANK, bad.change(inputs).get("exact", True)
    good = {"x": inputs.x, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
    with make(ranks) as ep:
        error = error_of(lambda: ep.dispatch(**good | (bad.change(inputs) if wrong else {})))
        if wrong:
            check(error, bad.kind, *bad.words)
        elif exact:
            check(
                error, ty.PeerError, f"rank {FAILED_RANK} refused its side of this call", *bad.words
            )
        else:
            says = f"rank {FAILED_RANK} refused its side of dispatch #0"
            check(error, ty.PeerError, says, "its own error says why")
        if exact or not alone:
            assert_works(ranks, ep)
        else:
            says = (
                "this rank refused dispatch #0" if wrong else f"rank {FAILED_RANK} refused its side"
            )
            check(error_of(ep.check), ty.PeerError, says)


def rings_too_small(exact: bool, seed: int) -> None:
    """Rings that hold no row are refused behind the launch of the plan, whose programs write to
    tables that must live so long.
    """
    run_in_simulator(_rings_too_small, "nvlink", {"exact": exact}, 2, seed)


def _rings_too_small(ranks: Ranks, exact: bool) -> None:
    inputs = Inputs.of(ranks)
    with make(ranks, buffer_bytes=1) as ep:
        for _ in range(2):
            error = error_of(
                lambda: ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, exact=exact)
            )
            check(
                error,
                ValueError,
                "buffer_bytes (1) holds 0 rows",
                "make ExpertParallel with buffer_bytes of at least",
            )
