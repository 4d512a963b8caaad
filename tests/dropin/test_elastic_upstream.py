"""The checks of DeepEP's own ``tests/elastic/test_ep.py`` (V2.1) and ``tests/ep/test_ep.py`` (V2.5)
on CPU ranks: modes they run, bit for bit, with references of our own in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from deep_ep_world import from_fp8, to_fp8
from elastic_calls_of import KINDS, MOST, Known, made, up, world_of
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

PICKS = 3


@dataclass(frozen=True)
class Mode:
    copies: bool
    alignment: int
    fp8: bool
    num_bias: int
    waits: bool
    later: bool
    allocates: bool
    exact: bool
    defers: bool = False


def modes(kind: Any) -> Iterator[Mode]:
    """As the two programs walk through them."""
    newer = kind is not KINDS[0]
    copies = (False,) if newer else (True, False)
    for copy, alignment, fp8, num_bias in product(copies, (128, 1), (True, False), (0, 1, 2)):
        for number, (waits, later) in enumerate(product((False, True), (False, True))):
            for allocates in (True,) if waits else (False, True):
                exact = bool((number + num_bias) % 2)
                defers = newer and later and fp8
                yield Mode(copy, alignment, fp8, num_bias, waits, later, allocates, exact, defers)


def launch(buffer: Any, name: str, mode: Mode, **arguments: Any) -> tuple[Any, ...]:
    """One call, waited for as the mode says: all results but the event."""
    if mode.waits:
        arguments["previous_event"] = buffer.capture()
    arguments["async_with_compute_stream"] = mode.later
    arguments["allocate_on_comm_stream"] = mode.allocates
    if mode.defers:
        event = getattr(buffer, name)(defer_epilogue=True, **arguments)
        result = event.current_stream_wait()
        assert event.current_stream_wait() is None
        return result
    *results, event = getattr(buffer, name)(**arguments)
    assert (event.event is not None) is mode.later
    if mode.later:
        event.current_stream_wait()
    return tuple(results)


class Data:
    """What a rank must get, and what its experts answer: any numbers, known to every rank."""

    def __init__(self, world: Known, rank: int) -> None:
        self.world, self.rank = world, rank
        self.picks = [self._of(source) for source in range(world.size)]
        self.rows, self.counts, self.prefix = (
            world.rows[rank],
            world.counts(rank),
            world.prefix(rank),
        )
        self.idx, self.weights = world.local_idx(rank), world.local_weights(rank)
        self.sent = {False: world.x, True: [to_fp8(x) for x in world.x]}
        self.x = world.take(rank, world.x)
        parts = (
            world.take(rank, [pair[part].view(torch.uint8) for pair in self.sent[True]])
            for part in (0, 1)
        )
        self.fp8 = tuple(parts)
        self.weighted = torch.where(world.idx[rank] < 0, 0.0, world.weights[rank])
        self.answers = [self.summed(rank, *row) for row in self.rows]
        self.answers_by_pick = [self.on(rank, *row).bfloat16() for row in self.rows]
        self.total = torch.zeros(len(world.idx[rank]), world.hidden, device=world.device)
        for token in range(len(self.total)):
            for peer in world.ranks_of(rank, token):
                self.total[token] += self.summed(peer, rank, token).float()

    def _of(self, source: int) -> Tensor:
        random = torch.Generator().manual_seed(source + 1)
        shape = (*self.world.idx[source].shape, self.world.hidden)
        return torch.randn(shape, generator=random).bfloat16().to(self.world.device)

    def on(self, rank: int, source: int, token: int) -> Tensor:
        """Float32 rows ``[K, H]`` of the picks that ``rank`` holds, zeros elsewhere."""
        mine = self.world.experts_of(rank)
        idx = self.world.idx[source][token]
        here = (idx >= mine.start) & (idx < mine.stop)
        return torch.where(here.unsqueeze(1), self.picks[source][token].float(), 0.0)

    def summed(self, rank: int, source: int, token: int) -> Tensor:
        """Their sum in pick order, rounded once."""
        total = torch.zeros(self.world.hidden, device=self.world.device)
        for row in self.on(rank, source, token):
            total += row
        return total.bfloat16()

    def combined(self, bias: tuple[Tensor, ...]) -> Tensor:
        """Sums over ranks in their order, then bias, rounded once."""
        total = self.total.clone()
        for term in bias:
            total += term.float()
        return total.bfloat16()


def first_rows(value: Any, count: int) -> Any:
    given: Any = value
    if isinstance(value, tuple):
        return tuple(part[:count] for part in given)
    return given[:count]


def plain(x: Any) -> Tensor:
    given: Any = x
    return from_fp8(*given) if isinstance(x, tuple) else given


def check_plain(data: Data, mode: Mode, results: Any) -> None:
    """Order, rows, ids and weights of rows per rank."""
    x, idx, weights = (first_rows(each, len(data.rows)) for each in results[:3])
    if mode.fp8:
        for part, want in zip(x, data.fp8, strict=True):
            assert torch.equal(part.contiguous().view(torch.uint8), want)
    else:
        assert torch.equal(x, data.x)
    assert torch.equal(idx, data.idx) and torch.equal(weights, data.weights)
    sources = results[3].recv_src_metadata[: len(data.rows), 0]
    assert sources.tolist() == [source * MOST + token for source, token in data.rows]


def check_expanded(data: Data, mode: Mode, results: Any, cached: Any) -> None:
    """Every copy of a token, its weight, and zeros on padding."""
    x, _, weights, handle = results
    slots = handle.recv_src_metadata[: len(data.rows), 2:]
    assert torch.equal(slots >= 0, data.idx >= 0)
    token, pick = (slots >= 0).nonzero(as_tuple=True)
    there, used = plain(x), slots[token, pick].long()
    assert len(used.unique()) == len(used)
    want = data.x
    if mode.fp8:
        want = from_fp8(data.fp8[0].view(torch.float8_e4m3fn), data.fp8[1].view(torch.float32))
    assert torch.equal(there[used], want[token])
    assert torch.equal(weights[used], data.weights[token, pick])
    again = plain(cached[0])
    assert torch.equal(again[used], there[used]) and torch.equal(cached[2][used], weights[used])
    for end in handle.psum_num_recv_tokens_per_expert.tolist():
        assert not again[end : up(end, mode.alignment)].any()
        assert not cached[2][end : up(end, mode.alignment)].any()


def check_handles(data: Data, mode: Mode, handles: tuple[Any, Any, Any]) -> None:
    """Copies, counts and prefix sums."""
    handle, cached, expanded = handles
    idx = data.world.idx[data.rank]
    assert (idx.data_ptr() != handle.topk_idx.data_ptr()) is mode.copies
    assert handle.topk_idx.data_ptr() == cached.topk_idx.data_ptr()
    assert torch.equal(handle.dst_buffer_slot_idx, cached.dst_buffer_slot_idx)
    aligned = [up(count, mode.alignment) for count in data.counts]
    assert handle.num_recv_tokens_per_expert_list == (aligned if mode.exact else [])
    ends = [0, *handle.psum_num_recv_tokens_per_expert.tolist()]
    own = [0, *expanded.psum_num_recv_tokens_per_expert.tolist()]
    for expert, count in enumerate(data.counts):
        assert ends[expert + 1] - ends[expert] == aligned[expert]
        assert own[expert + 1] - up(own[expert], mode.alignment) == count
    for each in handles:
        assert each.psum_num_recv_tokens_per_scaleup_rank.tolist() == data.prefix
    most = MOST * data.world.size
    assert len(expanded.recv_src_metadata) == (len(data.rows) if mode.exact else most)


def check_combined(
    buffer: Any, data: Data, mode: Mode, handles: tuple[Any, Any], weights: tuple[Any, Any]
) -> None:
    """Both ways to combine, bit for bit, with as many terms of bias as the mode has."""
    world, (handle, expanded) = data.world, handles
    terms = tuple(world.x[data.rank].flip(number) for number in range(mode.num_bias))
    bias = (None, terms[0] if terms else None, terms)[mode.num_bias]
    want, num_rows = data.combined(terms), len(data.rows)
    junk: Any = {"fill_value": 7.0, "dtype": torch.bfloat16, "device": world.device}
    x = torch.full((len(weights[0]), world.hidden), **junk)
    by_expert = torch.full((len(weights[1]) + 1, world.hidden), **junk)
    if num_rows:
        x[:num_rows] = torch.stack(data.answers)
        slots = expanded.recv_src_metadata[:num_rows, 2:].flatten().long()
        by_expert[slots] = torch.cat(data.answers_by_pick)  # -1: one row more
    given = ((x, handle, weights[0]), (by_expert[:-1], expanded, weights[1]))
    for value, known, reduce in given:
        arguments = {"x": value, "handle": known, "topk_weights": reduce, "bias": bias}
        combined, reduced = launch(buffer, "combine", mode, **arguments)
        assert torch.equal(combined, want)
        assert torch.equal(reduced, data.weighted)


def check_mode(buffer: Any, data: Data, mode: Mode, how: dict[str, int]) -> None:
    """All calls of one mode."""
    world, rank = data.world, data.rank
    sent = data.sent[mode.fp8][rank]
    fresh = {
        "x": sent,
        "topk_idx": world.idx[rank],
        "topk_weights": world.weights[rank],
        "num_experts": world.num_experts,
        "num_max_tokens_per_rank": MOST,
        "expert_alignment": mode.alignment,
        "do_cpu_sync": mode.exact,
        "do_handle_copy": mode.copies,
        **how,
    }
    by_expert = {"do_expand": True, "use_tma_aligned_col_major_sf": True}
    got = launch(buffer, "dispatch", mode, **fresh)
    expanded = launch(buffer, "dispatch", mode, **fresh, **by_expert)
    known = {"x": sent, **how}
    cached = launch(buffer, "dispatch", mode, **known, handle=got[3])
    padded = {"topk_weights": world.weights[rank], "do_zero_padding": True, **by_expert}
    again = launch(buffer, "dispatch", mode, **known, **padded, handle=expanded[3])
    check_plain(data, mode, got)
    check_plain(data, mode, (cached[0], cached[1], got[2], cached[3]))
    check_expanded(data, mode, expanded, again)
    check_handles(data, mode, (got[3], cached[3], expanded[3]))
    check_combined(buffer, data, mode, (got[3], expanded[3]), (got[2], expanded[2]))
    stats = torch.zeros(len(data.counts), dtype=torch.int32, device=world.device)
    fresh["cumulative_local_expert_recv_stats"] = stats
    check_plain(data, mode, launch(buffer, "dispatch", mode, **fresh))
    assert stats.tolist() == data.counts


SHARES = {2: (0, 5, 12, 17), 3: (3, 8, 11, 14), 8: (6, 19)}
if SOAK == 1:
    SHARES[3] += SHARES.pop(8)
"""Modes by their number modulo 20: half of them, each at one number of ranks. What a mode switches
on stands for itself."""


@distributed_test(world_size=tuple(SHARES))
def test_programs_of_deep_ep(ranks: Ranks) -> None:
    for kind in KINDS:
        data = Data(world_of(ranks, "few", whole=False, num_experts=24), ranks.rank)
        buffer = made(ranks, kind, explicitly_destroy=True)
        sms = buffer.get_theoretical_num_sms(24, PICKS)
        how = {"num_sms": sms, "num_qps": buffer.get_theoretical_num_qps(sms)}
        assert how["num_qps"] <= buffer.num_allocated_qps
        for number, mode in enumerate(modes(kind)):
            if number % 20 in SHARES[ranks.world_size]:
                check_mode(buffer, data, mode, how)
        buffer.barrier(with_cpu_sync=True)
        buffer.destroy()
