"""What ``tokenyard demo`` says of bytes, loads and errors: each of its rank, in its column."""

from __future__ import annotations

import io
from typing import Any
from unittest import mock

from matplotlib.figure import Figure
from rich.console import Console

from tokenyard.cli import demo
from tokenyard.cli.demo import Options, Part, print_result, run_rank
from tokenyard.cli.plots import heat_map
from tokenyard.testing import Ranks, distributed_test

SHAPE = Options(hidden=16, experts=5, topk=2, engine="collective")
TEXT = bytes(range(60, 97))  # 37 tokens: 19 and 18


@distributed_test(world_size=2)
def test_every_rank_tells_what_it_saw(ranks: Ranks) -> None:
    with mock.patch.object(demo, "relative_error", return_value=0.25 * ranks.rank):
        parts = run_rank(ranks.device, SHAPE, TEXT)
    sent = [part.sent for part in parts]
    assert [part.received for part in parts] == [list(column) for column in zip(*sent, strict=True)]
    # A row there with its token and weights, and back as it is; the backward pass has a row each
    # way.
    there, back = sent[0][1], sent[1][0]
    assert there != back and min(there, back) > 0 and sent[0][0] == sent[1][1] == 0
    assert [set(part.errors.values()) for part in parts] == [{0.0}, {0.25}]
    assert sum(sum(part.load) for part in parts) == 2 * len(TEXT)
    assert [(part.tokens, len(part.load)) for part in parts] == [(19, 3), (18, 2)]
    assert [part.rows for part in parts] == [sum(part.load) for part in parts]


RESULT = [
    Part("collective: because", 20, 31, [0, 1500], [0, 30], [4, 0], {"output": 0.0}),
    Part("collective: because", 10, 21, [30, 0], [1500, 0], [11], {"output": 2.5e-6}),
]


def test_tables_hold_what_their_heads_say() -> None:
    out = io.StringIO()
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
    assert "output 2.5e-06" in lines
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
