"""Bad arguments of ``tokenyard.deep_ep``: each is named before anything is exchanged, and ranks in
the call learn it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import deep_ep_wrong as wrong
import tokenyard as ty
from bad_input import anyone, check, error_of, gloo, meet
from deep_ep_calls import fresh
from deep_ep_world import World
from nvlink_pool import SOAK, without_devices
from tokenyard import deep_ep
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.testing import Ranks, distributed_test

# over gloo every call can be refused; with kernels see ``deep_ep_simulated.refusals``
pytestmark = without_devices
MOST = 28


class Calls:
    """Good calls of both modes on one buffer, by name: the function, and its arguments."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.buffer = ranks, deep_ep.Buffer(ranks.group, enable_shrink=True)
        self.world = world = World.of(ranks, "few")
        rank, buffer = ranks.rank, self.buffer
        x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
        per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, world.num_experts)
        layout = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_ranks,
            "num_tokens_per_expert": per_expert,
        }
        self.normal = {"x": x, "topk_idx": idx, "topk_weights": weights, **layout}
        recv_x, _, recv_weights, _, self.handle, _ = buffer.dispatch(**self.normal)
        self.low = {
            "x": x,
            "topk_idx": idx,
            "num_max_dispatch_tokens_per_rank": MOST,
            "num_experts": 12,
            "use_fp8": False,
        }
        rows, _, self.padded, _, _ = buffer.low_latency_dispatch(**self.low)
        sums = {"x": rows, "topk_idx": idx, "topk_weights": weights, "handle": self.padded}
        self.good: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "dispatch": (buffer.dispatch, self.normal),
            "bare": (buffer.dispatch, {"x": x, **layout}),
            "cached": (buffer.dispatch, {"x": x, "handle": self.handle}),
            "combine": (
                buffer.combine,
                {"x": recv_x, "handle": self.handle, "topk_weights": recv_weights},
            ),
            "low_dispatch": (buffer.low_latency_dispatch, self.low),
            "low_combine": (buffer.low_latency_combine, sums),
        }
        self.want = {name: self.made(name) for name in self.good}

    def made(self, name: str) -> list[torch.Tensor]:
        """The tensors of a good call."""
        call, arguments = self.good[name]
        return [part for part in call(**arguments) if isinstance(part, torch.Tensor)]

    def works(self) -> None:
        """Every call, with the results of before."""
        for name, want in self.want.items():
            got = self.made(name)
            used = int(self.padded[1].sum() & 0xFFFFFFFF) if name == "low_dispatch" else None
            assert len(got) == len(want) and (
                used is not None or all(map(torch.equal, got, want))
            ), name


def signature_of(words: tuple[str, ...]) -> type[Exception]:
    if words == ("colour",):
        return TypeError
    return ty.NotSupported if words == ("use_nvfp4", "NVFP4") else ValueError


def one_rank_is_wrong(ranks: Ranks, calls: Calls, name: str, cases: wrong.Cases) -> None:
    """Ranks take turns: one makes the bad call, the other the good one, and learns in it what was
    wrong.
    """
    call, good = calls.good[name]
    for number, (argument, change, words) in enumerate(cases):
        here = (number % ranks.world_size) == ranks.rank
        arguments = {**good, argument: change(good.get(argument))} if here else good
        error = error_of(lambda arguments=arguments: call(**arguments))
        try:
            check(error, signature_of(words) if here else ty.PeerError, *words)
        except AssertionError as failed:
            raise AssertionError(f"{name}, case {number} ({argument}): {failed}") from error
        assert "ExpertParallel" not in str(error) and "Quantized" not in str(error), error
    for argument, change, words in cases:  # all ranks at once: each has its own error
        error = error_of(
            lambda argument=argument, change=change: call(
                **{**good, argument: change(good.get(argument))}
            )
        )
        check(error, signature_of(words), *words)


