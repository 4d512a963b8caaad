"""``tokenyard doctor --waits``: a slow rank is told from a slow way, from what ranks wrote."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokenyard as ty
from tokenyard.cli import app, doctor_waits
from tokenyard.stats import Stats
from tokenyard.testing import Ranks, distributed_test

PARTS = ("dispatch, counts", "dispatch, rows", "combine, rows")
CALLS = 10


def texts(size: int, slow: dict[tuple[str, int, int], float], ranks: int | None = None):
    """Files of ``size`` ranks (the first ``ranks``): each pair waited 20 us per call, and those
    of ``slow`` (part, rank, source) as many seconds per call as given.
    """
    files: dict[str, str] = {}
    for rank in range(size if ranks is None else ranks):
        stats = Stats.zeros(rank, size)
        stats.calls = {"dispatch": CALLS, "combine": CALLS}
        for part in PARTS:
            each = [slow.get((part, rank, s), 2e-5) * CALLS for s in range(size)]
            each[rank] = 0.0
            stats.waits[part] = each
        files[f"rank{rank}.prom"] = stats.prometheus(layer="0")
    return files


def said(files: dict[str, str]) -> list[tuple[str, str]]:
    found = doctor_waits.slow(doctor_waits.read(files))
    return [(each["symptom"], each["cause"]) for each in found]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_nothing_stands_out_where_all_wait_alike(size: int) -> None:
    assert not said(texts(size, {}))
    everybody = {(part, r, s): 0.5 for part in PARTS for r, s in product(range(size), repeat=2)}
    assert not said(texts(size, everybody))


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize(("part", "cause"), [(PARTS[0], "late"), (PARTS[2], "slowly")])
def test_a_slow_rank(size: int, part: str, cause: str) -> None:
    """All but one other wait for it, or all."""
    waiting = [rank for rank in range(size) if rank != 1]
    for ranks in (waiting, waiting[1:] if size > 3 else waiting):
        ((symptom, why),) = said(texts(size, {(part, rank, 1): 0.25 for rank in ranks}))
        assert symptom == (
            f"{part}: {len(ranks)} of {size - 1} ranks wait for rank 1 (250 ms per call)"
        )
        assert cause in why


def test_a_slow_way() -> None:
    ((symptom, why),) = said(texts(4, {(PARTS[1], 3, 0): 0.25}))
    assert symptom == (f"{PARTS[1]}: rank 3 waits for rank 0, others do not (250 ms per call)")
    assert why == "the way from rank 0 to rank 3 is slow"


def test_two_ranks_or_one_file_cannot_tell() -> None:
    for files in (texts(2, {(PARTS[1], 0, 1): 0.25}), texts(4, {(PARTS[1], 0, 1): 0.25}, ranks=1)):
        ((symptom, why),) = said(files)
        assert symptom == f"{PARTS[1]}: rank 0 waits for rank 1 (250 ms per call)"
        assert "it or the way" in why


def test_objects_of_a_rank_are_added() -> None:
    """Two layers in one file: twice the calls and twice the seconds."""
    files = texts(3, {(PARTS[1], 0, 1): 0.25})
    twice = {name: text + text.replace('layer="0"', 'layer="1"') for name, text in files.items()}
    assert doctor_waits.read(twice) == doctor_waits.read(files)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no tokenyard_wait_seconds_total"),
        ('tokenyard_wait_seconds_total{rank="x",for="a",source="0"} 1', "'x' is no rank"),
        ('tokenyard_wait_seconds_total{rank="0",for="a",source="-1"} 1', "'-1' is no rank"),
        ('tokenyard_wait_seconds_total{rank="0",for="a",source="9999999"} 1', "is no rank"),
        ('tokenyard_wait_seconds_total{rank="0",for="a",source="1"} much', "'much'"),
    ],
)
def test_files_that_cannot_be_read_are_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "rank0.prom"
    file.write_text(text)
    done = CliRunner().invoke(app, ["doctor", "--waits", str(file)], env={"COLUMNS": "400"})
    assert done.exit_code == 2
    assert why in done.output and "rank0.prom" in done.output
    done = CliRunner().invoke(app, ["doctor", "--waits", str(tmp_path / "none")])
    assert done.exit_code == 2 and "No such file" in done.output


def test_the_command_prints_tables_or_json(tmp_path: Path) -> None:
    """Of a folder, or of files."""
    empty = CliRunner().invoke(app, ["doctor", "--waits", str(tmp_path)])
    assert empty.exit_code == 2 and "no file that ends in .prom" in empty.output
    paths: list[str] = []
    for name, text in texts(3, {(PARTS[1], 0, 1): 0.25}).items():
        (tmp_path / name).write_text(text)
        paths += ["--waits", str(tmp_path / name)]
    folder = CliRunner().invoke(app, ["doctor", "--waits", str(tmp_path)])
    done = CliRunner().invoke(app, ["doctor", *paths])
    assert done.exit_code == 0 and "250 ms" in done.output == folder.output
    assert "SLOW: dispatch, rows: rank 0 waits for rank 1, others do not" in done.output
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json", *paths]).output)
    assert told["schema"] == 1 and told["waits"][PARTS[1]][0][1] == pytest.approx(0.25)
    assert [each["id"] for each in told["findings"]] == ["slow"]


@distributed_test(world_size=3)
def test_what_ranks_really_write_is_read(ranks: Ranks) -> None:
    import torch

    with ty.ExpertParallel(
        ranks.group,
        num_experts=6,
        hidden=64,
        num_topk=2,
        max_tokens_per_rank=4,
        device=ranks.device,
    ) as ep:
        x = torch.ones(4, 64, device=ranks.device)
        idx = torch.tensor([[0, 3]] * 4, device=ranks.device)
        recv = ep.dispatch(x, idx)
        ep.combine(recv.x, recv.handle)
        text, waits = ep.stats().prometheus(layer="0"), ep.stats().waits
    if not waits:  # kernels do not count them
        with pytest.raises(ValueError, match="has no tokenyard_wait_seconds_total"):
            doctor_waits.read({"file": text})
        return
    read = doctor_waits.read({"file": text})
    assert set(read) == set(waits)
    for part, table in read.items():
        assert table[ranks.rank] == pytest.approx(waits[part])
        assert table[(ranks.rank + 1) % 3] == [None] * 3
