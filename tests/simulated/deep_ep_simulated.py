"""DeepEP's calls over the kernels of engines ``nvlink``, ``twolevel`` and ``low_latency``,
interpreted, on ranks that take turns.

``python tests/run.py deep_ep_simulated 3`` runs the schedule of seed 3.
"""

from __future__ import annotations

import os
import sys
from threading import get_ident
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

import bad_input
from bad_input import error_of
from deep_ep_world import World, from_fp8
from tokenyard import deep_ep
from tokenyard.deep_ep.hybrid import HybridEPBuffer, indices_to_map
from tokenyard.deep_ep.natives import ENGINE_VARIABLE
from tokenyard.errors import PeerError
from tokenyard.testing.simulator import SimulatedGroup, SimulatedRank, simulate

MOST = 8


def normal(buffer: Any, world: World, engine: str = "nvlink") -> None:
    rank = buffer.rank
    per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(
        world.idx[rank], world.num_experts
    )
    layout = {
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_ranks,
        "num_tokens_per_expert": per_expert,
    }
    picks = {"topk_idx": world.idx[rank], "topk_weights": world.weights[rank]}
    recv_x, idx, weights, counts, handle, _ = buffer.dispatch(world.x[rank], **layout, **picks)
    assert torch.equal(recv_x, world.take(rank, world.x)) and counts == world.counts(rank)
    assert handle.ep.engine == engine
    assert torch.equal(idx, world.local_idx(rank)) and torch.equal(
        weights, world.local_weights(rank)
    )
    assert handle[0].t().tolist() == [world.prefix(peer) for peer in range(world.size)]
    assert torch.equal(buffer.dispatch(world.x[rank], handle)[0], recv_x)
    out, out_weights, _ = buffer.combine(world.work(rank, recv_x), handle, weights)
    assert torch.equal(out.float(), world.combined(rank))
    assert torch.equal(out_weights, torch.where(world.idx[rank] < 0, 0.0, world.weights[rank]))
    worst = buffer.dispatch(
        world.x[rank], **layout, **picks, num_worst_tokens=world.size * MOST + 1
    )
    assert (
        len(worst[0]) == world.size * MOST + 1
        and torch.equal(worst[0][: len(idx)], recv_x)
        and worst[3] == []
    )
    assert torch.equal(worst[1][: len(idx)], idx) and bool((worst[1][len(idx) :] == -1).all())
    assert worst[4][0][:, rank].tolist() == world.prefix(rank)
    assert torch.equal(buffer.combine(worst[0], worst[4])[0], buffer.combine(recv_x, handle)[0])
    bare = buffer.dispatch(world.x[rank], **layout)
    assert torch.equal(bare[0], recv_x) and bare[3] == counts


def refusals(buffer: Any, world: World) -> None:
    """One rank has a bad argument. The others learn of it in the call (normal mode), or go on
    without its tokens; its turn is over as theirs is, so that later calls meet."""
    rank = buffer.rank
    _, _, per_expert, _, _ = buffer.get_dispatch_layout(world.idx[rank], world.num_experts)
    picks = {
        "topk_idx": world.idx[rank],
        "topk_weights": world.weights[rank],
        "num_tokens_per_expert": per_expert,
    }
    for bad in (
        {"expert_alignment": 0},
        {"topk_idx": world.idx[rank].short()},
        {"previous_event": 5},
    ):
        arguments = {**picks, **(bad if rank == 0 else {})}
        error = error_of(lambda arguments=arguments: buffer.dispatch(world.x[rank], **arguments))
        bad_input.check(error, PeerError if rank else ValueError, next(iter(bad)))
    rows, _, _, counts, _, _ = buffer.dispatch(world.x[rank], **picks)
    assert torch.equal(rows, world.take(rank, world.x)) and counts == world.counts(rank)
    got: list[torch.Tensor] = []

    def low() -> None:
        ways = {"async_finish": "no"} if rank == 0 else {}
        got.append(
            buffer.low_latency_dispatch(
                world.x[rank], world.idx[rank], MOST, world.num_experts, **ways
            )[1]
        )

    error = error_of(low)
    if rank == 0:
        bad_input.check(error, ValueError, "async_finish ('no') must be True or False")
    else:
        assert error is None
        assert got[0].tolist() == [
            sum(source > 0 for source, _ in each) for each in world.expert_rows(rank)
        ]


def check_strides(scales: torch.Tensor) -> None:
    """DeepEP's, which has no single columns: an in-place buffer of ``[L, S, R * M]``."""
    _, rows, columns = scales.shape
    assert scales.stride() == (columns * rows, 1, rows if columns > 1 else 1)


