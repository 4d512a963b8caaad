"""``tokenyard plan``: from bytes and rates to times, the engines' sizes, rates from flags and
records.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenyard.engines.known import COLLECTIVE, LOW_LATENCY
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.engines.tuning import HOP_US, most_channels, peer_tuning
from tokenyard.engines.workspace import NetRing, PeerWorkspace
from tokenyard.header import COUNTS
from tokenyard.planner.model import (
    LAUNCH_US,
    Terms,
    collective_call,
    flat_call,
    low_latency_call,
    nvlink_combine,
    nvlink_dispatch,
    nvlink_in_place,
    twolevel_combine,
    twolevel_dispatch,
)
from tokenyard.planner.prediction import (
    COMBINE,
    DISPATCH,
    FLAT,
    IN_PLACE,
    MOST_DECODED,
    ONCE,
    plan,
    scaling,
)
from tokenyard.planner.rates import HOPPER, LEAST, MOST, CallRates
from tokenyard.planner.record import rates_from, read
from tokenyard.planner.sizes import Ring, Sizes, nvlink_sizes, row_layouts, twolevel_sizes
from tokenyard.planner.traffic import Flow, traffic
from tokenyard.planner.workload import Dtype, Workload
from tokenyard.topology import Topology, num_tasks

RECORD = Path(__file__).parents[2] / "docs" / "benchmarks" / "nvlink-2xh200-20261122.json"
ROUND = replace(
    HOPPER,
    dispatch=CallRates(10.0, 100.0, 2.0),
    in_place=CallRates(10.0, 100.0, 2.0),
    collective=CallRates(50.0, 10.0),
    copy_gbs=1000.0,
    nic_gbs=5.0,
    latency_us=3.0,
    put_us=0.5,
)


def layer(
    nodes: int = 1, gpus: int = 8, tokens: int = 4096, dtype: Dtype = "bf16", sms: int = 132
) -> Workload:
    return Workload(
        nodes=nodes,
        gpus_per_node=gpus,
        tokens=tokens,
        hidden=7168,
        experts=256,
        topk=8,
        dtype=dtype,
        sms=sms,
    )


# Times worked out by hand


def test_a_dispatch_by_hand() -> None:
    """2 GPUs, an expert each, top-1, 1000 tokens of 1000 channels: 500 rows of 2000 bytes are 1 MB,
    so 10 us at 100 GB/s.

    50 senders of 2 GB/s take 10 us as well. 10 rings of 4 slots are left with chunks of 2 rows at
    the end, half of them this rank's own: 10 rows are 20 kB, so 0.02 us at 1000 GB/s.
    """
    work = Workload(nodes=1, gpus_per_node=2, tokens=1000, hidden=1000, experts=2, topk=1)
    ring = Ring(
        name="NVLink", count=10, num_bytes=8000, slots=4, chunk=2, back_slots=4, back_chunk=1
    )
    sizes = Sizes(
        channels=5, senders=50, writers=100, reducers=5, rings=(ring,), symmetric_bytes=80000
    )
    rows = traffic(work, "uniform")
    terms = nvlink_dispatch(work, rows, sizes, ROUND)
    assert terms == Terms(nvlink=10.0, programs=10.0, latency=10.0, fill=0.02)
    assert terms.us == pytest.approx(10 + math.sqrt(200) + 0.02)
    # In place: 100 writers write as many rows that stay, too, and the knee is sharper.
    in_place = nvlink_in_place(work, rows, sizes, ROUND)
    assert in_place == Terms(nvlink=10.0, programs=10.0, latency=10.0, power=6)
    assert in_place.us == pytest.approx(10 + (2 * 10**6) ** (1 / 6))


def test_a_combine_by_hand() -> None:
    """4 GPUs, an expert each, top-2, 1000 tokens of 2000 bytes: 1500 rows come from others, 3 MB,
    so 30 us at 100 GB/s.

    5 reducers store 1000 results, 2 MB, at 2 GB/s each: 200 us, with two GPUs too. 50 senders of
    2 GB/s take 30 us, of two GPUs (5/6 of the tokens cross) 16.7. Without rings 100 programs read
    and store 9 MB of them, 1 MB that stays, and 2 MB of results: 60 us.
    """
    ring = Ring(
        name="NVLink", count=20, num_bytes=8000, slots=4, chunk=2, back_slots=4, back_chunk=1
    )
    sizes = Sizes(
        channels=5, senders=50, writers=100, reducers=5, rings=(ring,), symmetric_bytes=80000
    )
    rates = replace(ROUND, combine=CallRates(10.0, 100.0, 2.0), results_gbs=2.0)
    found: list[Terms] = []
    for gpus in (2, 4):
        work = Workload(nodes=1, gpus_per_node=gpus, tokens=1000, hidden=1000, experts=4, topk=2)
        found.append(nvlink_combine(work, traffic(work, "uniform"), sizes, rates))
    programs = [math.hypot(200, 2e6 * 5 / 6 / 1e5), math.hypot(200, 30)]
    assert [terms.programs for terms in found] == pytest.approx(programs)
    assert found[1].nvlink == pytest.approx(30.0) and found[1].latency == 10.0
    assert found[1].fill == pytest.approx(15 * 2000 / 1e6)  # the last row of 15 rings
    roomy = replace(sizes, receive_bytes=3_000_001)
    pushed = nvlink_combine(work, traffic(work, "uniform"), roomy, rates)
    assert (pushed.programs, pushed.fill) == (pytest.approx(60.0), 0.0)


def test_two_hops_by_hand() -> None:
    """2 nodes x 2 GPUs, an expert each, top-1, 1000 tokens of 1 kB: half cross the network, half of
    1000 + 1000 are handed on.
    """
    work = Workload(nodes=2, gpus_per_node=2, tokens=1000, hidden=500, experts=4, topk=1)
    rows = traffic(work, "uniform")
    two = collective_call(work, rows, ROUND.collective, work.row_bytes, ROUND)
    assert two == Terms(nvlink=50.0, nic=100.5, latency=106.0, in_turn=True)
    assert two.us == pytest.approx(256.5) and two.bound == "latency/launch"
    one = flat_call(work, rows, ROUND.collective, work.row_bytes, ROUND)
    assert one == Terms(nvlink=25.0, nic=101.0, latency=56.0)
    assert one.us == pytest.approx(56 + math.hypot(25, 101)) and one.bound == "NIC"


def test_two_levels_by_hand() -> None:
    """The same rows of 1000 bytes: 500 put, 500 handed on inside (1000 to the busiest link of 2
    GPUs), a quarter stays each time.

    Programs read 500 rows into staging, 2 x 500 for or from GPUs beside, and 2 x 250 that stay: 2
    MB. That is 100 us for 10 programs of 2 GB/s, and 2 us of memory.
    """
    work = Workload(nodes=2, gpus_per_node=2, tokens=1000, hidden=500, experts=4, topk=1)
    rates = replace(ROUND, turns_gbs=2.0, turns_back_gbs=4.0)
    ring = Ring(name="", count=1, num_bytes=8000, slots=4, chunk=1, back_slots=4, back_chunk=1)
    sizes = Sizes(channels=5, senders=10, reducers=10, rings=(ring, ring), symmetric_bytes=80000)
    rows = traffic(work, "uniform")
    assert (rows.nic.busiest, rows.nvlink.busiest, rows.own.busiest) == (500, 500, 250)
    there, back = (
        twolevel_dispatch(work, rows, sizes, rates),
        twolevel_combine(work, rows, sizes, rates),
    )
    assert (there.programs, back.programs) == (pytest.approx(102), pytest.approx(52))
    assert (there.nvlink, there.nic) == (5.0, 350.0)  # 500 puts of 0.5 us


def test_low_latency_by_hand() -> None:
    """2 nodes x 2 GPUs, an expert each, top-1, 1000 tokens of 1 kB: a quarter goes to each rank, so
    250 rows stay in the node and 500 are put, behind counts; two far ranks get two puts each.
    """
    work = Workload(nodes=2, gpus_per_node=2, tokens=1000, hidden=500, experts=4, topk=1)
    rates = replace(ROUND, low_dispatch=CallRates(8.0, 50.0), low_combine=CallRates(6.0, 25.0))
    rows = traffic(work, "uniform")
    assert low_latency_call("dispatch", work, rows, rates) == Terms(
        nvlink=5.0, nic=102.0, latency=11.0
    )
    assert low_latency_call("combine", work, rows, rates) == Terms(
        nvlink=10.0, nic=102.0, latency=9.0
    )
    alone = replace(work, nodes=1)
    assert low_latency_call("dispatch", alone, traffic(alone, "uniform"), rates).latency == 8.0


def decode_us(nodes: int, gpus: int, tokens: int) -> tuple[float, float]:
    """Dispatch in FP8, combine in BF16."""
    calls = plan(layer(nodes, gpus, tokens), HOPPER, ["fp8"]).calls
    there, back = (call.terms.us for call in calls if call.engine == LOW_LATENCY)
    return there, back


@pytest.mark.parametrize("gpus", [2, 4])
def test_decode_in_a_node_as_recorded(gpus: int) -> None:
    """The records' medians within a fifth."""
    record = json.loads((RECORD.parent / f"low_latency-{gpus}xh200-20261122.json").read_text())
    measured = {
        (row["tokens"], row["what"]): median(row["times"])
        for row in record["rows"]
        if row["who"] == LOW_LATENCY
    }
    for tokens in (1, 8, 32, 64, 128, MOST_DECODED):
        for us, what in zip(decode_us(1, gpus, tokens), (DISPATCH, COMBINE), strict=True):
            assert us == pytest.approx(measured[tokens, what], rel=0.2), (tokens, what)


