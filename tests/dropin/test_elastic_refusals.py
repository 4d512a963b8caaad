"""Bad arguments of DeepEP's V2 buffers: each is named before anything is exchanged, and ranks in
the call learn it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import tokenyard as ty
from bad_input import check, error_of, meet
from deep_ep_wrong import EVENTS, NO_TENSOR, Cases, flags, tensors, to
from elastic_calls_of import KINDS, fresh, made, world_of
from nvlink_pool import without_devices
from tokenyard import deep_ep
from tokenyard.deep_ep.hybrid import HybridEPBuffer
from tokenyard.testing import Ranks, distributed_test

pytestmark = without_devices

WHEN: Cases = [
    *(("previous_event", to(value), ("previous_event", "EventHandle")) for value in EVENTS),
    *flags("async_with_compute_stream", "allocate_on_comm_stream"),
]
ROWS: Cases = [
    *(("x", to(value), ("x must be",)) for value in (*NO_TENSOR, None)),
    ("x", lambda x: x[0], ("x has shape", "[T, H]")),
    ("x", lambda x: x[:, :0], ("x has shape",)),
    ("x", lambda x: x.double(), ("x is float64",)),
    ("x", torch._neg_view, ("x is a view that negates its memory",)),
    ("x", lambda x: x.to(torch.float8_e4m3fn), ("without scales", "pair")),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.double()), ("x[1] is float64",)),
    ("x", lambda x: (x.to(torch.float8_e4m3fn), x.float()[:-1]), ("x[1] has shape",)),
]
SMS: Cases = [
    ("num_sms", to(-1), ("num_sms (-1)",)),
    ("num_sms", to("8"), ("num_sms",)),
    ("num_qps", to(1.5), ("num_qps (1.5)",)),
]
FRESH: Cases = [
    *WHEN,
    *ROWS,
    *SMS,
    *flags("do_expand", "do_zero_padding", "use_tma_aligned_col_major_sf", "do_cpu_sync"),
    ("num_max_tokens_per_rank", to(2), ("num_max_tokens_per_rank is 2", "split the batch")),
    ("num_max_tokens_per_rank", to(0), ("num_max_tokens_per_rank (0)",)),
    *(
        (name, to(value), (name,))
        for name in ("num_experts", "expert_alignment")
        for value in (0, -1, True, 1.0, "2", 1 << 70)
    ),
    ("num_experts", to(None), ("num_experts is missing",)),
    ("topk_idx", to(None), ("topk_idx is missing", "topk_weights")),
    *tensors("topk_idx", torch.int16, torch.float32)[5:],
    ("topk_idx", lambda t: t[:, :0], ("topk_idx has shape", "K from 1")),
    *tensors("topk_weights", torch.int64, torch.float64)[5:],
    ("cumulative_local_expert_recv_stats", to(5), ("cumulative_local_expert_recv_stats must",)),
    ("cumulative_local_expert_recv_stats", to(torch.zeros(9).int()), ("has shape", "[L]")),
    ("cumulative_local_expert_recv_stats", lambda t: t.float(), ("is float32", "int32")),
    ("handle", to(5), ("topk_idx given together with handle",)),
]
HANDLE: Cases = [
    ("handle", to(value), ("handle must be the EPHandle",)) for value in (5, "h", (), [1], object())
]
CACHED: Cases = [
    *WHEN,
    *ROWS[:5],
    *SMS,
    *HANDLE,
    ("x", lambda x: x[:-1], ("x has shape", "handle was made for")),
    ("do_cpu_sync", to(True), ("do_cpu_sync (True)",)),
    ("do_expand", to(True), ("do_expand (True)", "must be False")),
    ("num_experts", to(8), ("num_experts (8)", "must be 9")),
    ("expert_alignment", to(0), ("expert_alignment (0)",)),
    ("expert_alignment", to(128), ("expert_alignment (128)", "must be 1")),
    ("num_max_tokens_per_rank", to(32), ("num_max_tokens_per_rank (32)", "must be 64")),
    ("topk_weights", lambda t: t[:, :-1], ("topk_weights has shape",)),
    ("topk_weights", lambda t: t.double(), ("topk_weights is float64",)),
]
COMBINE: Cases = [
    *WHEN,
    *SMS,
    *HANDLE,
    ("handle", to(None), ("handle must be the EPHandle",)),
    *tensors("x", torch.float8_e4m3fn, torch.int64)[5:],
    *tensors("topk_weights", torch.int64)[5:],
    ("topk_weights", lambda t: t[:, :-1], ("topk_weights has shape",)),
    *(("bias", to(value), ("bias",)) for value in ("b", (), (None,), (torch.zeros(1),) * 3)),
    ("bias", to(torch.zeros(1, 128)), ("bias has shape",)),
]


class Calls:
    """Good calls on one buffer, by name: the function, and its arguments."""

    def __init__(self, ranks: Ranks, kind: Any) -> None:
        self.buffer = buffer = made(ranks, kind)
        world, rank = world_of(ranks, "few"), ranks.rank
        self.world = world
        x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
        first = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_experts": 9}
        first["cumulative_local_expert_recv_stats"] = torch.zeros(5 - rank, dtype=torch.int32)
        recv_x, _, recv_weights, self.handle, _ = buffer.dispatch(**first)
        rows, _, scores, self.blocks, _ = buffer.dispatch(**first, do_expand=True)
        known = {"x": x, "handle": self.handle, "topk_weights": weights}
        self.good: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
            "fresh": (buffer.dispatch, first),
            "static": (
                buffer.dispatch,
                {**first, "do_cpu_sync": False, "do_expand": True, "num_max_tokens_per_rank": 16},
            ),
            "cached": (buffer.dispatch, known),
            "combine": (
                buffer.combine,
                {"x": recv_x, "handle": self.handle, "topk_weights": recv_weights},
            ),
            "expanded combine": (
                buffer.combine,
                {"x": rows, "handle": self.blocks, "topk_weights": scores},
            ),
        }
        self.want = {name: self.made(name) for name in self.good}

    def made(self, name: str) -> list[torch.Tensor]:
        call, arguments = self.good[name]
        return [part for part in call(**arguments) if isinstance(part, torch.Tensor)]

    def works(self) -> None:
        for name, want in self.want.items():
            used = int(self.blocks.psum_num_recv_tokens_per_expert[-1])
            for got, known in zip(self.made(name), want, strict=True):
                rows = used if name == "static" else len(known)  # others are unspecified
                assert torch.equal(got[:rows], known[:rows]), name


def refused(ranks: Ranks, calls: Calls, name: str, cases: Cases) -> None:
    """Ranks take turns: one makes the bad call, and the other learns in a good one what it was."""
    call, good = calls.good[name]
    for number, (argument, change, words) in enumerate(cases):
        here = number % ranks.world_size == ranks.rank
        arguments = {**good, argument: change(good.get(argument))} if here else good
        error = error_of(lambda arguments=arguments: call(**arguments))
        try:
            check(error, ValueError if here else ty.PeerError, *words)
        except AssertionError as failed:
            raise AssertionError(f"{name}, case {number} ({argument}): {failed}") from error
        assert "ExpertParallel" not in str(error) and "num_num" not in str(error), error


@distributed_test(world_size=2)
def test_calls(ranks: Ranks) -> None:
    for kind in KINDS:
        calls = Calls(ranks, kind)
        name = kind.__name__
        v1 = deep_ep.Buffer(ranks.group)
        layout = v1.get_dispatch_layout(calls.world.idx[ranks.rank], 9)
        old: Any = v1.dispatch(
            calls.world.x[ranks.rank],
            None,
            layout[0],
            None,
            layout[3],
            layout[2],
            calls.world.idx[ranks.rank],
            calls.world.weights[ranks.rank],
        )[4]
        other = Calls(ranks, KINDS[1 - KINDS.index(kind)])
        hybrid = HybridEPBuffer(ranks.group, 128, 64, 5)
        picks = calls.world.idx[ranks.rank]
        rows = calls.world.x[ranks.rank]
        blocks = hybrid.dispatch_with_permute(hidden=rows, topk_idx=picks, num_of_experts=10)[-1]
        theirs = f"EPHandle of dispatch() of {type(other.buffer).__name__} (DeepEP V2"
        generations: Cases = [
            ("handle", to(old), ("EPHandle", name, "dispatch() of Buffer (DeepEP V1)")),
            ("handle", to((*old,)), ("EPHandle", name, "dispatch() of Buffer (DeepEP V1)")),
            ("handle", to(blocks), ("EPHandle", name, "_permute() of HybridEPBuffer")),
            ("handle", to(other.handle), ("EPHandle", name, theirs)),
        ]
        refused(ranks, calls, "fresh", FRESH)
        refused(ranks, calls, "static", [*WHEN[:2], *ROWS[:3], *SMS, *FRESH[-12:-1]])
        refused(ranks, calls, "cached", CACHED + generations)
        refused(ranks, calls, "combine", COMBINE + generations)
        by_expert: Cases = [
            ("topk_weights", lambda t: t[:-1], ("topk_weights has shape", "[rows]")),
            ("topk_weights", lambda t: t[:, None], ("topk_weights has shape",)),
            ("x", lambda x: x[:-1], ("x has shape",)),
        ]
        refused(ranks, calls, "expanded combine", by_expert)
        calls.works()
        for each in (calls.buffer, other.buffer, v1):
            each.destroy()
        error = error_of(
            lambda calls=calls: calls.buffer.combine(calls.want["fresh"][0], calls.handle)
        )
        check(error, RuntimeError, "destroyed")
        again = made(ranks, kind)
        error = error_of(lambda a=again, c=calls: a.combine(c.want["fresh"][0], c.handle))
        check(error, RuntimeError, "Buffer that made this handle was destroyed")
        again.destroy()


@distributed_test(world_size=2)
def test_what_one_generation_has_alone(ranks: Ranks) -> None:
    """Arguments of V2.5, and those of V2.1."""
    older, newer = (Calls(ranks, kind) for kind in KINDS)
    epilogue: Cases = [
        ("previous_event_before_epilogue", to(value), ("previous_event_before_epilogue",))
        for value in EVENTS
    ]
    refused(ranks, older, "fresh", epilogue)
    refused(ranks, older, "combine", epilogue)
    defers: Cases = [
        ("defer_epilogue", to(True), ("defer_epilogue (True)", "async_with_compute_stream")),
        ("defer_epilogue", to("no"), ("defer_epilogue", "True or False")),
    ]
    copies: Cases = [("do_handle_copy", to(True), ("do_handle_copy (True)", "clone"))]
    refused(ranks, newer, "fresh", defers + copies)
    refused(ranks, newer, "combine", defers)
    for calls, name in ((older, "defer_epilogue"), (newer, "previous_event_before_epilogue")):
        call, good = calls.good["fresh"]
        error = error_of(lambda call=call, good=good, name=name: call(**good, **{name: None}))
        check(error, TypeError, name)
    kept = newer.handle.topk_idx
    kept.add_(0)
    check(error_of(lambda: newer.handle.topk_idx), ValueError, "topk_idx was modified")
    older.buffer.destroy()
    newer.buffer.destroy()


@distributed_test(world_size=(1, 2))
def test_the_first_call(ranks: Ranks) -> None:
    """Before there is any native object; without M, or with another one than the constructor's."""
    world, rank = world_of(ranks, "few"), ranks.rank
    for kind in KINDS:
        buffer = made(ranks, kind, num_bytes=64 << 20, num_max_tokens_per_rank=0, hidden=0)
        assert buffer.num_bytes == 64 << 20 and buffer.num_max_tokens_per_rank == 0
        error = error_of(lambda buffer=buffer: fresh(buffer, world))
        check(error, ValueError, "num_max_tokens_per_rank is missing", "constructor")
        meet(ranks)
        small = made(ranks, kind, num_max_tokens_per_rank=2)
        error = error_of(lambda small=small: fresh(small, world))
        check(error, ValueError, f"x has {3 + rank} tokens", "num_max_tokens_per_rank is 2")
        small.destroy()
        for most in (16, 8, np.int64(16)):
            exact = fresh(buffer, world, num_max_tokens_per_rank=most)
            static = fresh(buffer, world, num_max_tokens_per_rank=most, do_cpu_sync=False)
            assert torch.equal(exact[0], world.take(rank, world.x))
            assert len(static[0]) == most * ranks.world_size
            assert torch.equal(static[0][: len(exact[0])], exact[0])
            assert exact[3].num_max_tokens_per_rank == most
        buffer.destroy()


