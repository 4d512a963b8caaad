"""``tokenyard doctor --waits``: totals of ranks, and what is slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tokenyard as ty
from tokenyard.cli import app
from tokenyard.cli.doctor_waits import slow_in, waits_in
from tokenyard.stats import Stats
from tokenyard.testing import Ranks, distributed_test


def totals(rank: int, **waits: list[float]) -> str:
    """What a rank's object tells, of a dispatch."""
    stats = Stats.zeros(rank, len(next(iter(waits.values()))))
    stats.waits = {f"dispatch, {what}": seconds for what, seconds in waits.items()}
    return stats.prometheus(layer='a "0"')


def told(matrix: list[list[float]], what: str = "rows") -> list[tuple[int | None, int | None]]:
    """(source, to) of what is slow, where rank i waited ``matrix[i][j]`` for rank j."""
    waits = waits_in(totals(rank, **{what: row}) for rank, row in enumerate(matrix))
    return [(each.source, each.to) for each in slow_in(waits)]


def even(size: int, **more: float) -> list[list[float]]:
    """0.1 s everywhere, but ``r1_0=5``: rank 1 waited 5 s for rank 0."""
    matrix = [[0.1 * (i != j) for j in range(size)] for i in range(size)]
    for pair, seconds in more.items():
        to, source = map(int, pair[1:].split("_"))
        matrix[to][source] = seconds
    return matrix


def test_nothing_is_slow() -> None:
    assert told(even(4)) == [] == told([[0.0, 0.0], [1e-4, 0.0]])


def test_a_slow_rank() -> None:
    assert told(even(4, r0_2=4, r1_2=5, r3_2=3)) == [(2, None)]
    assert told(even(3, r0_2=4, r1_2=5)) == [(2, None)]
    assert told(even(4, r0_2=4, r1_2=5)) == [(2, None)]


def test_a_slow_way() -> None:
    assert told(even(4, r1_2=5)) == [(2, 1)]
    assert told(even(4, r3_0=5, r3_1=5, r3_2=5)) == [(None, 3)]


def test_a_slow_rank_and_a_slow_way() -> None:
    found = told(even(5, r0_2=4, r1_2=5, r3_2=3, r4_2=3, r1_3=7))
    assert found == [(3, 1), (2, None)]


def test_two_ranks_cannot_tell() -> None:
    waits = waits_in([totals(0, counts=[0.0, 3.0]), totals(1, counts=[0.1, 0.0])])
    [slow] = slow_in(waits)
    assert (slow.source, slow.to) == (1, 0) and "or the way to rank 0" in slow.text


def test_a_late_rank_is_told_from_a_slow_way_where_both_begin_together() -> None:
    """Kernels wait for a rank's call and its rows at once: rank 2 is 4 s late, which its rows are
    too, and those of rank 1 to rank 3 are slow."""
    late, rows = even(4, r0_2=4, r1_2=4, r3_2=4), even(4, r0_2=4.1, r1_2=4.2, r3_2=4.1, r3_1=5)
    texts = [totals(rank, call=late[rank], rows=rows[rank]) for rank in range(4)]
    found = {(each.what, each.source, each.to) for each in slow_in(waits_in(texts))}
    assert found == {("call", 2, None), ("rows", 1, 3)}


def test_calls_and_objects_add_up() -> None:
    stats = Stats.zeros(0, 2)
    stats.waits = {"dispatch, counts": [0.0, 1.0], "combine, counts": [9.0, 2.0]}
    layers = [stats.prometheus(layer=layer) for layer in "01"]
    assert waits_in(layers) == {"counts": {(0, 1): 6.0}}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *words])


def files(tmp_path: Path, matrix: list[list[float]]) -> list[str]:
    words: list[str] = []
    for rank, row in enumerate(matrix):
        path = tmp_path / f"rank{rank}.prom"
        path.write_text(totals(rank, counts=row))
        words += ["--waits", str(path)]
    return words


def test_tables_and_json(tmp_path: Path) -> None:
    words = files(tmp_path, even(4, r0_2=4, r1_2=5, r3_2=3))
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "rank 2 is slow: 3 of 3 ranks wait for its counts; it comes late to calls" in done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["2", "3", "s", "4", "s", "5", "s", "1"] in lines
    assert run("--waits", str(tmp_path)).output == done.output
    found = json.loads(run(*words, "--json").output)
    assert [(each["source"], each["to"], each["seconds"]) for each in found["slow"]] == [
        (2, None, 5.0)
    ]
    assert {"rank": 1, "source": 2, "seconds": 5.0} in found["waits"]["counts"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tokenyard_calls_total 1", "there is no tokenyard_wait_seconds_total"),
        ('tokenyard_wait_seconds_total{rank="0",for="rows"} 1', "needs the labels"),
        ('tokenyard_wait_seconds_total{rank="0",for="rows",source="1"} x', "and seconds"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "totals"
    path.write_text(text)
    done = run("--waits", str(path))
    assert done.exit_code == 2 and why in " ".join(done.output.replace("│", " ").split())


@distributed_test(world_size=3)
def test_what_ranks_write_is_read(ranks: Ranks) -> None:
    """Each rank's own waits for the two others; nothing where kernels wait."""
    sizes = {"num_experts": 6, "hidden": 64, "num_topk": 2, "max_tokens_per_rank": 4}
    with ty.ExpertParallel(ranks.group, device=ranks.device, **sizes) as ep:
        x = torch.ones(4, 64, device=ranks.device)
        recv = ep.dispatch(x, torch.tensor([[0, 3]] * 4, device=ranks.device))
        ep.combine(recv.x, recv.handle)
        text, waits = ep.stats().prometheus(layer="0"), ep.stats().waits
    if not waits:
        with pytest.raises(ValueError, match="there is no tokenyard_wait_seconds_total"):
            waits_in([text])
        return
    found = waits_in([text])
    assert set(found) == {"counts", "rows"}
    for what, pairs in found.items():
        assert set(pairs) == {(ranks.rank, peer) for peer in range(3) if peer != ranks.rank}
        for (_, source), seconds in pairs.items():
            assert seconds == pytest.approx(
                sum(each[source] for part, each in waits.items() if part.endswith(what))
            )