PUBLISHED = {2: (102, 186), 4: (143, 263), 8: (167, 305)}
"""DeepEP's low-latency kernels (us of dispatch and combine), by nodes of 8 GPUs: aiconfigurator's
data, 128 tokens, H100 with a 400 Gb/s port each."""


@pytest.mark.parametrize("nodes", PUBLISHED)
def test_decode_between_nodes_beside_published_times(nodes: int) -> None:
    """Those send a row per pick, this engine one per rank: with the bytes of picks, the plan is
    within a seventh of them; with its own it is less, by what picks share ranks.
    """
    work = layer(nodes, 8, 128, "fp8")
    rows = traffic(work, "uniform")
    picks = Flow(*[128 * 8 * (nodes - 1) / nodes] * 2)
    for what, measured, own in zip(
        ("dispatch", "combine"), PUBLISHED[nodes], decode_us(nodes, 8, 128), strict=True
    ):
        us = low_latency_call(what, work, replace(rows, flat_nic=picks), HOPPER).us
        assert us == pytest.approx(measured, rel=1 / 7), what
        assert own < us, what


def test_the_largest_limit_has_a_name() -> None:
    names = {
        "nvlink": "NVLink",
        "nic": "NIC",
        "programs": "programs",
        "latency": "latency/launch",
        "fill": "pipeline fill",
    }
    for field, name in names.items():
        terms = Terms(nvlink=1.0, nic=1.0, programs=1.0, latency=1.0, fill=1.0)
        assert replace(terms, **{field: 2.0}).bound == name