@pytest.mark.parametrize(
    "name", ["dispatch", "bare", "cached", "combine", "low_dispatch", "low_combine"]
)
@distributed_test(world_size=2)
def test_collective_calls(ranks: Ranks, name: str) -> None:
    calls, rank = Calls(ranks), ranks.rank
    elastic = ElasticBuffer(ranks.group, num_max_tokens_per_rank=64, hidden=128)
    x, idx = calls.world.x[rank], calls.world.idx[rank]
    later = elastic.dispatch(x, idx, num_experts=calls.world.num_experts)[3]
    newer = ("handle", wrong.to(later), ("Buffer (DeepEP V1)", "ElasticBuffer (DeepEP V2.1)"))
    cases: dict[str, wrong.Cases] = {
        "dispatch": wrong.DISPATCH,
        "bare": wrong.BARE,
        "cached": [
            *wrong.CACHED,
            newer,
            ("handle", wrong.to(calls.padded), ("handle must be", "LowLatencyHandle")),
        ],
        "combine": [
            *wrong.COMBINE,
            newer,
            ("handle", wrong.to(calls.padded), ("handle must be", "LowLatencyHandle")),
        ],
        "low_dispatch": wrong.LOW_DISPATCH,
        "low_combine": [
            *wrong.LOW_COMBINE,
            newer,
            ("handle", wrong.to(calls.handle), ("handle must be", "NormalHandle")),
        ],
    }
    assert len(cases[name]) > 15
    one_rank_is_wrong(ranks, calls, name, cases[name])
    calls.works()


@distributed_test(world_size=3 if SOAK == 1 else (2, 3))
def test_the_first_call(ranks: Ranks) -> None:
    """Before there is any native object: the others, who make one, learn what was wrong, and the
    next attempt works.
    """
    world, rank = World.of(ranks, "few"), ranks.rank
    normal: wrong.Cases = [
        ("expert_alignment", wrong.to(0), ("expert_alignment (0)",)),
        ("num_worst_tokens", wrong.to(-1), ("num_worst_tokens (-1)",)),
        ("x", lambda x: x.tolist(), ("x must be",)),
        ("x", lambda x: x[0], ("x has shape",)),
        ("previous_event", wrong.to(5), ("previous_event (5)",)),
    ]
    low: wrong.Cases = [
        ("num_experts", wrong.to(0), ("num_experts (0)",)),
        ("topk_idx", lambda idx: idx.tolist(), ("topk_idx must be",)),
    ]
    for number, (argument, change, words) in enumerate(normal + low):
        buffer = deep_ep.Buffer(ranks.group)
        layout = buffer.get_dispatch_layout(world.idx[rank], 12)
        call: Any = buffer.dispatch if number < len(normal) else buffer.low_latency_dispatch
        good: dict[str, Any] = {"x": world.x[rank], "topk_idx": world.idx[rank]}
        if number < len(normal):
            good |= {"num_tokens_per_expert": layout[2]}
        else:
            good |= {"num_max_dispatch_tokens_per_rank": MOST, "num_experts": 12}
        here = number % ranks.world_size == rank
        arguments = {**good, argument: change(good.get(argument))} if here else good
        error = error_of(lambda call=call, arguments=arguments: call(**arguments))
        check(error, ValueError if here else ty.PeerError, *words)
        assert "ExpertParallel" not in str(error)
        meet(ranks)
        assert torch.equal(fresh(buffer, world)[0], world.take(rank, world.x))
        buffer.destroy()