def low_latency(buffer: Any, world: World) -> None:
    """Two batches outstanding at once, each behind a hook; tensors are there before it and filled
    by it.
    """
    rank = buffer.rank
    idx, weights = world.idx[rank], world.weights[rank]
    counts = torch.zeros(len(world.experts_of(rank)), dtype=torch.int32)
    waits = torch.zeros(world.size, dtype=torch.int64)
    sent = [
        buffer.low_latency_dispatch(
            scale * world.x[rank],
            idx,
            MOST,
            world.num_experts,
            counts,
            waits,
            use_fp8=fp8,
            round_scale=fp8,
            return_recv_hook=True,
        )
        for scale, fp8 in ((1, True), (2, False))
    ]
    first, second = (handle.ep for _, _, handle, _, _ in sent)
    assert first.engine == second.engine == "low_latency" and first is not second
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        MOST, world.hidden, world.size, world.num_experts
    )
    assert first.buffer_bytes + second.buffer_bytes <= hint
    for rows, *_ in sent:
        (rows[0] if isinstance(rows, tuple) else rows).view(torch.uint8).zero_()
    combined = []
    for scale, (rows, got, handle, event, hook) in enumerate(sent, start=1):
        assert event.event is None
        hook()
        plain = from_fp8(*rows) if isinstance(rows, tuple) else rows
        for expert, want in enumerate(world.expert_rows(rank)):
            assert int(got[expert]) == len(want)
            assert all(
                torch.equal(plain[expert, at], scale * world.x[s][t])
                for at, (s, t) in enumerate(want)
            )
            assert handle[0][expert, : len(want)].tolist() == [token for _, token in want]
        if isinstance(rows, tuple):
            check_strides(rows[1])
        out = torch.empty_like(world.x[rank]) if scale == 1 else None
        combined.append(
            buffer.low_latency_combine(
                world.by_expert(rank, plain),
                idx,
                weights,
                handle,
                out=out,
                return_recv_hook=True,
                combine_wait_recv_cost_stats=waits,
            )
        )
        assert out is None or combined[-1][0] is out
    assert counts.tolist() == [2 * len(want) for want in world.expert_rows(rank)]
    for scale, (out, _, hook) in enumerate(combined, start=1):
        hook()
        assert torch.equal(out.float(), scale * world.weighted(rank))
    for cast in {"use_fp8": False}, {"round_scale": True, "use_ue8m0": True}:
        rows, got, handle, _, hook = buffer.low_latency_dispatch(
            world.x[rank], idx, MOST, world.num_experts, **cast
        )
        plain = from_fp8(*rows) if isinstance(rows, tuple) else rows
        for expert, want in enumerate(world.expert_rows(rank)):
            assert int(got[expert]) == len(want)
            assert all(
                torch.equal(plain[expert, at], world.x[s][t]) for at, (s, t) in enumerate(want)
            )
        if isinstance(rows, tuple):
            check_strides(rows[1])
        out, _, none = buffer.low_latency_combine(
            world.by_expert(rank, plain), idx, weights, handle
        )
        assert hook is None is none and torch.equal(out.float(), world.weighted(rank))
    masks(buffer, world, first, second)


def statistics(buffer: Any, world: World) -> None:
    """Calls with statistics and without, in turn, on one object as on the other: each has launches
    of its own.
    """
    rank, counts = buffer.rank, torch.zeros(len(world.experts_of(buffer.rank)), dtype=torch.int32)
    idx, weights, peers = (
        world.idx[rank],
        world.weights[rank],
        [peer for peer in range(world.size) if peer != rank],
    )
    # Objects take turns.
    asked = [(False, False)] * 2 + [(False, True), (True, True)] + [(True, False)] * 2
    for loads, timed in asked:
        there, back = (
            torch.zeros(world.size, dtype=torch.int64) if timed else None for _ in range(2)
        )
        rows, got, handle, _, _ = buffer.low_latency_dispatch(
            world.x[rank],
            idx,
            MOST,
            world.num_experts,
            counts.zero_() if loads else None,
            there,
            use_fp8=False,
        )
        work = world.by_expert(rank, rows)
        out = buffer.low_latency_combine(
            work, idx, weights, handle, combine_wait_recv_cost_stats=back
        )[0]
        assert torch.equal(out.float(), world.weighted(rank))
        assert not loads or torch.equal(counts, got)
        for waits in (there, back):
            assert waits is None or bool((waits[peers] > 0).all())