# Plans


def sizes_in(found: Any) -> dict[str, float]:
    return {
        f"{call.name} {call.engine} {call.dtype}{' in heap' * call.terms.in_heap}": call.terms.us
        for call in found.calls
    }


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 20000), st.integers(1, 20000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_more_tokens_take_no_less_time(nodes: int, gpus: int, few: int, more: int) -> None:
    """Through rings, and to heaps."""
    less, most = (plan(layer(nodes, gpus, tokens), HOPPER) for tokens in (few, few + more))
    fewer, more_us = sizes_in(less), sizes_in(most)
    both = ("low_latency", f"{DISPATCH} nvlink bf16")
    assert {name for name in fewer if not any(each in name for each in both)} <= more_us.keys()
    for name in fewer.keys() & more_us.keys():
        assert fewer[name] <= more_us[name] * (1 + 1e-9), name


def test_which_engines_are_planned() -> None:
    one, many, single = (plan(layer(*machine), HOPPER) for machine in ((1, 4), (4, 8), (4, 1)))
    assert one.engine == "nvlink" and {call.engine for call in one.calls} == {"nvlink", COLLECTIVE}
    assert {call.name for call in one.calls if call.engine == "nvlink"} == {
        DISPATCH,
        IN_PLACE,
        COMBINE,
    }
    assert many.engine == "twolevel" and {call.engine for call in many.calls} == {
        "twolevel",
        COLLECTIVE,
        FLAT,
    }
    assert {call.engine for call in single.calls} == {"twolevel", COLLECTIVE}  # one way to go only
    few = plan(layer(4, 8, MOST_DECODED), HOPPER)
    assert [call.engine for call in few.calls if call.name == COMBINE] == [
        "twolevel",
        COLLECTIVE,
        FLAT,
        LOW_LATENCY,
        ONCE,
    ]
    assert all(call.dtype == "bf16" for call in many.calls if call.name == COMBINE)
    by_engine = {
        call.engine: call for call in many.calls if call.name == DISPATCH and call.dtype == "fp8"
    }
    assert by_engine["twolevel"].nic == by_engine[COLLECTIVE].nic
    assert by_engine[COLLECTIVE].nic.mean < by_engine[FLAT].nic.mean


def planned(work: Workload) -> dict[tuple[str, str], Terms]:
    calls = plan(work, HOPPER).calls
    return {(call.name, call.dtype): call.terms for call in calls if call.engine == "nvlink"}


@pytest.mark.parametrize(
    ("gpus", "sms", "tokens", "in_heap"),
    [
        (2, 132, 4096, ""), (2, 24, 4096, "bf16"), (2, 24, 1024, ""),
        (4, 132, 4096, "bf16 fp8"), (4, 24, 4096, "bf16 fp8"), (4, 132, 1024, ""),
        (4, 132, 16384, "fp8"),  # BF16 has 850 MB, the heap 805
        (8, 132, 4096, "bf16 fp8"),
    ],
)  # fmt: skip
def test_dispatches_to_heaps(gpus: int, sms: int, tokens: int, in_heap: str) -> None:
    """Large ones, where the engine has a heap that holds a result: as long as in place, and a
    launch."""
    found = planned(layer(gpus=gpus, sms=sms, tokens=tokens))
    for dtype in ("bf16", "fp8"):
        assert found[DISPATCH, dtype].in_heap == (dtype in in_heap)
        if dtype in in_heap:
            in_place = found[IN_PLACE, dtype]
            assert found[DISPATCH, dtype].us == pytest.approx(in_place.us + LAUNCH_US)


def test_combines_that_fit_need_no_rings() -> None:
    """638 MB come back to a rank, and the receive buffer has 537."""
    for tokens, rings in ((4096, False), (16384, True)):
        assert (planned(layer(gpus=4, tokens=tokens))[COMBINE, "bf16"].fill > 0) == rings


def test_sizes_are_the_engines_own() -> None:
    for gpus, sms in ((2, 132), (4, 24), (8, 132)):
        found = nvlink_sizes(layer(gpus=gpus, sms=sms))
        tuning = peer_tuning(sms, Topology(1, gpus), all_sms=sms == 132)
        [ring] = found.rings
        assert (found.channels, found.writers) == (tuning.channels, tuning.num_sms)
        assert ring.count == gpus * tuning.channels
        assert (
            DEFAULT_BUFFER_BYTES - 256 * ring.count
            < ring.count * ring.num_bytes
            <= DEFAULT_BUFFER_BYTES
        )
        there = row_layouts(layer(gpus=gpus, sms=sms))[0]
        # With token, 8 ids and 8 weights, padded to 16 bytes: what crosses.
        assert there.row_bytes == 14336 + 80
        # Whole lines of memory: what it takes in a ring.
        assert ring.slots == ring.num_bytes // (14336 + 128)
        assert (ring.chunk, ring.back_chunk) == (
            min(tuning.dispatch.chunk, ring.slots // 2),
            tuning.send.chunk,
        )


@pytest.mark.parametrize(
    ("nodes", "gpus", "dtype"), [(2, 2, "bf16"), (3, 2, "fp8"), (4, 8, "bf16"), (8, 8, "fp8")]
)
def test_sizes_of_two_levels_are_the_engines_own(nodes: int, gpus: int, dtype: Dtype) -> None:
    """Beside the engine's own layout of its memory, made without any."""
    work = layer(nodes, gpus, dtype=dtype)
    workspace: Any = object.__new__(PeerWorkspace)
    workspace.grid, workspace.header_words = work.grid, COUNTS + -(-256 // work.ranks)
    channels = most_channels(work.grid, 2 * work.hidden, DEFAULT_BUFFER_BYTES)
    workspace.tuning = peer_tuning(132, work.grid, all_sms=True, channels=channels)
    workspace._lay_out(work.ranks, workspace.tuning.channels, DEFAULT_BUFFER_BYTES)
    found = twolevel_sizes(work)
    network, inner = found.rings
    assert found.channels == workspace.tuning.channels
    workers = workspace.tuning.workers(workspace.tuning.dispatch, num_tasks(nodes * gpus, nodes))
    assert found.senders == found.reducers == workers * found.channels
    assert (inner.num_bytes, network.num_bytes) == (workspace.ring_bytes, workspace.net_ring_bytes)
    assert found.symmetric_bytes == workspace.num_bytes
    for row_layout, slots, chunk in zip(
        row_layouts(work),
        (network.slots, network.back_slots),
        (network.chunk, network.back_chunk),
        strict=True,
    ):
        assert workspace.net_ring(row_layout) == (NetRing(slots, chunk))
    assert inner.slots == inner.num_bytes // row_layouts(work)[0].slot_bytes


@pytest.mark.parametrize(("nodes", "sms"), [(2, 24), (128, 24), (128, 132)])
def test_the_number_of_programs_does_not_depend_on_that_of_ranks(nodes: int, sms: int) -> None:
    """Rings are fewer where there are more ranks, so that they hold some rows; each has more
    workers then.
    """
    found = twolevel_sizes(layer(nodes, 8, sms=sms))
    assert 0.5 * sms < found.senders <= sms
    assert found.channels == 1 or all(min(ring.slots, ring.back_slots) >= 7 for ring in found.rings)


def test_a_ring_must_hold_two_rows() -> None:
    """The message gives a size with which there is a plan."""
    for nodes in (1, 4):
        work = replace(layer(nodes, 8), hidden=1 << 23)
        with pytest.raises(
            ValueError, match=r"buffer_bytes \(134217728\) gives .* but 2 rows of .* must fit"
        ) as refusal:
            plan(work, HOPPER)
        plan(replace(work, buffer_bytes=int(str(refusal.value).split()[-1])), HOPPER)


def test_one_multiprocessor_serves_many_ranks() -> None:
    for work in (layer(gpus=133), layer(gpus=8, sms=1)):
        assert nvlink_sizes(work).channels == 1
        assert all(call.terms.us > 0 for call in plan(work, HOPPER).calls)


def test_machines_grow_to_1024_gpus() -> None:
    found, refused = scaling(layer(gpus=8), HOPPER)
    assert not refused
    assert [each.workload.ranks for each in found] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert {each.workload.experts for each in found} == {1024}
    assert [each.workload.nodes for each in scaling(layer(gpus=16), HOPPER)[0]][-1] == 64


def test_machines_that_do_not_fit_say_why() -> None:
    """Rings have only as many channels as hold some rows."""
    found, refused = scaling(replace(layer(gpus=8), hidden=200_000), HOPPER)
    assert [each.workload.ranks for each in found] == [8, 16, 32, 64]
    assert list(refused) == [128, 256, 512, 1024]
    assert "rows of 400128 bytes must fit" in str(refused[128])
    with pytest.raises(ValueError, match="buffer_bytes"):
        scaling(replace(layer(gpus=8), hidden=1 << 30), HOPPER)


# Rates


def test_links_that_are_given() -> None:
    given = HOPPER.with_links(nvlink=182.0, nic=90.0, latency=2.0)
    scale = 182 / HOPPER.dispatch.link_gbs
    assert given.dispatch.link_gbs == pytest.approx(182.0)
    for call in ("combine", COLLECTIVE, "low_combine"):
        rates: CallRates = getattr(HOPPER, call)
        assert getattr(given, call).link_gbs == pytest.approx(scale * rates.link_gbs)
    assert (given.nic_gbs, given.latency_us) == (
        90.0,
        2.0,
    ) and given.dispatch.fixed_us == HOPPER.dispatch.fixed_us
    assert given.source.endswith("given: nvlink 182, nic 90, latency 2")
    assert HOPPER.with_links() == HOPPER
    work = layer(4, 8)
    faster = sizes_in(plan(work, HOPPER.with_links(nic=90.0)))
    assert (
        faster["dispatch twolevel bf16"]
        < 0.7 * sizes_in(plan(work, HOPPER))["dispatch twolevel bf16"]
    )


@pytest.mark.parametrize("link", ["nvlink", "nic", "latency"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, 1e308, 1e-308])
def test_a_rate_must_be_positive_and_finite(link: str, value: float) -> None:
    with pytest.raises(
        ValueError, match=rf"{link} \({re.escape(str(value))}\) must be from 1e-06 to 1e\+09"
    ):
        HOPPER.with_links(**{link: value})


@pytest.mark.parametrize("value", [LEAST, MOST])
def test_times_are_finite_whatever_the_rates(value: float) -> None:
    for link in ("nvlink", "nic", "latency"):
        assert all(
            math.isfinite(us)
            for us in sizes_in(plan(layer(4, 8), HOPPER.with_links(**{link: value}))).values()
        )


def test_a_sweep_of_the_bench_is_read() -> None:
    points = read(RECORD.with_name("collective-4xh200-20261121.json"))
    assert [(point.call, point.work.tokens, point.work.ranks) for point in points] == [
        (call, tokens, 4)
        for tokens in (128, 1024, 4096)
        for call in ("collective", "collective_back")
    ]
    assert points[0].us == pytest.approx(299.024, abs=0.001)


def test_rings_of_a_record_are_read() -> None:
    """The section of bounded memory has the same call with two sizes of rings."""
    points = read(RECORD.with_name("nvlink-4xh200-20261122.json"))
    sizes = {
        point.work.buffer_bytes
        for point in points
        if point.call == "combine" and point.work.tokens > 16384
    }
    assert len(sizes) == 2 and min(sizes) == DEFAULT_BUFFER_BYTES


@pytest.mark.parametrize("name", ["nvlink-4xh200-20261122", "collective-4xh200-20261121"])
def test_both_schemas_of_records_are_read(tmp_path: Path, name: str) -> None:
    """The second has a case where the first has a job, and SMs and rings in it."""
    path = RECORD.with_name(f"{name}.json")
    record = json.loads(path.read_text())
    for row in record["rows"]:
        moved = {"sms": row.pop("sms"), "rings": row.pop("rings", None)}
        row["case"] = {**row.pop("job"), **moved, "engine": "", "topology": None}
        row.update(section=row.get("section", ""), kind=row.get("kind", ""), network=None)
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**record, "schema": 2}))
    assert read(newer) == read(path)
    record["rows"][0]["network"] = {"rows": [1.0]}
    newer.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="records of other suites, such as twolevel, have no"):
        read(newer)