@distributed_test(world_size=2)
def test_numbers_of_other_libraries(ranks: Ranks) -> None:
    """Whole numbers and bools of NumPy are as good as Python's; so are 0 and 1 for flags, and None,
    as in DeepEP.
    """
    calls, rank = Calls(ranks), ranks.rank
    world, eight = calls.world, np.int32(8)
    got = calls.buffer.dispatch(
        **calls.normal, expert_alignment=eight, num_worst_tokens=np.int64(0), async_finish=0
    )
    assert got[3] == [-(-count // 8) * 8 for count in world.counts(rank)] and all(
        type(count) is int for count in got[3]
    )
    worst = calls.buffer.dispatch(
        **calls.normal, num_worst_tokens=np.int64(16), allocate_on_comm_stream=None
    )
    assert len(worst[0]) == 16 and worst[5].event is None
    known: Any = {
        **calls.low,
        "num_max_dispatch_tokens_per_rank": np.uint16(MOST),
        "num_experts": np.int64(12),
    }
    known |= {"use_fp8": np.bool_(False), "return_recv_hook": 1}
    rows, counts, handle, _, hook = calls.buffer.low_latency_dispatch(**known)
    assert handle[2:] == (MOST, world.hidden, 12) and rows.dtype == torch.bfloat16
    assert handle.ep is calls.padded.ep  # the same sizes, so the same object
    hook()
    assert counts.tolist() == [len(each) for each in world.expert_rows(rank)]
    layout = calls.buffer.get_dispatch_layout(
        world.idx[rank], np.int64(12), async_finish=np.bool_(True)
    )
    assert len(layout[2]) == 12 and layout[4].event is not None
    buffer = deep_ep.Buffer(
        ranks.group, np.int64(256), np.int64(128), np.bool_(True), np.int8(3), explicitly_destroy=1
    )
    assert (
        buffer.low_latency_mode is True
        and buffer.explicitly_destroy is True
        and buffer.num_nvl_bytes == 256
    )
    assert (
        deep_ep.Config(np.int64(4)) == deep_ep.Config(4)
        and type(deep_ep.Config(np.int64(4)).num_sms) is int
    )
    assert deep_ep.Buffer.get_dispatch_config(np.int64(2)) == deep_ep.Buffer.get_dispatch_config(2)
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint
    assert type(hint(np.int64(128), 7168, np.int64(8), 288)) is int


@distributed_test(world_size=2)
def test_ids_out_of_range(ranks: Ranks) -> None:
    """A layout counts them nowhere; a dispatch refuses them by name, and so do the ranks that are
    in it; without picks there is nothing to refuse, and the counts are those of the rows that come.
    """
    calls, rank = Calls(ranks), ranks.rank
    buffer, world, idx = calls.buffer, calls.world, calls.world.idx[rank].clone()
    if rank == 0:
        idx[1, 2] = 14
    per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(idx, 12)
    clean = torch.where(idx == 14, -1, idx)
    want = buffer.get_dispatch_layout(clean, 12)
    assert all(map(torch.equal, (per_rank, per_expert, in_ranks), (want[0], want[2], want[3])))
    for call in (
        lambda: buffer.dispatch(**{**calls.normal, "topk_idx": idx}),
        lambda: buffer.dispatch(**{**calls.normal, "topk_idx": idx}, num_worst_tokens=64),
        lambda: buffer.low_latency_dispatch(**{**calls.low, "topk_idx": idx}),
    ):
        check(error_of(call), ty.PeerError if rank else ValueError, "topk_idx[1, 2] is 14")
    bare = buffer.dispatch(
        world.x[rank], is_token_in_rank=in_ranks, num_tokens_per_expert=per_expert
    )
    picked = buffer.dispatch(**{**calls.normal, "topk_idx": clean, "is_token_in_rank": in_ranks})
    assert torch.equal(bare[0], picked[0]) and bare[3] == picked[3]
    calls.works()


@distributed_test(world_size=2)
def test_calls_of_one_rank(ranks: Ranks) -> None:
    """What talks to nobody: constructor, static methods, layout, masks, local memory, hints."""
    calls, rank = Calls(ranks), ranks.rank
    buffer, idx, make = calls.buffer, calls.world.idx[rank], deep_ep.Buffer
    static: dict[str, tuple[Callable[..., Any], dict[str, Any], wrong.Cases]] = {
        "layout": (
            buffer.get_dispatch_layout,
            {"topk_idx": idx, "num_experts": 12},
            [
                *wrong.WHEN,
                *wrong.wholes("num_experts", 0, -1, 1 << 20),
                *_without_rows(wrong.tensors("topk_idx", torch.int16)),
            ],
        ),
        "Buffer": (
            make,
            {"group": ranks.group, "num_nvl_bytes": 256},
            [
                *(
                    ("group", wrong.to(each), ("group", "ProcessGroup"))
                    for each in ("world", [0, 1], object(), True, 5)
                ),
                ("group", wrong.to(-100), ("not a member",)),
                ("group", wrong.to(None), ("Either 'group' or 'comm'",)),
                *(
                    case
                    for name in ("num_nvl_bytes", "num_rdma_bytes")
                    for case in wrong.wholes(name, -1)
                ),
                *(
                    ("num_qps_per_rank", wrong.to(value), ("num_qps_per_rank",))
                    for value in (-1, -1.0, 2.5, float("nan"), "24", [4], True, None)
                ),
                *wrong.flags(
                    "low_latency_mode",
                    "allow_nvlink_for_low_latency_mode",
                    "allow_mnnvl",
                    "use_fabric",
                ),
                *wrong.flags("explicitly_destroy", "enable_shrink"),
                ("colour", wrong.to(1), ("colour",)),
            ],
        ),
        "set_num_sms": (
            make.set_num_sms,
            {},
            [("new_num_sms", change, ("num_sms",)) for change in _numbers(21, -2, 4096)],
        ),
        "dispatch config": (make.get_dispatch_config, {}, wrong.wholes("num_ranks", 0, -1)),
        "combine config": (make.get_combine_config, {}, wrong.wholes("num_ranks", 0, -1)),
        "hint": (
            make.get_low_latency_rdma_size_hint,
            {
                "num_max_dispatch_tokens_per_rank": 8,
                "hidden": 128,
                "num_ranks": 2,
                "num_experts": 4,
            },
            [
                case
                for name in (
                    "num_max_dispatch_tokens_per_rank",
                    "hidden",
                    "num_ranks",
                    "num_experts",
                )
                for case in wrong.wholes(name, 0, -1)
            ],
        ),
        "clean": (
            buffer.clean_low_latency_buffer,
            {"num_max_dispatch_tokens_per_rank": 8, "hidden": 128, "num_experts": 4},
            [
                case
                for name in ("num_max_dispatch_tokens_per_rank", "hidden", "num_experts")
                for case in wrong.wholes(name, 0)
            ],
        ),
        "Config": (
            deep_ep.Config,
            {},
            [
                *(
                    case
                    for name in deep_ep.Config.__dataclass_fields__
                    for case in wrong.wholes(name, -1)
                ),
                ("num_sms", wrong.to(1 << 20), ("num_sms (1048576)",)),
                (
                    "num_max_nvl_chunked_send_tokens",
                    wrong.to(0),
                    ("num_max_nvl_chunked_send_tokens (0)",),
                ),
                (
                    "num_max_rdma_chunked_send_tokens",
                    wrong.to(129),
                    ("num_max_rdma_chunked_send_tokens (129)",),
                ),
            ],
        ),
        "nvl hint": (
            deep_ep.Config().get_nvl_buffer_size_hint,
            {"hidden_bytes": 256, "num_ranks": 2},
            [*wrong.wholes("hidden_bytes", 0), *wrong.wholes("num_ranks", 0)],
        ),
        "rdma hint": (
            deep_ep.Config().get_rdma_buffer_size_hint,
            {"hidden_bytes": 256, "num_ranks": 2},
            [*wrong.wholes("hidden_bytes", 0), *wrong.wholes("num_ranks", 0)],
        ),
        "memory": (
            make(ranks.group, 256).get_local_buffer_tensor,
            {"dtype": torch.int32},
            [
                *(
                    ("dtype", wrong.to(each), ("dtype", "torch.dtype"))
                    for each in ("int32", 4, None, int)
                ),
                *wrong.wholes("offset", -1, 65),
                *(
                    ("size", wrong.to(each), ("size",))
                    for each in (5, "4", torch.zeros(2), (-1,), (2.0,), (65,), (8, 9))
                ),
                ("use_rdma_buffer", wrong.to("no"), ("use_rdma_buffer", "True or False")),
            ],
        ),
        "mask": (
            buffer.low_latency_update_mask_buffer,
            {"rank_to_mask": 1 - rank},
            [
                *wrong.wholes("rank_to_mask", -1, 2),
                ("rank_to_mask", wrong.to(rank), ("rank_to_mask", "this rank")),
                *wrong.flags("mask"),
            ],
        ),
        "query": (
            buffer.low_latency_query_mask_buffer,
            {"mask_status": torch.zeros(2, dtype=torch.int32)},
            [
                *(
                    ("mask_status", wrong.to(each), ("mask_status must be",))
                    for each in (*wrong.NO_TENSOR, None)
                ),
                ("mask_status", wrong.to(torch.zeros(2)), ("mask_status is float32",)),
                (
                    "mask_status",
                    wrong.to(torch.zeros(3, dtype=torch.int32)),
                    ("mask_status has shape",),
                ),
            ],
        ),
        "next buffer": (
            buffer.get_next_low_latency_combine_buffer,
            {"handle": calls.padded},
            wrong.HANDLE,
        ),
        "EventOverlap": (
            deep_ep.EventOverlap,
            {},
            [
                ("event", wrong.to(each), ("event", "EventHandle"))
                for each in (5, "x", deep_ep.EventOverlap())
            ],
        ),
    }
    sms = make.num_sms
    for name, (call, good, cases) in static.items():
        for argument, change, words in cases:
            error = error_of(lambda: call(**{**good, argument: change(good.get(argument))}))  # noqa: B023
            try:
                check(error, signature_of(words), *words)
            except AssertionError as failed:
                raise AssertionError(f"{name}, {argument}: {failed}") from error
    assert make.num_sms == sms
    calls.works()


def _without_rows(cases: wrong.Cases) -> wrong.Cases:
    """Of a tensor that stands alone any number of rows is right, and any device will do."""
    first = len(wrong.NO_TENSOR)
    return [case for at, case in enumerate(cases) if at not in (first, first + 3)]


def _numbers(*more: int) -> list[wrong.Change]:
    return [wrong.to(value) for value in (*wrong.WHOLE, *more)]


@distributed_test(world_size=2)
def test_after_the_end(ranks: Ranks) -> None:
    """A destroyed buffer says so in every method, and handles of it do in others; to destroy it
    again does nothing.
    """
    calls, other = Calls(ranks), Calls(ranks)
    buffer = calls.buffer
    view = buffer.get_next_low_latency_combine_buffer(calls.padded)
    buffer.destroy()
    buffer.destroy()
    gone: list[Callable[[], Any]] = [
        *(
            lambda call=call, arguments=arguments: call(**arguments)
            for call, arguments in calls.good.values()
        ),
        lambda: buffer.get_dispatch_layout(calls.world.idx[0], 12),
        lambda: buffer.get_local_buffer_tensor(torch.int8),
        lambda: buffer.clean_low_latency_buffer(8, 128, 12),
        lambda: buffer.get_next_low_latency_combine_buffer(calls.padded),
        lambda: buffer.low_latency_update_mask_buffer(1 - ranks.rank),
        lambda: buffer.low_latency_query_mask_buffer(torch.zeros(2, dtype=torch.int32)),
        lambda: buffer.low_latency_clean_mask_buffer(),
        lambda: buffer.internode_combine(calls.good["combine"][1]["x"], other.handle),
    ]
    for call in gone:
        check(error_of(call), RuntimeError, "this Buffer was destroyed", "make a new one")
    later: list[Callable[[], Any]] = [
        lambda: other.buffer.dispatch(calls.world.x[ranks.rank], handle=calls.handle),
        lambda: other.buffer.combine(calls.good["combine"][1]["x"], calls.handle),
        lambda: other.buffer.low_latency_combine(**calls.good["low_combine"][1]),
        lambda: other.buffer.get_next_low_latency_combine_buffer(calls.padded),
    ]
    for call in later:
        check(
            error_of(call),
            RuntimeError,
            "the Buffer that made this handle was destroyed",
            "backward",
        )
    assert view.shape == calls.good["low_combine"][1]["x"].shape and calls.handle[3].numel() > 0
    other.works()
    buffer.destroy()
    other.buffer.destroy()


@distributed_test(world_size=3)
def test_handles_of_other_groups(ranks: Ranks) -> None:
    """A handle is good on any buffer of its ranks, also of another group object; not of other
    ranks.
    """
    pairs = [dist.new_group([0, 1], backend="gloo"), dist.new_group([1, 2], backend="gloo")]
    again = dist.new_group([0, 1], backend="gloo")
    error = error_of(lambda: deep_ep.Buffer(pairs[0])) if ranks.rank == 2 else None
    if ranks.rank == 2:
        check(error, ValueError, "not a member of the group", "Buffer")
        meet(ranks)
        return meet(ranks)
    world = World(2, "few")
    buffer = deep_ep.Buffer(pairs[0])
    recv_x, _, _, _, handle, _ = fresh(buffer, world)
    out = deep_ep.Buffer(again).combine(world.work(buffer.rank, recv_x), handle)[0]
    assert torch.equal(out.float(), world.combined(buffer.rank))
    meet(ranks)
    if ranks.rank == 1:  # nobody else is in the call: the group of two is told as far as it can be
        error = error_of(lambda: deep_ep.Buffer(pairs[1]).combine(recv_x, handle))
        check(error, ValueError, "[0, 1]", "[1, 2]")
    return meet(ranks)


@pytest.mark.parametrize("variable", ["TIMEOUT", "ENGINE", "LOW_LATENCY_ENGINE"])
@distributed_test(world_size=2)
def test_variables(ranks: Ranks, variable: str) -> None:
    """A value that cannot be is named by the variable, also on the other rank; the next attempt
    works.
    """
    name, world = f"TOKENYARD_DEEP_EP_{variable}", World.of(ranks, "few")
    buffer = deep_ep.Buffer(gloo(ranks))

    def call() -> Any:
        if variable == "LOW_LATENCY_ENGINE":
            return buffer.low_latency_dispatch(world.x[ranks.rank], world.idx[ranks.rank], MOST, 12)
        return fresh(buffer, world)

    for value in ("soon", "-1", "nan", "inf") if variable == "TIMEOUT" else ("fast", ""):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1:
                patch.setenv(name, value)
            check(error_of(call), ValueError if ranks.rank else ty.PeerError, name, repr(value))
        meet(ranks)
    call()
    assert not anyone(ranks, False)
