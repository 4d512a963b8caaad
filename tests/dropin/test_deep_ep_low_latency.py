"""``tokenyard.deep_ep`` in low-latency mode: static blocks per expert, casts, hooks, masks,
statistics.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenyard as ty
from bad_input import error_of
from deep_ep_world import TOKENS, World, calc_diff, from_fp8
from nvlink_pool import SOAK
from tokenyard import deep_ep
from tokenyard.testing import Ranks, distributed_test

MOST = 28
CASTS: list[dict[str, bool]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


def plain(rows: Any) -> Tensor:
    """bf16 rows of a result, cast or not."""
    return from_fp8(*rows) if isinstance(rows, tuple) else rows


def check_blocks(world: World, rank: int, rows: Tensor, counts: Tensor, handle: Any) -> None:
    """Each expert's rows, by source rank and then token, and the two tables of the handle."""
    source_info, ranges, *numbers = handle
    assert numbers == [MOST, world.hidden, world.num_experts]
    assert counts.dtype == source_info.dtype == torch.int32 and ranges.dtype == torch.int64
    for expert, want in enumerate(world.expert_rows(rank)):
        assert int(counts[expert]) == len(want)
        if want:
            assert torch.equal(
                rows[expert, : len(want)],
                torch.stack([world.x[source][token] for source, token in want]),
            )
        assert source_info[expert, : len(want)].tolist() == [token for _, token in want]
        for peer in range(world.size):
            begin, count = int(ranges[expert, peer]) >> 32, int(ranges[expert, peer]) & (2**32 - 1)
            assert [source for source, _ in want][begin : begin + count] == [peer] * count
            assert count == sum(source == peer for source, _ in want)


@distributed_test(world_size=(1, 3) if SOAK == 1 else (1, 2, 3, 4))
def test_round_trip(ranks: Ranks) -> None:
    """Every cast; event or hook or neither; whole numbers up to 8 survive every cast."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group, 0, 1 << 20, True)
    for tokens in TOKENS:
        world = World.of(ranks, tokens, 13, hidden=512)
        idx, weights = world.idx[rank], world.weights[rank]
        for number, cast in enumerate(CASTS):
            exact = not cast["use_fp8"] or cast.get("round_scale", False)
            way = [{}, {"async_finish": True}, {"return_recv_hook": True}][number % 3]
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                world.x[rank], idx, MOST, 13, **cast, **way
            )
            assert (event.event is not None) == ("async_finish" in way) and (hook is not None) == (
                "return_recv_hook" in way
            )
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()
            blocks = (len(world.experts_of(rank)), ranks.world_size * MOST)
            if cast["use_fp8"]:
                data, scales = rows
                assert data.dtype == torch.float8_e4m3fn and data.shape == (*blocks, 512)
                packed = cast.get("use_ue8m0", False)
                assert scales.dtype == (torch.int32 if packed else torch.float32)
                columns = 1 if packed else 4
                assert scales.shape == (*blocks, columns) and scales.stride()[:2] == (
                    columns * blocks[1],
                    1,
                )
                assert scales.stride(2) == (1 if packed else blocks[1])
                assert (
                    not cast.get("round_scale")
                    or packed
                    or bool((scales[0, : counts[0]].log2() % 1 == 0).all())
                )
            if exact:
                check_blocks(world, rank, plain(rows), counts, handle)
            out, work = (
                torch.full_like(world.x[rank], float("nan")),
                world.by_expert(rank, plain(rows)),
            )
            combined, event, hook = buffer.low_latency_combine(
                work, idx, weights, handle, out=out, **way
            )
            assert combined is out and (hook is None) == ("return_recv_hook" not in way)
            assert (event.event is not None) == ("async_finish" in way)
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()
            if exact:
                assert torch.equal(out.float(), world.weighted(rank))
            assert torch.allclose(out.float(), world.weighted(rank), rtol=2**-4, atol=0.03)
    buffer.destroy()


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_close_to_exact_arithmetic(ranks: Ranks) -> None:
    """DeepEP's own measure and bounds, on random numbers; zero copy or not, the same bits."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks, "even", 32, 8, 1024, whole=False)
    world.x = [0.1 * x for x in world.x]
    idx, weights = world.idx[rank], world.weights[rank]
    for cast in CASTS:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(world.x[rank], idx, MOST, 32, **cast)
        work = world.by_expert(rank, plain(rows))
        out, _, _ = buffer.low_latency_combine(work, idx, weights, handle, use_logfmt=True)
        assert calc_diff(out, world.weighted(rank)) < (9e-4 if cast["use_fp8"] else 1e-5)
        view = buffer.get_next_low_latency_combine_buffer(handle)
        assert view.shape == work.shape and view.dtype == torch.bfloat16
        assert buffer.get_next_low_latency_combine_buffer(handle) is view
        view[:, :, :] = work
        copied, _, _ = buffer.low_latency_combine(
            torch.zeros_like(work), idx, weights, handle, zero_copy=True
        )
        assert torch.equal(copied, out)


