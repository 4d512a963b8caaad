"""The suite ``low_latency``: its truth is the oracle's, and its page says what lost, what failed
and what met the bar.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tokenyard as ty
from benchmarks import low_latency as decode
from benchmarks.__main__ import app
from benchmarks.batches import DeviceTruth, make_batches
from benchmarks.low_latency import (
    COMBINE,
    DISPATCH,
    ENGINES,
    NCCL,
    PAIR,
    PARTS,
    Calls,
    Decode,
    line_for,
)
from benchmarks.low_latency_report import decode_markdown
from benchmarks.record import Line
from cases import Case
from tokenyard import launch, reference
from tokenyard.testing.checked_calls import Batch

SUITE = replace(Decode(), tokens=(8, 128))
FACTS: dict[str, Any] = {
    "devices": ["NVIDIA H200"] * 4,
    "versions": {"torch": "2"},
    "date": "2026-11-21",
    "commit": "abc",
    "command": "tokenyard bench",
}


@pytest.mark.parametrize("per_node", [None, 2, 1])
def test_truth_about_weighted_sums_is_the_oracles(per_node: int | None) -> None:
    case = Case(
        4,
        num_tokens=9,
        num_topk=4,
        num_experts=8,
        hidden=256,
        layout=ty.Layout.EXPERT_MAJOR,
        quantize=ty.Quantize.FP8,
    )
    tokens = case.tokens_of(3)  # as many as the shortest rank has, on each
    x = [rows[:tokens] for rows in case.x if isinstance(rows, torch.Tensor)]
    picks = [(idx[:tokens], weights[:tokens]) for idx, weights in case.picks]
    there = reference.dispatch(
        x,
        [idx for idx, _ in picks],
        [weights for _, weights in picks],
        num_experts=8,
        layout=case.layout,
        expert_alignment=1,
        max_tokens_per_rank=9,
        quantize=case.quantize,
    )
    back = [rows.x.bfloat16() for rows in there]
    want = reference.combine(back, there, weighted=True, ranks_per_node=per_node)
    idx, weights = (torch.stack(each) for each in zip(*picks, strict=True))
    for rank in range(4):
        truth = DeviceTruth(Batch(x[rank], idx, weights, rank, 8), torch.cat(x))
        assert torch.equal(decode._summed(truth.batch, truth, per_node), want[rank].x)


def lines(pair_us: float) -> list[Line]:
    def line(who: str, what: str, tokens: int, us: float) -> Line:
        case = SUITE.case(tokens, "" if who == NCCL else who)
        times = [us, us + 1, us + 2]
        return line_for(case, what, device_us=times, symmetric_bytes=7_400_000)

    ours = [
        line("low_latency", what, tokens, pair_us)
        for what in (PAIR, DISPATCH, COMBINE)
        for tokens in SUITE.tokens
    ]
    return [
        *ours,
        *(line("low_latency", part, 128, 3) for part in PARTS),
        *(line(NCCL, PAIR, n, 44) for n in SUITE.tokens),
    ]


def test_the_page_says_what_was_met_and_lost() -> None:
    text = decode_markdown(lines(30.0), SUITE, FACTS)
    assert "4x NVIDIA H200" in text
    assert "| `low_latency`: dispatch and combine | **31.0** (30.0, 32.0) |" in text
    assert "No pair loses" in text
    assert "40 us on 4 ranks: met." in text
    assert "8 tokens 7.4" in text
    worse = decode_markdown(lines(50.0), SUITE, FACTS)
    assert (
        "- 128 tokens: `low_latency`, 51.0 us, loses to all-gather FP8, reduce-scatter BF16, 45.0"
        in worse
    )
    assert "missed." in worse
    assert "on 4 ranks" not in decode_markdown(
        lines(30.0), SUITE, {**FACTS, "devices": ["NVIDIA H200"] * 2}
    )


def test_what_was_wrong_has_no_time() -> None:
    wrong = line_for(SUITE.case(8, "nvlink"), PAIR, error="combined: 3 of 8 rows are wrong")
    text = decode_markdown([*lines(30.0), wrong], SUITE, FACTS)
    assert "| `nvlink`: dispatch and combine | **no time** | - |" in text
    assert "- nvlink, 8 tokens: combined: 3 of 8 rows are wrong" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_it_needs_gpus() -> None:
    result = CliRunner().invoke(app, ["low_latency"])
    assert result.exit_code == 2
    assert "needs CUDA devices" in " ".join(result.output.replace("│", " ").split())


# Nodes

NODES = replace(SUITE, tokens=(128,), topology=(2, 1), parts_tokens=0, replays=10_000)


def test_ways_to_other_nodes() -> None:
    """What forces puts comes first; rows cross in two ways where a node has several ranks."""
    puts = "low_latency, puts"
    assert [way.name for way in SUITE.ways] == ["low_latency", "nvlink"]
    for grid in ((2, 1), (4, 1)):
        assert [way.name for way in replace(NODES, topology=grid).ways] == [puts, "low_latency"]
    assert [way.name for way in replace(NODES, topology=(2, 2)).ways] == [
        f"{puts} once per rank", f"{puts} once per node", "low_latency",
    ]  # fmt: skip


@pytest.mark.parametrize("puts_us", [64.0, 64.2])
def test_the_page_of_nodes_says_what_puts_take_more(puts_us: float) -> None:
    def line(name: str, us: float, **known: Any) -> Line:
        return line_for(NODES.case(128, ENGINES[0]), PAIR, name=name, **known, device_us=[us])

    stores = line("low_latency", 39.0)
    text = decode_markdown([line("low_latency, puts", puts_us), stores], NODES, FACTS)
    assert "Ranks stand for 2 nodes of 1" in text and "In two launches" not in text
    assert f"| `low_latency, puts`: dispatch and combine | **{puts_us}**" in text
    assert f"takes {puts_us - 39.0:.1f} us more than `low_latency`; bar," in text
    assert ("25 us: met" in text) == (puts_us == 64.0) and ("missed" in text) == (puts_us > 64.0)
    assert "10,000 replays" in text
    assert "right: `low_latency, puts` 128; `low_latency` 128." in text
    wrong = line_for(NODES.case(128, ENGINES[0]), PAIR, name="low_latency, puts", error="3 replays")
    text = decode_markdown([wrong, stores], NODES, FACTS)
    assert "right: `low_latency, puts` no size; `low_latency` 128." in text
    assert "- low_latency, puts, 128 tokens: 3 replays" in text


class Graph:
    """Stands in for a CUDA graph: makes the calls again, and leaves what comes where the captured
    ones left theirs. ``stale``: replays that leave nothing.
    """

    def __init__(self, stale: tuple[int, ...] = ()) -> None:
        self.stale, self.count = stale, -1

    def capture(self, step: Any) -> Any:
        def captured(*inputs: torch.Tensor) -> Any:
            self.again, self.left = partial(step, *inputs), step(*inputs)
            return self.left

        return captured

    def replay(self) -> None:
        self.count += 1
        if self.count in self.stale:
            return
        (recv, y), (new, sums) = self.left, self.again()
        recv.x.view(torch.uint8)[: len(new.x)] = new.x.view(torch.uint8)
        recv.scales[: len(new.scales)] = new.scales
        y.copy_(sums)


@pytest.mark.parametrize("stale", [(), (7,), (1, 8)])
def test_replays_are_compared(stale: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them: one that leaves what the one before left is found."""
    graph = Graph(stale)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda _: nullcontext())
    monkeypatch.setattr(decode, "_cuda", SimpleNamespace(CUDAGraph=lambda: graph))
    case = Decode(tokens=(4,), hidden=256, topk=2, experts=4).case(4, "collective")
    wrong = pytest.raises(AssertionError, match=f"{len(stale)} of 9 replays are wrong")
    store = launch.local_store()
    with launch.joined(0, 1, port=store.port, name="replays") as here:
        batches = make_batches(case, here, 0)
        with ty.ExpertParallel(**case.arguments, engine="collective", device=here) as ep:
            calls = Calls(ep, batches)
            calls.check()
            monkeypatch.setattr(calls, "there_and_back", graph.capture(calls.there_and_back))
            with wrong if stale else nullcontext():
                calls.replay(9)
