"""Subclasses of tensors that act for others: results of torch's functional collectives are waited
for, tensors without data give shapes, and others are refused on all ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenyard as ty
from cases import Case, check_combined, dispatch, rows_to_combine
from tokenyard.deep_ep import Buffer
from tokenyard.testing import Ranks, distributed_test


class Wrapping(Tensor):
    """Acts for another tensor, and has no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapping:
        options = {"dtype": inner.dtype, "device": inner.device}
        return Tensor._make_wrapper_subclass(cls, inner.shape, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise AssertionError(f"{func} is called")


@distributed_test(world_size=2)
def test_results_of_functional_collectives_are_waited_for(ranks: Ranks) -> None:
    """As experts in tensor parallelism give them: they have no memory until then."""
    case = Case(ranks.world_size)
    alone = [dist.new_group([rank]) for rank in range(2)][ranks.rank]
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        rows = functional.all_reduce(rows_to_combine(recv, case, ranks.rank), "sum", alone)
        assert type(rows) is not Tensor
        want = case.combined(ranks.rank).x
        check_combined(ep.combine(rows, recv.handle), case, ranks.rank, want)


@distributed_test(world_size=2)
def test_others_are_refused(ranks: Ranks) -> None:
    case = Case(ranks.world_size)
    words = "is of Wrapping, which acts for other tensors"
    with case.make(ranks) as ep:
        recv = dispatch(ranks, ep, case)
        last = ranks.rank == 1
        expected = pytest.raises(ValueError if last else ty.PeerError, match=f"x {words}")
        x, idx = (t.to(ranks.device) for t in (case.x[ranks.rank], case.picks[ranks.rank][0]))
        with expected:
            ep.dispatch(Wrapping(x) if last else x, idx)
        with pytest.raises(ValueError, match=f"x {words}"):
            ep.combine(Wrapping(recv.x), recv.handle)
        with pytest.raises(ValueError, match=f"topk_idx {words}"):
            ep.dispatch(x, Wrapping(idx))
        dispatch(ranks, ep, case)


@distributed_test(world_size=2)
def test_the_drop_in_refuses_them(ranks: Ranks) -> None:
    buffer = Buffer(ranks.group, 1 << 20)
    with pytest.raises(ValueError, match="topk_idx is of Wrapping"):
        buffer.get_dispatch_layout(
            Wrapping(torch.zeros(2, 2, dtype=torch.int64, device=ranks.device)), 4
        )
    buffer.destroy()


@distributed_test(world_size=1)
def test_tensors_without_data_give_shapes(ranks: Ranks) -> None:
    case = Case(1, layout=ty.Layout.EXPERT_PADDED)
    with case.make(ranks) as ep:
        made = ep.stats().calls
        with FakeTensorMode(), torch.no_grad(), ranks.device:
            x = torch.empty(case.num_tokens, case.hidden, dtype=torch.bfloat16)
            idx = torch.zeros(case.num_tokens, case.num_topk, dtype=torch.int64)
            recv = ep.dispatch(x, idx, layout=case.layout, exact=False)
            y = ep.combine(recv.x, recv.handle)
        assert recv.x.shape == (case.num_experts, case.num_tokens, case.hidden)
        assert y.shape == x.shape
        assert ep.stats().calls == made
