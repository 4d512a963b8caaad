"""Ranks as a grid: what is detected, what is refused and in which words, and that all ranks say the
same.
"""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import tokenyard as ty
from bad_input import assert_works, check, error_of, make, meet
from cases import Case, check_received, dispatch
from tokenyard.testing import Ranks, distributed_test
from tokenyard.topology import (
    HOST_VARIABLE,
    Topology,
    check_topology,
    detect,
    node_numbers,
    settle_topology,
    this_host,
)


def test_ranks_of_a_grid() -> None:
    grid = Topology(3, 4)
    assert (grid.world_size, str(grid), grid.has_levels) == (12, "3x4", True)
    assert (grid.node_of(7), grid.local_of(7), grid.rank_at(1, 3)) == (1, 3, 7)
    assert (list(grid.ranks_of(1)), list(grid.rail_of(7))) == ([4, 5, 6, 7], [3, 7, 11])
    assert not Topology(1, 4).has_levels and not Topology(4, 1).has_levels


@pytest.mark.parametrize(
    ("hosts", "grid"), [("aabb", (2, 2)), ("a", (1, 1)), ("bbbaaaccc", (3, 3)), ("abc", (3, 1))]
)
def test_what_is_detected(hosts: str, grid: tuple[int, int]) -> None:
    assert detect(list(hosts)) == Topology(*grid)
    assert settle_topology(None, list(hosts)) == (Topology(*grid), "")
    assert settle_topology(Topology(1, len(hosts)), list(hosts)) == (Topology(1, len(hosts)), "")


UNEVEN = {
    "aaab": [
        "equally many ranks",
        "host a has 3 (ranks 0, 1, 2); host b has 1 (rank 3)",
        "topology=",
        HOST_VARIABLE,
    ],
    "abab": [
        "consecutive",
        "host a has 2 (ranks 0, 2); host b has 2 (ranks 1, 3)",
        "host after host",
    ],
    "abba": ["consecutive", "host a has 2 (ranks 0, 3)"],
    "aaaaaaaab": ["host a has 8 (ranks 0, 1, 2, 3, 4, 5, 6, 7); host b"],
    "aaaaaaaaab": ["host a has 9 (ranks 0, 1, 2, 3, 4, 5, 6, 7, ...); host b"],
    "abcdefghijj": ["of 11 ranks", "host h has 1 (rank 7); and 2 more hosts"],
}


@pytest.mark.parametrize("hosts", UNEVEN)
def test_what_is_no_grid(hosts: str) -> None:
    """Every host with its ranks, and what to do."""
    error = error_of(lambda: detect(list(hosts)))
    check(error, ValueError, *UNEVEN[hosts])
    assert settle_topology(None, list(hosts)) == (None, str(error))


def test_node_numbers() -> None:
    assert node_numbers(Topology(2, 2), list("aaaa")) == [0, 0, 1, 1]
    assert node_numbers(None, list("baab")) == [0, 1, 1, 0]


WRONG: list[tuple[Any, list[str]]] = [
    (4, ["topology (4)", "pair (num_nodes, ranks_per_node)"]),
    ((1, 2, 3), ["topology ((1, 2, 3))", "pair"]),
    ("2x2", ["topology ('2x2')", "pair"]),
    ((2, 3), ["topology (2x3) has 6 ranks", "the group has 4"]),
    ((1, 2), ["topology (1x2) has 2 ranks", "the group has 4"]),
    ((0, 4), ["num_nodes (0)", "at least 1"]),
    ((2, 2.0), ["ranks_per_node (2.0)", "whole number"]),
    ((True, 4), ["num_nodes (True)"]),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[str(given) for given, _ in WRONG])
def test_what_is_no_topology(given: Any, words: list[str]) -> None:
    check(error_of(lambda: check_topology(given, 4)), ValueError, *words)


def test_what_may_be_given() -> None:
    assert [check_topology(given, 6) for given in (None, (2, 3), [3, 2], Topology(6, 1))] == [
        None, Topology(2, 3), Topology(3, 2), Topology(6, 1),
    ]  # fmt: skip


def test_this_host_has_a_name_that_can_be_changed() -> None:
    assert this_host() == this_host() != ""
    with mock.patch.dict(os.environ, {HOST_VARIABLE: "rack 7"}):
        assert this_host() == "rack 7"
    with mock.patch.dict(os.environ, {HOST_VARIABLE: ""}):
        assert this_host() != ""


