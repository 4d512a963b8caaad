"""What ``tokenyard demo`` says of bytes and times: of a step, of the slowest rank, without the
warm-up, in their columns.
"""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from matplotlib.figure import Figure
from rich.console import Console

from tokenyard.cli import demo_rank
from tokenyard.cli.demo import print_result
from tokenyard.cli.demo_rank import Options, Part, Share, run_rank
from tokenyard.cli.plots import heat_map
from tokenyard.testing import Ranks, distributed_test

SHAPE = Options(hidden=16, experts=5, topk=2, engine="collective")
PHASES = ("embed and route", "dispatch", "experts", "combine", "backward")
TEXT = bytes(range(60, 97))  # 37 tokens: 19 and 18


def run(ranks: Ranks, steps: int) -> list[Part]:
    return run_rank(ranks.device, replace(SHAPE, steps=steps), TEXT)


@distributed_test(world_size=2)
def test_bytes_and_times_are_of_a_step_and_the_worst_rank_counts(ranks: Ranks) -> None:
    shares: list[Share] = []

    class Kept(Share):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            shares.append(self)

    def errors(share: Share, y: Any) -> dict[str, float]:
        return {"output": 0.25 * ranks.rank}

    with (
        mock.patch.object(demo_rank, "Share", Kept),
        mock.patch.object(Share, "errors", errors),
    ):
        once, often = run(ranks, 1), run(ranks, 3)
    assert [{name: len(share.seconds[name]) for name in PHASES} for share in shares] == [
        dict.fromkeys(PHASES, steps) for steps in (1, 3)
    ]
    moved = [[(part.sent, part.received) for part in parts] for parts in (once, often)]
    assert moved[0] == moved[1]
    sent = [part.sent for part in once]
    assert [part.received for part in once] == [list(column) for column in zip(*sent, strict=True)]
    # A row there with its token, ids and weights, and back as it is; the backward pass has a row
    # each way.
    there, back = sent[0][1], sent[1][0]
    assert there != back and min(there, back) > 0 and sent[0][0] == sent[1][1] == 0.0
    counted = iter([torch.zeros(2, 2), torch.tensor([[0.0, 40.0], [0.0, 60.0]]) * (1 + ranks.rank)])
    with mock.patch.object(demo_rank, "bytes_so_far", side_effect=counted):
        made_up = run(ranks, 2)
    assert [part.sent for part in made_up] == [[0.0, 20.0], [0.0, 40.0]]
    assert [part.received for part in made_up] == [[0.0, 30.0], [0.0, 60.0]]
    assert [part.errors for part in once] == [{"output": 0.0}, {"output": 0.25}]
    assert sum(sum(part.load) for part in once) == 2 * len(TEXT)
    assert [part.tokens for part in once] == [19, 18]


@distributed_test(world_size=2)
def test_the_warm_up_is_no_step(ranks: Ranks) -> None:
    taken = ([70.0, 1.0, 9.0, 3.0], [80.0, 2.0, 3.0, 4.0])[ranks.rank]
    turns = {name: iter(taken) for name in PHASES}

    @contextmanager
    def phase(share: Share, name: str) -> Generator[None, None, None]:
        yield
        share.seconds[name].append(next(turns[name]))

    with mock.patch.object(Share, "phase", phase):
        told = [part.seconds for part in run(ranks, 3)]
    steps = ([1.0, 9.0, 3.0], [2.0, 3.0, 4.0])
    assert told == [dict.fromkeys(PHASES, each) for each in steps]


SECONDS = [
    {"dispatch": [0.001, 0.009, 0.003], "backward": [0.5, 0.1, 0.1]},
    {"dispatch": [0.002, 0.003, 0.004], "backward": [0.1, 0.5, 0.5]},
]
"""By rank; the slowest takes 2, 9 and 4 ms for a dispatch, 4 as a median."""

RESULT = [
    Part("collective: because", 20, 31, [0.0, 1500.0], [0.0, 30.0], [4, 0], {}, SECONDS[0]),
    Part("collective: because", 10, 21, [30.0, 0.0], [1500.0, 0.0], [11], {}, SECONDS[1]),
]


def test_tables_hold_what_their_heads_say() -> None:
    out = io.StringIO()
    for part in RESULT:
        part.errors["output"] = 0.0
    assert print_result(Console(file=out, width=150), RESULT)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    at = lines.index("Rank Experts Tokens Rows received Bytes sent Bytes received")
    assert lines[at + 1 : at + 3] == ["0 2 20 31 1.5 kB 30 B", "1 1 10 21 30 B 1.5 kB"]
    at = lines.index("Expert Rank Tokens")
    assert [line.split()[:3] for line in lines[at + 1 : at + 4]] == [
        ["0", "0", "4"],
        ["1", "0", "0"],
        ["2", "1", "11"],
    ]
    assert any(line.startswith("dispatch 4 ms") for line in lines) and "sum 504 ms" in lines
    assert "the largest is 2.20 times the mean of 5 tokens" in out.getvalue()


def test_the_map_has_sources_as_rows() -> None:
    axes = Figure().subplots()
    heat_map(axes, [[9.0, 1.0], [2.0, 9.0]], title="", unit="B")
    shown: Any = axes.images[0].get_array()
    assert (
        (shown[0, 1], shown[1, 0]) == (1.0, 2.0)
        and bool(shown.mask[0, 0])
        and bool(shown.mask[1, 1])
    )
    told = {text.get_position(): text.get_text() for text in axes.texts}
    assert told == {(1, 0): "1", (0, 1): "2"}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("destination rank", "source rank")
