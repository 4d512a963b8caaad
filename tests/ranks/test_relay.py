"""Engine ``collective`` on a grid of nodes: the shared test bodies with the relay, and what only
the relay has.

The grid is given (``on_grid``), so that the ranks of one machine stand for several hosts;
``test_hosts.py`` has two real networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import test_async as asynchronous
import test_dispatch_combine as shared
import test_gradients as gradients
import test_mismatch as mismatch
import tokenyard as ty
from bad_input import Inputs, assert_works, check, error_of, make, make_hasty, meet
from cases import PLAIN, QUANTIZED, Case, check_received, dispatch, on_grid, rows_to_combine
from nvlink_pool import SOAK
from test_failures import FAILED_RANK, Plot, check_over
from tokenyard.config import Config
from tokenyard.engines.group_transport import GroupTransport
from tokenyard.engines.hierarchy import Hierarchy
from tokenyard.handle import Spec
from tokenyard.header import NUM_TOKENS
from tokenyard.routing import tokens_in_ranks
from tokenyard.testing import ROUTINGS, Ranks, distributed_test, poisoned
from tokenyard.testing.modules import BODY

FLAT, MAJOR, PADDED = ty.Layout
EXPERTS, ROOM = 11, 17


def run_grid(
    ranks: Ranks,
    grid: tuple[int, int],
    seeds: range,
    prepare: Callable[[Any], None] = lambda ep: None,
) -> None:
    """One object, many calls: layouts, kinds of shapes, payloads and routings in turn, all ways to
    combine.
    """
    sizes = {"num_tokens": ROOM, "num_experts": EXPERTS}
    with on_grid(*grid), Case(ranks.world_size, **sizes).make(ranks) as ep, poisoned():
        assert ep.topology == ty.Topology(*grid) and "once per node" in ep.why
        prepare(ep)
        for seed in seeds:
            case = Case(
                ranks.world_size,
                routing=ROUTINGS[seed % len(ROUTINGS)],
                layout=list(ty.Layout)[seed % 3],
                exact=seed % 2 == 0,
                dtype=(*PLAIN, *QUANTIZED)[seed % 5],
                seed=seed,
                **sizes,
            )
            check_received(recv := dispatch(ranks, ep, case), case, ranks.rank)
            shared.combine_all_ways(ranks, ep, recv, case)
            again = ep.dispatch(own_payload(ranks, case), handle=recv.handle)
            valid = recv.source >= 0
            assert torch.equal(again.x[valid].view(torch.uint8), recv.x[valid].view(torch.uint8))


def own_payload(ranks: Ranks, case: Case) -> Any:
    x = case.x[ranks.rank]
    if isinstance(x, ty.Quantized):
        return ty.Quantized(x.data.to(ranks.device), x.scales.to(ranks.device))
    return x.to(ranks.device)


@distributed_test(world_size=4)
def test_2x2(ranks: Ranks) -> None:
    run_grid(ranks, (2, 2), range(6 if SOAK == 1 else 18))


def first_six(ranks: Ranks) -> Ranks | None:
    """The first six of eight ranks as ranks of a group of their own: cheaper than workers of their
    own.
    """
    group = dist.new_group(range(6))
    return replace(ranks, group=group, world_size=6) if ranks.rank < 6 else None


@distributed_test(world_size=8)
def test_2x3_and_3x2_and_2x4(ranks: Ranks) -> None:
    if six := first_six(ranks):
        run_grid(six, (2, 3), range(3 if SOAK == 1 else 5))
        run_grid(six, (3, 2), range(8, 11 if SOAK == 1 else 13))
    run_grid(ranks, (2, 4), range(16, 19 if SOAK == 1 else 23))


@distributed_test(world_size=4)
def test_on_a_wire_that_keeps_counts_from_the_host(ranks: Ranks) -> None:
    """As with NCCL: no headers where shapes are static, every place of a static shape moves, blocks
    of a peer without gaps.
    """

    def rewire(ep: Any) -> None:
        engine = ep._calls.engine
        engine._transport = engine._rows._transport = GroupTransport(
            ranks.group, ranks.device, "gloo"
        )

    run_grid(ranks, (2, 2), range(30, 38), rewire)


class NoNumbersOfTheHost(TorchDispatchMode):
    """Raises where a tensor is made of Python's numbers: no CUDA graph can hold that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.lift_fresh.default, "numbers of the host"
        return func(*args, **(kwargs or {}))