CONSTRUCTOR: list[tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = [
    ({"num_max_tokens_per_rank": 0}, ValueError, ("num_bytes (None)", "give num_bytes")),
    ({"hidden": 0}, ValueError, ("hidden (0)",)),
    *(({"hidden": value}, ValueError, ("hidden",)) for value in (-1, "8", 1.5)),
    ({"num_max_tokens_per_rank": "8"}, ValueError, ("num_max_tokens_per_rank",)),
    ({"num_topk": -1}, ValueError, ("num_topk (-1)",)),
    ({"num_bytes": -1}, ValueError, ("num_bytes (-1)",)),
    ({"sl_idx": "3"}, ValueError, ("sl_idx",)),
    ({"num_allocated_qps": -1}, ValueError, ("num_allocated_qps (-1)",)),
    ({"num_cpu_timeout_secs": 0}, ValueError, ("num_cpu_timeout_secs (0)",)),
    ({"num_gpu_timeout_secs": None}, ValueError, ("num_gpu_timeout_secs",)),
    ({"num_gpu_timeout_secs": 2 * 10**9}, ValueError, ("num_gpu_timeout_secs (2", "1000000000")),
    *(
        ({name: "no"}, ValueError, (name, "True or False"))
        for name in ("use_fp8_dispatch", "deterministic", "allow_hybrid_mode", "explicitly_destroy")
    ),
]


@distributed_test(world_size=2)
def test_constructors(ranks: Ranks) -> None:
    """One rank refuses its arguments: the other learns why; then all make one. Or they disagree."""
    for kind in KINDS:
        more = [] if kind is KINDS[1] else [({"num_cpu_bytes": 1}, ty.NotSupported, ("Engram",))]
        for number, (wrong, signature, words) in enumerate(CONSTRUCTOR + more):
            here = number % 2 == ranks.rank
            error = error_of(
                lambda k=kind, w=wrong, here=here: made(ranks, k, **(w if here else {}))
            )
            check(error, signature if here else ty.PeerError, *words)
            assert "ExpertParallel" not in str(error)
        sizes: dict[str, Any]
        for name, least in (("num_max_tokens_per_rank", 8), ("hidden", 128), ("num_bytes", 2**25)):
            sizes = {name: least + ranks.rank}
            error = error_of(lambda k=kind, s=sizes: made(ranks, k, **s))
            check(error, ty.Mismatch, name, str(least), str(least + 1))
        check(error_of(lambda k=kind: k("world", 8)), ValueError, "group ('world')")
        check(error_of(lambda k=kind: k(ranks.group, 8, colour=1)), TypeError, "colour")
        made(ranks, kind).destroy()
