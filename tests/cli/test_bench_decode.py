"""The suite ``low_latency``: its truth is the oracle's, and its page says what lost, what failed
and what met the bar.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tokenyard as ty
from benchmarks import low_latency as decode
from benchmarks.__main__ import app
from benchmarks.batches import DeviceTruth
from benchmarks.low_latency import COMBINE, DISPATCH, NCCL, PAIR, PARTS, Decode, line_for
from benchmarks.low_latency_report import decode_markdown
from benchmarks.record import Line
from cases import Case
from tokenyard import reference
from tokenyard.testing.checked_calls import Batch

SUITE = replace(Decode(), tokens=(8, 128))
FACTS: dict[str, Any] = {
    "devices": ["NVIDIA H200"] * 4,
    "versions": {"torch": "2"},
    "date": "2026-11-21",
    "commit": "abc",
    "command": "tokenyard bench",
}


def test_truth_about_weighted_sums_is_the_oracles() -> None:
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
    want = reference.combine([rows.x.bfloat16() for rows in there], there, weighted=True)
    idx, weights = (torch.stack(each) for each in zip(*picks, strict=True))
    for rank in range(4):
        truth = DeviceTruth(Batch(x[rank], idx, weights, rank, 8), torch.cat(x))
        assert torch.equal(decode._summed(truth.batch, truth), want[rank].x)


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
    assert "- 128 tokens: 51.0 us loses to all-gather FP8, reduce-scatter BF16, 45.0 us" in worse
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