@pytest.mark.parametrize("sms", [108, 148])
def test_records_of_other_gpus_have_other_multiprocessors(tmp_path: Path, sms: int) -> None:
    """Calls that fill the GPU are such whatever its size; the curve over multiprocessors asks for
    132 of any.
    """
    record = json.loads(RECORD.read_text())
    for row in record["rows"]:
        if row["sms"] == 132 and row["section"] != "sms":
            row["sms"] = sms
    path = tmp_path / "other.json"
    path.write_text(json.dumps(record))
    found = [point.work for point in read(path)]
    assert {work.most_sms for work in found} == {sms}
    assert {work.sms for work in found} == {8, 16, 24, 32, 64, min(132, sms), sms}
    assert rates_from(path, HOPPER).dispatch.link_gbs == pytest.approx(
        HOPPER.dispatch.link_gbs, rel=0.1
    )


def test_a_sweep_of_nvlink_keeps_what_programs_do(tmp_path: Path) -> None:
    """Without several numbers of SMs two numbers are fitted; fused casts and skewed routing are
    left out.
    """

    def row(
        tokens: int, us: float, quantize: str = "none", skew: str = "uniform"
    ) -> dict[str, Any]:
        job = {
            "tokens": tokens,
            "hidden": 7168,
            "topk": 8,
            "experts": 256,
            "skew": skew,
            "dtype": "bf16",
        }
        clock = {"median": us, "p99": us, "min": us}
        return {
            "job": {**job, "layout": "flat", "quantize": quantize},
            "name": "tokenyard nvlink",
            "phase": "cached dispatch",
            "sms": None,
            "device": None,
            "wall": clock,
        }

    rows = [row(64, 30.0), row(16384, 1400.0), row(256, 1e6, "fp8"), row(256, 1e6, skew="zipf")]
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"devices": ["a", "b"], "rows": rows}))
    assert [point.us for point in read(path)] == [30.0, 1400.0]
    found = rates_from(path, HOPPER)
    assert (
        found.dispatch.program_gbs == HOPPER.dispatch.program_gbs
        and found.combine == HOPPER.combine
    )
    assert 150 < found.dispatch.link_gbs < 200 and 20 < found.dispatch.fixed_us < 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"must be a file of tokenyard bench --json or of suite nvlink \(FileNotFoundError"),
        ("no", "must be a file of tokenyard bench"),
        ("{}", "KeyError: 'rows'"),
        ("[]", "TypeError"),
        (
            '{"devices": [], "rows": [{"who": "twolevel"}]}',
            "records of other suites, such as twolevel, have no rates",
        ),
        ('{"devices": [], "rows": []}', "has no time of engine nvlink or collective"),
    ],
)
def test_records_that_are_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        rates_from(path, HOPPER)