def test_a_leg_by_hand() -> None:
    """Rank 0 of nodes (0, 1) and (2, 3), an expert each. Relayed: tokens for ranks 0 and 1, for
    rank 1, and for nobody here. With static shapes and counts that stay on the device, nothing is
    copied from the host.
    """
    sizes = {"num_experts": 4, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 2, "timeout": 1.0}
    transport: Any = SimpleNamespace(counts_on_host=False)
    relay = Hierarchy(Config(**sizes, rank=0, world_size=4), ty.Topology(2, 2), transport)
    ids = torch.tensor([[1, 0], [3, 1], [2, 99], [-1, -7]])
    hop = relay.plan(ids, [1, 2, 3, 1], Spec(layout=FLAT, exact=True))
    assert hop.order.tolist() == [0, 0, 1]
    assert hop.joins.tolist() == [[0, 1], [-1, 2], [-1, -1], [-1, -1]]
    assert hop.arrange.tolist() == [0, 4, 5, 1, 2, 3, 6]  # they come from ranks 0, 2, 2, 2, 1, 1, 3
    assert (hop.spans.send_counts, hop.spans.recv_counts) == ([1, 2, 0, 0], [4, 3, 0, 0])
    with NoNumbersOfTheHost():
        hop = relay.plan(ids, [2, 2, 2, 2], Spec(layout=FLAT, exact=False))
    assert hop.order.tolist() == [0, -1, -1, -1, 0, 1, -1, -1]
    assert hop.joins.tolist() == [[0, 4], [5, -1], [-1, -1], [-1, -1]]
    assert hop.arrange.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert (hop.spans.send_counts, hop.spans.recv_counts) == ([4, 4, 0, 0], [4, 4, 0, 0])
    transport.counts_on_host = True
    hop = relay.plan(ids, [1, 0, 2, 1], Spec(layout=FLAT, exact=False))
    assert hop.order.tolist() == [0, -1, -1, -1, 0, 1, -1, -1]
    assert hop.joins.tolist() == [[0, 4], [-1, 5], [-1, -1], [-1, -1]]
    assert hop.arrange.tolist() == [
        0,
        3,
        5,
        6,
        1,
        2,
        4,
        7,
    ]  # ranks 0, 2, 2 and 3 sent rows; then places without one
    assert (hop.spans.send_counts, hop.spans.recv_counts) == ([1, 2, 0, 0], [3, 1, 0, 0])
    assert (hop.spans.send_starts, hop.spans.recv_starts) == ([0, 4, 0, 0], [0, 4, 0, 0])