@distributed_test(world_size=2)
def test_statistics(ranks: Ranks) -> None:
    """Counts and waits are added to what is there; waits take one row per rank too."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    idx, weights = world.idx[rank], world.weights[rank]
    counts = torch.full((6,), 10, dtype=torch.int32, device=ranks.device)
    for shape in ((2,), (2, 2)):
        waits = torch.zeros(shape, dtype=torch.int64, device=ranks.device)
        before = counts.clone()
        rows, got, handle, _, _ = buffer.low_latency_dispatch(
            world.x[rank], idx, MOST, 12, counts, waits, use_fp8=False
        )
        assert torch.equal(counts, before + got) and got.tolist() == [
            len(e) for e in world.expert_rows(rank)
        ]
        mine, others = (waits, waits[:0]) if waits.dim() == 1 else (waits[rank], waits[1 - rank])
        once = mine.clone()
        assert (once[1 - rank] > 0 or ranks.device.type != "cpu") and not others.any()
        if ranks.device.type == "cpu":  # engine collective: what its statistics say, in nanoseconds
            assert once.tolist() == [int(seconds * 1e9) for seconds in handle.ep.stats().last_wait]
        buffer.low_latency_combine(rows, idx, weights, handle, combine_wait_recv_cost_stats=waits)
        assert bool((mine >= once).all()) and not others.any()
    wrong = [
        (
            {"cumulative_local_expert_recv_stats": counts.long()},
            "cumulative_local_expert_recv_stats",
        ),
        (
            {
                "dispatch_wait_recv_cost_stats": torch.zeros(
                    3, dtype=torch.int64, device=ranks.device
                )
            },
            "dispatch_wait_recv_cost_stats",
        ),
    ]
    for arguments, words in wrong:
        error = error_of(
            lambda arguments=arguments: buffer.low_latency_dispatch(
                world.x[rank], idx, MOST, 12, **arguments
            )
        )
        assert isinstance(error, ValueError) and words in str(error)


@distributed_test(world_size=2)
def test_masks(ranks: Ranks) -> None:
    """Without a rank to leave out masks read as zeros; engine ``collective`` cannot leave one out
    and says so.
    """
    rank, buffer = (
        ranks.rank,
        deep_ep.Buffer(ranks.group, 0, 4096, low_latency_mode=True, enable_shrink=True),
    )
    world = World.of(ranks)
    status = torch.ones(2, dtype=torch.int32, device=ranks.device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENYARD_DEEP_EP_LOW_LATENCY_ENGINE", "collective")
        for _ in range(2):
            status.fill_(1)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0]
            assert (
                not buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True)
                .zero_()
                .any()
            )
            buffer.low_latency_clean_mask_buffer()
            buffer.low_latency_update_mask_buffer(1 - rank)
            buffer.low_latency_update_mask_buffer(1 - rank, mask=False)
            handle = buffer.low_latency_dispatch(world.x[rank], world.idx[rank], MOST, 12)[2]
            assert handle.ep.engine == "collective"
    error = error_of(lambda: buffer.low_latency_update_mask_buffer(1 - rank, True))
    assert isinstance(error, ty.NotSupported) and "'low_latency' can" in str(error)


@distributed_test(world_size=2)
def test_refusals(ranks: Ranks) -> None:
    """Errors name what was wrong, arguments of forks included; afterwards the buffer works."""
    rank, buffer = ranks.rank, deep_ep.Buffer(ranks.group)
    world = World.of(ranks)
    x, idx, weights = world.x[rank], world.idx[rank], world.weights[rank]
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 12, use_fp8=False)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: buffer.low_latency_dispatch(x, idx, 2, 12),
            ValueError,
            "num_max_dispatch_tokens_per_rank is 2",
        ),
        (
            lambda: buffer.low_latency_dispatch(x, idx, MOST, 12, use_nvfp4=True),
            ty.NotSupported,
            "use_nvfp4",
        ),
        (lambda: buffer.low_latency_dispatch(x, idx, MOST, 12, colour=1), TypeError, "colour"),
        (
            lambda: buffer.low_latency_combine(rows, idx, weights, handle, overlap=True),
            ValueError,
            "overlap",
        ),
        (
            lambda: buffer.low_latency_combine(rows, idx, weights, handle, zero_copy=True),
            ValueError,
            "next_low_latency",
        ),
        (
            lambda: buffer.low_latency_combine(rows, idx, weights, tuple(handle)[1:]),
            ValueError,
            "handle has 4",
        ),
        (
            lambda: buffer.low_latency_dispatch(
                x, idx, MOST, 12, async_finish=True, return_recv_hook=True
            ),
            ValueError,
            "exclude each other",
        ),
    ]
    for call, kind, words in wrong:
        error = error_of(call)
        assert isinstance(error, kind) and words in str(error), (words, error)
    again = buffer.low_latency_dispatch(
        x, idx, MOST, 12, use_fp8=False, use_nvfp4=False, x_global_scale=None
    )
    check_blocks(world, rank, again[0], again[1], again[2])
    work = world.by_expert(rank, rows)
    out = buffer.low_latency_combine(
        work, idx, weights, handle, overlap=False, packed_recv_count=None, num_sms=3
    )[0]
    assert torch.equal(out.float(), world.weighted(rank))