def masks(buffer: Any, world: World, first: Any, second: Any) -> None:
    """A rank that only one of the two objects has lost reads as left out; whoever asks to leave it
    out does so in both.
    """
    rank, peer = buffer.rank, (buffer.rank + 1) % world.size
    status, alone = (
        torch.ones(world.size, dtype=torch.int32),
        [int(each == peer) for each in range(world.size)],
    )
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * world.size
    for ep in (first, second):
        ep.mask(peer)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == alone
        ep.unmask(peer)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * world.size
    buffer.low_latency_update_mask_buffer(peer, True)
    assert first.active_ranks == second.active_ranks == [not out for out in alone]
    buffer.low_latency_update_mask_buffer(peer)
    assert first.active_ranks == second.active_ranks == [True] * world.size
    buffer.low_latency_update_mask_buffer((rank + 1) % world.size, True)
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [int(peer == (rank + 1) % world.size) for peer in range(world.size)]
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * world.size


def hybrid(group: Any, world: World) -> None:
    """Blocks of experts, exact and static, and back with their weights; one row per rank, too."""
    rank, local = group.rank(), world.num_experts // world.size
    buffer = HybridEPBuffer(group, world.hidden, MOST, local)
    picks = world.idx[rank], world.weights[rank]
    table, probs = indices_to_map(*picks, len(picks[0]), world.num_experts)
    assert probs is not None
    x, wanted = world.x[rank], world.expert_rows(rank)
    rows = [world.x[source][token] for each in wanted for source, token in each]
    for most in (None, world.size * MOST * world.num_topk):
        made = buffer.dispatch_with_permute(
            hidden=x, routing_map=table, probs=probs, num_permuted_tokens=most
        )
        got, weights, _, counts, handle = made
        assert handle.ep.engine == "nvlink" and weights is not None
        assert counts.tolist() == [len(each) for each in wanted]
        assert all(torch.equal(row, want) for row, want in zip(got, rows, strict=False))
        assert handle[3].tolist() == [len(world.rows[rank])] and handle[-1].tolist() == [0]
        out, back = buffer.combine_with_unpermute(hidden=got, probs=weights, handle=handle)
        assert torch.equal(out.float(), x.float() * table.sum(1, keepdim=True))
        assert back is not None and torch.equal(back, probs)
        again = buffer.dispatch_with_permute(hidden=x, handle=tuple(handle), probs=2 * probs)
        assert torch.equal(again[0][: len(rows)], got[: len(rows)])
        assert again[1] is not None and torch.equal(again[1], 2 * weights)
    flat = buffer.dispatch(x, routing_map=table, probs=probs)
    assert torch.equal(flat[0], world.take(rank, world.x))
    assert torch.equal(buffer.combine(flat[0], flat[1], flat[3])[1], probs)  # type: ignore[arg-type]


def check(seed: int) -> None:
    """Both modes on two ranks, one of them nearly or quite empty."""

    def body(here: SimulatedRank) -> None:
        group: Any = SimulatedGroup(here)
        buffer = deep_ep.Buffer(group, enable_shrink=True)
        for tokens in ("only last", "few"):
            world = World(2, tokens, 5, 2, 384, seed)
            with torch.inference_mode(
                tokens == "only last"
            ):  # what is made inside must serve outside
                normal(buffer, world)
                low_latency(buffer, world)
                refusals(buffer, world)
                statistics(buffer, world)
        buffer.destroy()

    simulate(2, body, seed=seed)


def check_hybrid(seed: int) -> None:
    """``HybridEPBuffer`` on two ranks, the first of them empty or not."""

    def body(here: SimulatedRank) -> None:
        for tokens in ("only last", "few"):
            hybrid(SimulatedGroup(here), World(2, tokens, 6, 2, 128, seed))

    simulate(2, body, seed=seed)


def check_grid(seed: int, nodes: int, each: int) -> None:
    """Normal mode of internode programs: engine ``twolevel``, and hosts that are found by their
    names.
    """
    hosts: dict[int, str] = {}  # by thread

    def body(here: SimulatedRank) -> None:
        hosts[get_ident()] = f"host {here.rank // each}"
        group: Any = SimulatedGroup(here)
        buffer = deep_ep.Buffer(group)
        for tokens in ("only last", "few"):
            world = World(nodes * each, tokens, 5, 2, 384, seed)
            normal(buffer, world, "twolevel")
            for ep in (made := buffer._natives._normal.values()):
                ep.check()
            assert {str(ep.topology) for ep in made} == {f"{nodes}x{each}"}
            assert sum(ep.stats().across.rows_sent for ep in made) > 0 or not len(
                world.x[here.rank]
            )
        buffer.destroy()

    named = patch("tokenyard.api.this_host", lambda: hosts[get_ident()])
    with named, patch.dict(os.environ, {ENGINE_VARIABLE: "twolevel"}):
        simulate(nodes * each, body, seed=seed)


if __name__ == "__main__":
    check(int(sys.argv[1]))
