"""DeepEP's V2 buffers: what they tell of themselves, events, and what they do not offer."""

from __future__ import annotations

import inspect
import weakref
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import elastic_cost
import tokenyard as ty
from elastic_calls_of import KINDS, fresh, made, world_of
from nvlink_pool import without_devices
from tokenyard import deep_ep
from tokenyard.deep_ep import elastic_calls, elastic_facts, natives
from tokenyard.deep_ep.elastic import ElasticBuffer
from tokenyard.deep_ep.elastic_facts import Domains
from tokenyard.deep_ep.ep_buffer import EPBuffer
from tokenyard.deep_ep.events import EventHandle, EventOverlap
from tokenyard.deep_ep.inputs import Asked
from tokenyard.deep_ep.natives import TIMEOUT_VARIABLE
from tokenyard.engines import failures
from tokenyard.testing import Ranks, distributed_test
from tokenyard.topology import HOST_VARIABLE, Topology

pytestmark = without_devices

FIRST = ["group", "num_bytes"]
SIZED = ["num_max_tokens_per_rank", "hidden", "num_topk", "use_fp8_dispatch"]
LAST = ["num_allocated_qps", "num_cpu_timeout_secs", "num_gpu_timeout_secs", "explicitly_destroy"]
MODES = [
    "deterministic",
    "allow_hybrid_mode",
    "allow_multiple_reduction",
    "prefer_overlap_with_compute",
    "sl_idx",
]
ROUTED = [
    "x",
    "topk_idx",
    "topk_weights",
    "cumulative_local_expert_recv_stats",
    "num_experts",
    "num_max_tokens_per_rank",
    "expert_alignment",
    "num_sms",
    "num_qps",
    "previous_event",
]
STREAMS = ["async_with_compute_stream", "allocate_on_comm_stream"]
HANDLED = [
    "handle",
    "do_handle_copy",
    "do_cpu_sync",
    "do_expand",
    "do_zero_padding",
    "use_tma_aligned_col_major_sf",
]
EPILOGUE = "previous_event_before_epilogue"
SUMMED = ["x", "handle", "topk_weights", "bias", "num_sms", "num_qps", "previous_event"]

SIGNATURES = {
    (ElasticBuffer, "__init__"): [*FIRST, "num_cpu_bytes", *SIZED, *MODES, *LAST],
    (ElasticBuffer, "dispatch"): [*ROUTED, EPILOGUE, *STREAMS, *HANDLED],
    (ElasticBuffer, "combine"): [*SUMMED, EPILOGUE, *STREAMS],
    (ElasticBuffer, "barrier"): ["use_comm_stream", "with_cpu_sync", "sequential"],
    (EPBuffer, "__init__"): [
        *FIRST,
        *SIZED,
        "lb_allocation_plan_or_num_bytes",
        *MODES,
        *LAST,
    ],
    (EPBuffer, "dispatch"): [*ROUTED, *STREAMS, *HANDLED, "defer_epilogue"],
    (EPBuffer, "combine"): [*SUMMED, *STREAMS, "defer_epilogue"],
}
"""As in DeepEP's sources, in its order."""


@pytest.mark.parametrize(("kind", "name"), SIGNATURES)
def test_signatures(kind: Any, name: str) -> None:
    names = list(inspect.signature(getattr(kind, name)).parameters)
    assert names[1:] == SIGNATURES[kind, name]


DEFAULTS = [
    (ElasticBuffer.dispatch, "do_handle_copy", True),
    (EPBuffer.dispatch, "do_handle_copy", False),
    (ElasticBuffer.dispatch, "do_cpu_sync", None),
    (ElasticBuffer.__init__, "sl_idx", 3),
    (EPBuffer.__init__, "sl_idx", None),
    (ElasticBuffer.__init__, "num_cpu_timeout_secs", 300),
    (EPBuffer.__init__, "num_gpu_timeout_secs", 100),
    (EPBuffer.__init__, "explicitly_destroy", False),
]


@pytest.mark.parametrize(("function", "name", "value"), DEFAULTS)
def test_defaults(function: Any, name: str, value: Any) -> None:
    default = inspect.signature(function).parameters[name].default
    assert default == value and type(default) is type(value)


# Multiprocessors


