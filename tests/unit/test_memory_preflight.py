"""Which made-up GPUs can reach each other, and what is said about those that cannot."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenyard.memory import preflight
from tokenyard.memory.preflight import (
    Report,
    Unreachable,
    report,
    unreachable,
    unreachable_here,
    unreachable_pairs,
)

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def full_mesh(count: int, host: str = "one", first: int = 0) -> list[Report]:
    """Ranks that see and reach everybody's GPU."""
    gpus = tuple(f"{host}-{gpu}" for gpu in GPUS[:count])
    return [Report(first + i, host, gpus[i], i, gpus, gpus) for i in range(count)]


def explain(reports: list[Report]) -> list[str]:
    return list(map(str, unreachable(reports)))


def test_a_full_mesh_has_nothing_to_explain() -> None:
    assert unreachable(full_mesh(4)) == []
    assert explain(full_mesh(4)) == []
    assert explain(full_mesh(1)) == []


def test_every_pair_across_hosts() -> None:
    reports = full_mesh(2, "left") + full_mesh(2, "right", first=2)
    assert [(pair.a, pair.b) for pair in unreachable(reports)] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert explain(reports) == [
        f"ranks {a} and {b} are on different hosts" for a in (0, 1) for b in (2, 3)
    ]


def test_all_missing_paths_are_named() -> None:
    """Two pairs of GPUs that are linked inside a pair only."""
    reports = full_mesh(4)
    pairs = [reports[0].visible[:2], reports[0].visible[2:]]
    reports = [each._replace(reaches=pairs[each.rank // 2]) for each in reports]
    assert [(pair.a, pair.b) for pair in unreachable(reports)] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert (
        explain(reports)[0] == "ranks 0 and 2 have no peer-to-peer path from one-GPU-a to one-GPU-c"
    )
    assert len(explain(reports)) == 4


def test_a_path_in_one_direction_is_none() -> None:
    a, b = full_mesh(2)
    assert explain([a, b._replace(reaches=b.visible[1:])]) == [
        "ranks 0 and 1 have no peer-to-peer path from one-GPU-b to one-GPU-a"
    ]


def test_a_shared_gpu_needs_permission() -> None:
    a, b = full_mesh(2)
    b = b._replace(gpu=a.gpu, ordinal=0)
    (line,) = explain([a, b])
    assert line.startswith("ranks 0 and 1 share one GPU (one-GPU-a)")
    assert preflight.ALLOW_OVERLAP in line
    assert explain([a._replace(overlap=True), b._replace(overlap=True)]) == []
    assert len(explain([a._replace(overlap=True), b])) == 1


def test_gpus_hidden_from_each_other() -> None:
    """One GPU visible to each process: both call it cuda:0."""
    reports = [
        each._replace(ordinal=0, visible=(each.gpu,), reaches=(each.gpu,)) for each in full_mesh(2)
    ]
    (line,) = explain(reports)
    assert "rank 0 does not see rank 1's GPU (one-GPU-b)" in line
    assert "CUDA_VISIBLE_DEVICES" in line


def test_visible_gpus_under_the_same_ordinal() -> None:
    a, b = full_mesh(2)
    b = b._replace(ordinal=0, visible=b.visible[::-1])
    (line,) = explain([a, b])
    assert line.startswith("ranks 0 and 1 know different GPUs by one ordinal (cuda:0)")
    assert explain([a._replace(overlap=True), b._replace(overlap=True)]) == []


def test_ranks_without_a_gpu_come_first_and_once() -> None:
    reports = full_mesh(2)
    reports += [Report(2, "two", "", -1, (), (), problem="sees no GPU")]
    assert unreachable(reports) == [Unreachable(2, 2, "sees no GPU")]
    assert explain(reports) == ["rank 2 sees no GPU"]


def test_what_a_process_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert report(3, torch.device("cpu")).problem == "works on cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report(3, torch.device("cuda", 0)).problem == "sees no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda mine, other: (mine, other) == (1, 2)
    )
    monkeypatch.setattr(preflight, "_unique_id", lambda ordinal: GPUS[ordinal])
    monkeypatch.setenv(preflight.ALLOW_OVERLAP, "1")
    assert report(5, torch.device("cuda", 3)).problem == "works on cuda:3, but sees 3 GPU(s)"
    assert report(5, torch.device("cuda", 1)) == Report(
        5, preflight.host_name(), "GPU-b", 1, GPUS[:3], ("GPU-b", "GPU-c"), overlap=True
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert report(5, torch.device("cuda")) == report(5, torch.device("cuda", 1))
    assert unreachable_here() == [
        f"ranks {a} and {b} have no peer-to-peer path from {one} to {other}"
        for a, b, one, other in (
            (0, 1, "GPU-a", "GPU-b"),
            (0, 2, "GPU-a", "GPU-c"),
            (1, 2, "GPU-c", "GPU-b"),
        )
    ]


def test_all_ranks_find_the_same_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = full_mesh(3)
    reports[2] = reports[2]._replace(host="elsewhere")
    monkeypatch.setattr(preflight, "report", lambda rank, device: reports[rank])
    store, found = dist.HashStore(), dict[int, Any]()

    def rank_main(rank: int) -> None:
        found[rank] = unreachable_pairs(store, rank, 3, torch.device("cuda", rank), 10.0)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    why = "are on different hosts"
    assert list(found.values()) == [[Unreachable(0, 2, why), Unreachable(1, 2, why)]] * 3