# Each body with arguments; all run in one object's life after the other.
BODIES: dict[str, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {
    "sizes": [
        (shared.test_quantised_in_the_send, (FLAT, False, ty.Quantize.FP8)),
        (shared.test_quantised_in_the_send, (MAJOR, True, ty.Quantize.FP8_UE8M0)),
        (shared.test_quantised_in_the_send, (PADDED, True, ty.Quantize.FP8_POW2)),
        (shared.test_blocks_are_aligned, (False,)),
        *(
            (shared.test_any_size, (layout, sizes))
            for layout, sizes in zip(
                [*ty.Layout] * 5, shared.SIZES[:: 2 if SOAK == 1 else 1], strict=False
            )
        ),
        (shared.test_int32_ids_and_16_bit_weights, ()),
        (shared.test_without_weights, ()),
        (shared.test_exact_shapes_take_any_number_of_tokens, ()),
        (shared.test_capacity_drops_and_counts, ()),
    ],
    "gradients": [
        (gradients.test_a_layer_equals_the_dense_one, (FLAT, True, "duplicates")),
        (gradients.test_a_layer_equals_the_dense_one, (MAJOR, True, "dropped")),
        (gradients.test_a_layer_equals_the_dense_one, (PADDED, False, "empty_ranks")),
        (gradients.test_weights_of_the_owner_get_their_gradient, (MAJOR,)),
        *(
            (gradients.test_backward_of_dispatch_is_combine_bit_for_bit, (each, each is FLAT))
            for each in ty.Layout
        ),
        (gradients.test_gradients_of_weights_only_and_of_unused_picks, (True,)),
        (gradients.test_reduced_weights_and_bias_have_gradients, ()),
        (gradients.test_handles_serve_any_number_of_times_in_any_order, ()),
        (gradients.test_cached_dispatch_is_differentiable, (PADDED,)),
        (gradients.test_activation_checkpointing, (FLAT, False)),
    ],
    "later": [
        (asynchronous.test_results_are_those_of_a_waiting_call, (MAJOR, True, {"async_op": True})),
        (
            asynchronous.test_results_are_those_of_a_waiting_call,
            (FLAT, False, {"return_hook": True}),
        ),
        (asynchronous.test_two_batches_overlap, ()),
        (asynchronous.test_asynchronous_calls_are_differentiable, (FLAT,)),
        (asynchronous.test_close_finishes_what_was_started, ()),
    ],
    "told": [
        (mismatch.test_one_rank_is_one_call_ahead, (True,)),
        (mismatch.test_two_ranks_are_wrong_in_different_ways, ()),
    ],
}


@pytest.mark.parametrize("which", BODIES)
@distributed_test(world_size=4)
def test_shared_bodies(ranks: Ranks, which: str) -> None:
    with on_grid(2, 2):
        for test, arguments in BODIES[which]:
            getattr(test, BODY)(ranks, *arguments)


@distributed_test(world_size=4)
def test_compilers_know_the_shapes(ranks: Ranks) -> None:
    """Of a plan with two hops, as of any: fake kernels against the real ones."""
    for layout, exact in ((FLAT, True), (FLAT, False), (MAJOR, False), (PADDED, True)):
        case = Case(4, dtype=torch.float32, layout=layout, exact=exact)
        leaves = gradients.Layer(case, ranks)
        with on_grid(2, 2), case.make(ranks) as ep:
            spec = [layout.value, int(exact), 1, -1]
            tensors = ep._calls.order, None, leaves.x, None, leaves.idx, leaves.weights
            arguments = (*tensors, ep._calls.number, spec, 0, 0)
            torch.library.opcheck(
                torch.ops.tokenyard.dispatch.default, arguments, test_utils="test_faketensor"
            )


# What crosses the network


@distributed_test(world_size=8)
def test_counted_bytes_are_those_of_the_plan(ranks: Ranks) -> None:
    """Across nodes: a row per (token, other node), both ways; flat: one per (token, rank there)."""
    if six := first_six(ranks):
        check_counted(six)


def check_counted(ranks: Ranks) -> None:
    rank, counted = ranks.rank, {}
    case = Case(6, num_tokens=60, num_topk=4, num_experts=12)
    hit = [tokens_in_ranks(idx, 12, 6) for idx, _ in case.picks]
    for grid in ((2, 3), (3, 2), (1, 6)):
        nodes, each = grid
        with on_grid(*grid), case.make(ranks) as ep:
            recv = dispatch(ranks, ep, case)
            before = ep.stats()
            with replace(case, exact=False).make(
                ranks
            ) as static:  # places without a row do not move
                padded = dispatch(ranks, static, replace(case, exact=False))
                static.combine(rows_to_combine(padded, case, rank), padded.handle)
                static.dispatch(own_payload(ranks, case), handle=padded.handle)
                count = static.stats()
            ep.combine(rows_to_combine(recv, case, rank), recv.handle)
            back = ep.stats()
            there = before.across
            ep.dispatch(own_payload(ranks, case), handle=recv.handle)
            cached = ep.stats()
        assert (count.rows_sent, count.rows_received) == (cached.rows_sent, cached.rows_received)
        assert (count.inside, count.across) == (cached.inside, cached.across)
        to_nodes = [
            in_ranks.unflatten(1, grid).any(2) if nodes > 1 else in_ranks for in_ranks in hit
        ]
        node = rank // each
        rail = (
            [peer for peer in range(6) if peer % each == rank % each and peer != rank]
            if nodes > 1
            else []
        )
        sent = int(sum(to_nodes[rank][:, peer // each].sum() for peer in rail))
        received = int(sum(to_nodes[peer][:, node].sum() for peer in rail))
        assert (there.rows_sent, there.rows_received) == (sent, received)
        assert (
            back.across.rows_sent - there.rows_sent == received
            and back.across.rows_received - there.rows_received == sent
        )
        row_bytes = case.hidden * 2 + 4 * (1 + 2 * case.num_topk)
        row_bytes = -(-row_bytes // 16) * 16
        assert there.bytes_sent == sent * row_bytes and there.bytes_received == received * row_bytes
        assert back.across.bytes_sent - there.bytes_sent == received * case.hidden * 2
        assert cached.across.bytes_sent - back.across.bytes_sent == sent * case.hidden * 2
        forwarded = [hit[peer] for peer in (*rail, rank)]
        inside = sum(
            int(in_ranks[:, peer].sum())
            for in_ranks in forwarded
            for peer in ep.topology.ranks_of(node)
            if peer != rank
        )
        assert before.inside.rows_sent == inside
        assert before.calls == {"dispatch": 1} | (
            {"dispatch, inside the node": 1} if nodes > 1 else {}
        )
        counted[grid] = sum(before.rows_sent)
    assert counted[1, 6] == int(hit[rank].sum())


# When things go wrong


@pytest.mark.parametrize("hop", ["first", "second"])
@distributed_test(world_size=4)
def test_a_rank_that_sleeps_before_a_hop(ranks: Ranks, hop: str) -> None:
    """Rank 1 of nodes (0, 1) and (2, 3): whoever waits for it, or for a rank that does,
    names it.
    """
    plot = Plot(ranks, "rows", lambda: meet(ranks))
    waits = {
        "first": {
            0: ", inside the node #0, rows",
            2: ", inside the node #0, rows",
            3: "dispatch #0, rows",
        },
        "second": {
            0: ", inside the node #0, rows",
            2: "combine #1, counts",
            3: "combine #1, counts",
        },
    }[hop]

    def play() -> None:
        inputs = Inputs.of(ranks)
        with on_grid(2, 2):
            ep = plot.ep = make_hasty(ranks)
        everywhere = torch.tensor([0, 3, 6], device=ranks.device).expand(5, -1)
        everywhere = torch.where(
            torch.arange(5, device=ranks.device).unsqueeze(1) % 2 == 0, everywhere, everywhere + 1
        )
        plot._inside(
            ep._calls.engine._transport, "exchange", before="rows", times=1 if hop == "first" else 2
        )
        recv = ep.dispatch(inputs.x, everywhere)
        ep.combine(recv.x, recv.handle)

    error = error_of(play)
    if ranks.rank != FAILED_RANK:
        assert isinstance(error, ty.PeerTimeout), repr(error)
        assert error.rank == FAILED_RANK and waits[ranks.rank] in str(error), str(error)
        check_over(plot.ep)
        meet(ranks)
    meet(ranks)
    with on_grid(2, 2), make(ranks) as ep:
        assert_works(ranks, ep)


@distributed_test(world_size=4)
def test_ids_out_of_range_on_one_rank(ranks: Ranks) -> None:
    inputs = Inputs.of(ranks)
    idx = inputs.topk_idx.clone()
    if ranks.rank == 2:
        idx[3, 1] = 8
    with on_grid(2, 2), make(ranks) as ep:
        for exact in (True, False):
            error = error_of(lambda exact=exact: ep.dispatch(inputs.x, idx, exact=exact))
            meet(ranks)
            check(
                error,
                ValueError if ranks.rank == 2 else ty.PeerError,
                "topk_idx[3, 1] is 8",
                "8 experts",
            )
            assert_works(ranks, ep)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
@distributed_test(world_size=4)
def test_a_lie_about_rows_to_relay(ranks: Ranks, exact: bool) -> None:
    """More rows than tokens, or than a static block holds: named before room is made for them."""
    inputs = Inputs.of(ranks)
    with on_grid(2, 2), make(ranks) as ep:
        wire = ep._calls.engine._transport
        honest = wire.swap

        def swap(header: Any, what: str) -> Any:
            if not exact:
                header[:, NUM_TOKENS] = 100
            header[:, -1] = 6 if exact else 14
            return honest(header, what)

        if ranks.rank == 1:
            wire.swap = swap
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx, exact=exact))
        wire.swap = honest
        meet(ranks)
        check(error, ty.PeerError, "rank 1 announced impossible counts")
        assert_works(ranks, ep)