def test_theoretical_sms_of_every_gate() -> None:
    """No gate, domain or bandwidth divides by zero; the number is even, and a GPU has as many."""
    device = elastic_facts._device_sms()  # pyright: ignore[reportPrivateUsage]
    domains = [Domains(1, 1), Domains(1, 2), Domains(1, 8), Domains(2, 8), Domains(8, 1)]
    gates = product((1, 2, 7, 64, 256), (1, 2, 8, 300))
    rates = [elastic_facts.V2_1.rates, (1e-9, 1e9, 1e-9, 1e9), (1e9, 1e-9, 1e9, 1e-9)]
    for (experts, picks), physical, rate in product(gates, domains, rates):
        one = Domains(1, physical.scaleout * physical.scaleup)
        both = elastic_facts.V2_1, elastic_facts.V2_5
        for logical, overlaps, how in product({physical, one}, (True, False), both):
            number = elastic_facts.theoretical_num_sms(
                experts, picks, physical, logical, rate, overlaps, how
            )
            assert 4 <= number <= device and number % 2 == 0
            assert overlaps or number >= min(64, device // 2 * 2)


def test_theoretical_sms_as_deep_ep_counts() -> None:
    """256 experts, 8 picks, ranks on NVLink of 450 GB/s: what the formulas of V2.1 and V2.5 give,
    and with 16 ranks as two hosts of 8 on a network of 50 GB/s.
    """
    one, hosts = [Domains(1, ranks) for ranks in (2, 4, 8)], Domains(2, 8)
    older, newer = (24, 16, 14, 12), (28, 20, 16, 16)
    for how, wants in ((elastic_facts.V2_1, older), (elastic_facts.V2_5, newer)):
        for domains, want in zip((*one, hosts), wants, strict=True):
            got = elastic_facts.theoretical_num_sms(256, 8, domains, domains, how.rates, True, how)
            assert got == want, (how, domains)


@distributed_test(world_size=1)
def test_theoretical_numbers_of_a_buffer(ranks: Ranks) -> None:
    for kind in KINDS:
        buffer = made(ranks, kind, prefer_overlap_with_compute=False)
        device = elastic_facts._device_sms()  # pyright: ignore[reportPrivateUsage]
        assert buffer.get_theoretical_num_sms(num_experts=256, num_topk=8) == device // 2 * 2
        for bad in ({"num_scaleout_topk": 1}, {"rdma_gbs": -1}, {"num_experts": 0}):
            with pytest.raises(ValueError, match=next(iter(bad))):
                buffer.get_theoretical_num_sms(**{"num_experts": 8, "num_topk": 2, **bad})
        assert buffer.get_theoretical_num_qps(4) == 65 and buffer.num_allocated_qps == 129
        assert buffer.get_theoretical_num_qps(20) == 129
        buffer.destroy()
        direct = made(ranks, kind, allow_hybrid_mode=False, num_allocated_qps=7)
        assert direct.num_allocated_qps == 7 == direct.get_theoretical_num_qps(20)
        direct.destroy()


@distributed_test(world_size=1)
def test_what_is_measured_is_the_same_call(ranks: Ranks) -> None:
    """Through the layer and native calls of ``elastic_cost`` bring the same rows."""
    for kind in KINDS:
        calls = elastic_cost.Bench(ranks.group, kind).calls()
        for name, (layer, native) in calls.items():
            assert native is not None
            known = native()
            rows = known if isinstance(known, torch.Tensor) else known.x
            assert torch.equal(layer()[0], rows), name


# Construction


@distributed_test(world_size=4)
def test_domains(ranks: Ranks) -> None:
    """Two hosts of two ranks; tokens per scale-up rank add over hosts. Hosts that are no grid."""
    patch = pytest.MonkeyPatch()
    patch.setenv(HOST_VARIABLE, "ab"[ranks.rank // 2])
    world = world_of(ranks, "uneven")
    for kind, hybrid in product(KINDS, (True, False)):
        buffer = made(ranks, kind, allow_hybrid_mode=hybrid)
        assert buffer.get_physical_domain_size() == (2, 2)
        assert (buffer.num_rdma_ranks, buffer.num_nvlink_ranks) == (2, 2)
        assert buffer.get_logical_domain_size() == ((2, 2) if hybrid else (1, 4))
        place = buffer.scaleout_rank_idx, buffer.scaleup_rank_idx
        assert place == (divmod(ranks.rank, 2) if hybrid else (0, ranks.rank))
        for expands, exact in product((True, False), (True, False)):
            handle = fresh(buffer, world, do_expand=expands, do_cpu_sync=exact)[3]
            prefix = world.prefix(ranks.rank)
            counts = [after - before for before, after in zip([0, *prefix], prefix, strict=False)]
            both = [counts[0] + counts[2], sum(counts)] if hybrid else prefix
            assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == both
        buffer.destroy()
    patch.setenv(HOST_VARIABLE, "abba"[ranks.rank])
    buffer = made(ranks, KINDS[0])
    assert buffer.get_physical_domain_size() == (4, 1)
    assert buffer.get_logical_domain_size() == (1, 4)
    buffer.destroy()
    patch.undo()


def test_domains_of_grids() -> None:
    assert elastic_facts.domains_of(Topology(1, 8), 8, True) == (Domains(1, 8), Domains(1, 8))
    assert elastic_facts.domains_of(None, 3, True) == (Domains(3, 1), Domains(1, 3))


@distributed_test(world_size=2)
def test_attributes(ranks: Ranks) -> None:
    patch = pytest.MonkeyPatch()
    for kind in KINDS:
        patch.delenv(TIMEOUT_VARIABLE, raising=False)
        buffer = made(ranks, kind, deterministic=True, num_gpu_timeout_secs=1800, num_topk=0)
        assert buffer.group is ranks.group and buffer.num_ranks == 2
        assert buffer.rank_idx == ranks.rank and buffer.num_max_tokens_per_rank == 64
        assert buffer.deterministic and buffer.allow_multiple_reduction
        assert buffer.num_bytes == kind.get_buffer_size_hint(ranks.group, 64, 128) > 0
        with pytest.raises(ValueError, match=r"num_max_tokens_per_rank \(0\)"):
            kind.get_buffer_size_hint(ranks.group, 0, 128)
        for most in (1, 64, 4095, 8192, 1 << 20):  # see TOKEN_UNIT
            for hidden in (128, 7168):
                less, more = (
                    kind.get_buffer_size_hint(ranks.group, m, hidden) for m in (most, most + 1)
                )
                assert less < more
        assert weakref.ref(buffer)() is buffer and not buffer.explicitly_destroy
        handle = fresh(buffer, world_of(ranks, "few"))[3]
        assert handle.ep.config.timeout == 1800
        assert handle.token_metadata_at_forward is None and handle.channel_linked_list is None
        assert buffer.runtime.get_comm_stream() is not None and buffer.get_comm_stream() is not None
        assert isinstance(kind.capture(), EventHandle)
        buffer.destroy()
        buffer.destroy()
        assert buffer.runtime is None
        patch.setenv(TIMEOUT_VARIABLE, "77")
        buffer = made(ranks, kind)
        assert fresh(buffer, world_of(ranks, "few"))[3].ep.config.timeout == 77
        assert len(buffer._natives._normal) == 1  # pyright: ignore[reportPrivateUsage]
        buffer.barrier()
        name = next(iter(inspect.signature(buffer.barrier).parameters))
        with pytest.raises(ValueError, match=name):
            buffer.barrier(5)
        buffer.destroy()
    patch.undo()


@distributed_test(world_size=2)
def test_memory(ranks: Ranks) -> None:
    """What native objects are made with: enough for all rows, but not more than num_bytes says."""
    asked: list[Any] = []
    real = natives.ExpertParallel

    def make(*given: Any, **named: Any) -> Any:
        asked.append((named["max_tokens_per_rank"], named["buffer_bytes"]))
        return real(*given, **named)

    patch, world, mib = pytest.MonkeyPatch(), world_of(ranks, "few"), 1 << 20
    patch.setattr(natives, "ExpertParallel", make)
    for options, want in (
        ({}, [(64, 32 * mib), (16, 32 * mib)]),
        ({"num_max_tokens_per_rank": 1 << 17}, [(1 << 17, 128 * mib), (16, 32 * mib)]),
        (
            {"num_max_tokens_per_rank": 1 << 16, "num_bytes": 48 * mib},
            [(1 << 16, 48 * mib), (16, 32 * mib)],
        ),
        ({"num_max_tokens_per_rank": 0, "num_bytes": 0}, [(128, None), (16, 32 * mib)]),
    ):
        asked.clear()
        buffer = made(ranks, KINDS[0], **options)
        fresh(buffer, world, num_max_tokens_per_rank=32)
        fresh(buffer, world, num_max_tokens_per_rank=16, do_cpu_sync=False)
        assert asked == want
        buffer.destroy()
    patch.undo()


@distributed_test(world_size=1)
def test_in_the_capture_of_a_graph(ranks: Ranks) -> None:
    """Neither a buffer nor its objects can be made there."""
    for kind in KINDS:
        buffer, patch = made(ranks, kind), pytest.MonkeyPatch()
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        try:
            with pytest.raises(RuntimeError, match=f"make {kind.__name__} on every rank before"):
                made(ranks, kind)
            with pytest.raises(RuntimeError, match="before the capture"):
                fresh(buffer, world_of(ranks, "few"))
        finally:
            patch.undo()
        buffer.destroy()


@distributed_test(world_size=1)
def test_what_to_raise_for_a_slow_rank(ranks: Ranks) -> None:
    """Errors name what callers of each buffer can set."""

    def slow() -> None:
        raise ty.PeerTimeout(failures.ADVICE, 1)

    x, v1 = torch.zeros(1), deep_ep.Buffer(ranks.group)
    buffers = {v1: f"raise {TIMEOUT_VARIABLE}."}
    for kind in KINDS:
        buffers[made(ranks, kind)] = f"raise num_gpu_timeout_secs of {kind.__name__}."
    for buffer, want in buffers.items():
        with pytest.raises(ty.PeerTimeout) as caught:
            buffer._streams.run(slow, (), x, None, False)  # pyright: ignore[reportPrivateUsage]
        assert want in str(caught.value), str(caught.value)
        buffer.destroy()


def test_a_group_is_needed() -> None:
    assert not dist.is_initialized()
    for kind in KINDS:
        with pytest.raises(ValueError, match="group"):
            kind(None, 8)
        with pytest.raises(ValueError, match="group"):
            kind.get_buffer_size_hint("world", 8, 8)


MISSING = [
    "get_engram_storage_size_hint",
    "engram_write",
    "engram_fetch",
    "get_pp_buffer_size_hint",
    "pp_set_config",
    "pp_send",
    "pp_recv",
    "get_agrs_num_max_session_bytes",
    "get_agrs_buffer_size_hint",
    "create_agrs_session",
    "destroy_agrs_session",
    "agrs_new_session",
    "agrs_set_config",
    "agrs_get_inplace_tensor",
    "all_gather",
]


@pytest.mark.parametrize("name", MISSING)
def test_what_is_not_offered_says_so(name: str) -> None:
    with pytest.raises(ty.NotSupported, match=rf"ElasticBuffer\.{name}\(\)"):
        getattr(ElasticBuffer, name)(1, 2)
    assert not hasattr(EPBuffer, name)


# Events


class Point(EventHandle):
    """Says who waits for it."""

    def __init__(self, log: list[str], name: str) -> None:
        def wait(stream: Any = None) -> None:
            log.append(name if stream is None else f"{stream}: {name}")

        self._events = (SimpleNamespace(wait=wait),)


def check_when(previous: Any, before: Any, later: Any, allocate: Any) -> tuple[bool, Any]:
    asked = Asked(
        previous_event=previous,
        previous_event_before_epilogue=before,
        async_with_compute_stream=later,
        allocate_on_comm_stream=allocate,
    )
    return elastic_calls.check_when(asked)


def test_what_a_call_waits_for() -> None:
    log: list[str] = []
    first, second = Point(log, "first"), Point(log, "second")
    for given in (None, EventOverlap()):
        assert check_when(given, None, True, True) == (True, None)
    for event in (first, EventOverlap(first)):
        later, after = check_when(event, None, False, None)
        assert not later and after is not None and after.event is first
    later, after = check_when(first, EventOverlap(second), 1, False)
    assert later and after is not None and after.event is not None
    after.event.wait_on("comm")
    after.current_stream_wait()
    assert log == ["comm: first", "comm: second", "first", "second"]


def test_what_comes_before_an_epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not stand for the stream as it is now."""
    log: list[str] = []
    stream = SimpleNamespace(record_event=lambda: Point(log, "now")._events[0])  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    _, after = check_when(None, Point(log, "second"), True, False)
    assert after is not None
    after.current_stream_wait()
    assert log == ["now", "second"]


def test_hooks_of_events() -> None:
    """The next wait calls a hook, once, and returns what it returns."""
    log: list[str] = []
    event = EventOverlap(Point(log, "waited"))
    assert event.wait() is None and event.hook_after_wait is None
    event.register_hook_after_wait(lambda: log.append("hook") or 7)
    with pytest.raises(ValueError, match="has a hook already"):
        event.register_hook_after_wait(int)
    assert event.current_stream_wait() == 7 and event.current_stream_wait() is None
    assert log == ["waited", "waited", "hook", "waited"]
    with event(release_handle=True) as same:
        assert same is event and event.event is not None
    assert event.event is None and log[-2:] == ["waited", "waited"]
    with event:
        pass
    with pytest.raises(AssertionError, match="not asynchronous"):
        event.current_stream_wait()
    held = EventOverlap(Point(log, "held"))
    with held:
        pass
    assert held.event is not None and held.current_stream_wait(release_handle=True) is None
    assert held.event is None