@pytest.mark.parametrize("us", [0.0, math.inf, math.nan])
def test_times_of_a_record_are_positive_and_finite(tmp_path: Path, us: float) -> None:
    record = json.loads(RECORD.read_text())
    next(row for row in record["rows"] if row.get("kind") == "bf16")["device"]["median"] = us
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    with pytest.raises(
        ValueError, match=rf"must be a file of tokenyard bench .*ValueError: a time of {us} us"
    ):
        read(path)


def test_one_size_is_too_few(tmp_path: Path) -> None:
    record = json.loads(RECORD.read_text())
    record["rows"] = [row for row in record["rows"] if row["job"]["tokens"] == 4096]
    path = tmp_path / "one.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="must have times for two numbers of tokens"):
        rates_from(path, HOPPER)


def test_neither_triton_nor_a_gpu_is_needed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from tokenyard.planner.prediction import plan\n"
        "from tokenyard.planner.rates import HOPPER\n"
        "from tokenyard.planner.workload import Workload\n"
        "for nodes in (1, 2): plan(Workload(nodes=nodes, gpus_per_node=4, tokens=8, hidden=64, "
        "experts=8, topk=2), HOPPER)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_low_latency_once_per_node_by_hand() -> None:
    """As above, but half of the tokens cross, to one rail, behind counts for two ranks; 250 rows
    are handed on, when all are there: twice as much over NVLink, in turn, and a hop."""
    work = Workload(nodes=2, gpus_per_node=2, tokens=1000, hidden=500, experts=4, topk=1)
    rates = replace(ROUND, low_dispatch=CallRates(8.0, 50.0))
    terms = low_latency_call("dispatch", work, traffic(work, "uniform"), rates, once=True)
    assert terms == Terms(nvlink=10.0, nic=101.5, latency=11.0 + HOP_US, in_turn=True)


@pytest.mark.parametrize(
    ("nodes", "tokens", "once"), [(2, 128, True), (2, 1, False), (1, 128, False)]
)
def test_the_plan_says_how_rows_of_low_latency_cross(nodes: int, tokens: int, once: bool) -> None:
    """By the library's own choice; both ways are priced, and the one chosen moves fewer bytes over
    the NIC."""
    work = Workload(nodes=nodes, gpus_per_node=8, tokens=tokens, hidden=7168, experts=256, topk=8)
    assert work.crosses_once == once
    calls = {
        call.engine: call for call in plan(work, HOPPER, ["bf16"]).calls if call.name == COMBINE
    }
    assert (ONCE in calls) == (nodes > 1)
    if nodes > 1:
        assert calls[ONCE].nic.mean < calls[LOW_LATENCY].nic.mean
        assert calls[ONCE].nvlink.mean > calls[LOW_LATENCY].nvlink.mean