@pytest.mark.parametrize("where", ["machine", "boot", "network"])
def test_hosts_differ(where: str) -> None:
    """In their machine, in when it was started, and in their network."""

    def path(name: str, salt: str) -> Any:
        boot, network = "1" * 36, 5
        if (
            where in ("boot", "network")
            and where in {"boot_id": "boot", "net": "network"}[Path(name).name]
        ):
            boot, network = salt * 36, int(salt)
        return SimpleNamespace(read_text=lambda: boot, stat=lambda: SimpleNamespace(st_ino=network))

    def host(salt: str) -> str:
        node = f"node{salt}" if where == "machine" else "node"
        names = {
            "platform.node": lambda: node,
            "tokenyard.topology.Path": lambda name: path(name, salt),
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, {HOST_VARIABLE: ""}))
            for name, value in names.items():
                stack.enter_context(mock.patch(name, value))
            return this_host()

    assert host("2") == host("2") != host("3")


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_host_without_proc_is_its_machine(error: type[OSError]) -> None:
    with (
        mock.patch.dict(os.environ, {HOST_VARIABLE: ""}),
        mock.patch.object(Path, "read_text", side_effect=error),
    ):
        assert this_host() == platform.node()


def as_host(name: str) -> Any:
    return mock.patch.dict(os.environ, {HOST_VARIABLE: name})


@distributed_test(world_size=4)
def test_objects(ranks: Ranks) -> None:
    """Given, detected, none, and refused on one rank or disagreed on: everybody learns it in
    construction.
    """
    with make(ranks) as ep:
        assert ep.topology == Topology(1, 4) and "per node" not in ep.why
        assert ep.stats().nodes == [0, 0, 0, 0]
    with as_host("ab"[ranks.rank // 2]), make(ranks) as ep:
        assert ep.topology == Topology(2, 2) and "once per node" in ep.why
        assert ep.stats().nodes == [0, 0, 1, 1]
    with as_host("ab"[ranks.rank // 2]), make(ranks, topology=(1, 4)) as ep:
        assert ep.topology == Topology(1, 4) and "per node" not in ep.why
        assert_works(ranks, ep)
    with as_host("ab"[ranks.rank // 3]), make(ranks) as ep:
        assert ep.topology is None and "not per node: hosts must have equally many ranks" in ep.why
        assert ep.stats().nodes == [0, 0, 0, 1]
        assert_works(ranks, ep)
    for grid in ((4, 1), (1, 4)):
        with make(ranks, topology=grid) as ep:
            assert_works(ranks, ep)
    error = error_of(lambda: make(ranks, topology=(2, 2) if ranks.rank == 3 else None))
    check(error, ty.Mismatch, "ranks disagree on topology: rank 0 says None, rank 3 says 2x2")
    meet(ranks)
    error = error_of(lambda: make(ranks, topology=(2, 3) if ranks.rank == 1 else None))
    words = ("topology (2x3) has 6 ranks, but the group has 4",)
    check(
        error,
        *((ValueError, *words) if ranks.rank == 1 else (ty.PeerError, "rank 1 could not", *words)),
    )


@distributed_test(world_size=4)
def test_hosts_of_which_one_has_more_ranks_are_counted(ranks: Ranks) -> None:
    """No grid, so rows go straight to their ranks; what crosses hosts is counted all the same."""
    case = Case(4, num_experts=4, num_topk=4, num_tokens=10)
    everywhere = torch.arange(4).expand(case.tokens_of(ranks.rank), 4)
    with as_host("ab"[ranks.rank // 3]), case.make(ranks) as ep:
        ep.dispatch(case.x[ranks.rank].to(ranks.device), everywhere.to(ranks.device))
        stats, own = ep.stats(), case.tokens_of(ranks.rank)
        assert stats.across.rows_sent == (own if ranks.rank < 3 else 3 * own)
        assert stats.inside.rows_sent == (2 * own if ranks.rank < 3 else 0)
        received = [case.tokens_of(peer) for peer in range(4)]
        assert stats.across.rows_received == (received[3] if ranks.rank < 3 else sum(received[:3]))
        check_received(dispatch(ranks, ep, case), case, ranks.rank)
