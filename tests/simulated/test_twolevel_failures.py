"""Engine twolevel when things go wrong, on simulated ranks with a simulated clock: nobody hangs,
and everybody is told why.

``make soak`` runs many times as many seeds of deaths, of hurried workers and of a rank that stays
away, and asks that all roles notice some death.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from nvlink_cases import FAILED_RANK, FINE, TIMEOUT
from nvlink_pool import SOAK, run_all, without_devices
from tokenyard.header import CACHED, COMBINE, DISPATCH

pytestmark = without_devices

DEATHS = {(2, 2): (4,), (3, 2): (5,)}
"""Seeds by nodes and ranks per node: in both parts of a life. ``make soak`` runs more."""
DEATHS_IN_PLACE = {(2, 2): (3,)} | ({(3, 2): ()} if SOAK > 1 else {})
"""The same, in calls in place. With those above other nodes are reached in each way."""
SHORT = range(3) if SOAK > 1 else range(1)
"""Seeds of what many cases have besides."""
SILENT = re.compile(
    r"rank (\d+) did not send (?:its part of the plan|its counts|its barrier signal|"
    r"(?:its )?rows(?: of rank \d+)?|its node's sums"
    rf"|the end of its rows|room for rows(?: of rank \d+)?) to rank (\d+) within {TIMEOUT} s "
    r"\((?:dispatch|cached dispatch|combine) #\d+, waiting for "
    r"(?:tickets|(?:arrivals|entered|dones)\[\d+\]"
    r"|(?:network )?(?:tails|heads)\[\d+, \d+\] \((sender|receiver|network "
    r"sender|forwarder|combiner|reducer)\)) "
    r"to reach \d+, it is \d+\)(; it had reported: .*)?(?:\. If it is only slow, .*)?"
)
ABSENT = re.compile(
    r"rank (\d+) waited [\d.]+ s in allocate\(\) for rank\(s\) \[([\d, ]+)\](; it had reported: "
    r".*)?"
)


def few_or_many(few: Sequence[int], nodes: int) -> Sequence[int]:
    return few if SOAK == 1 else range({2: 6, 3: 2}[nodes] * SOAK)


def roles_that_noticed(nodes: int, per_node: int, parts: list[tuple[int, int]]) -> set[str]:
    """Of all ranks that have learnt of a death, in life parts by (seed, part). Everybody names who
    died.
    """
    roles, noticed = set[str](), 0
    deaths = run_all(
        "twolevel_failures.death", [(nodes, per_node, seed, part) for seed, part in parts]
    )
    for (seed, part), (victim, when, endings) in zip(parts, deaths, strict=True):
        where = f"seed {seed}, part {part}, rank {victim} dies after {when} of 1000: {endings}"
        assert all(ending is not None or rank == victim for rank, ending in enumerate(endings)), (
            where
        )
        for rank, ending in enumerate(endings):
            if ending is None or ending == FINE:
                continue
            assert ending[0] == "PeerTimeout", where
            assert ending[2] == victim, where
            noticed += 1
            said = SILENT.fullmatch(ending[1])
            if said is None:
                absent = ABSENT.fullmatch(ending[1])
                assert absent is not None, where
                assert absent[1] == str(rank) and str(victim) in absent[2].split(", "), where
                continue
            assert said[2] == str(rank), where
            roles.add(said[3] or "")
    assert noticed > len(parts), "most deaths come in mid-life"
    return roles


@pytest.mark.parametrize(("nodes", "per_node"), DEATHS)
def test_a_rank_that_dies_is_named(nodes: int, per_node: int) -> None:
    """By all others, whichever role notices; who is one hop further learns it from the report of
    the one between.
    """
    seeds = few_or_many(DEATHS[nodes, per_node], nodes)
    roles = roles_that_noticed(nodes, per_node, [(seed, seed % 2) for seed in seeds])
    assert len(seeds) < 20 or roles >= {"receiver", "forwarder", "combiner", "reducer"}, roles


@pytest.mark.parametrize(("nodes", "per_node"), DEATHS_IN_PLACE)
def test_a_rank_that_dies_in_a_call_in_place_is_named(nodes: int, per_node: int) -> None:
    seeds = few_or_many(DEATHS_IN_PLACE[nodes, per_node], nodes)
    roles = roles_that_noticed(nodes, per_node, [(seed, 2) for seed in seeds])
    assert len(seeds) < 40 or roles >= {"", "forwarder", "reducer"}, roles


def test_a_counter_that_arrives_at_the_last_moment_leaves_nobody_without_a_reason() -> None:
    """A worker that has told the others to stop says whom it waited for, also if that has just
    come; never itself or nobody.
    """
    grids = [(2, 1, seed, seed % 2) for seed in range(2 * SOAK)] + [(2, 2, 65, 2)]
    if SOAK > 1:
        grids += [(2, 2, seed, part) for seed in range(SOAK) for part in (seed % 2, 2)]
        grids.append((3, 2, 49261, 2))
    at_last = 0
    for grid, endings in zip(grids, run_all("twolevel_failures.hurry", grids), strict=True):
        for rank, ending in enumerate(endings):
            assert ending is not None
            if ending == FINE:
                continue
            said = SILENT.fullmatch(ending[1])
            assert said is not None and int(said[2]) == rank != int(said[1]), (grid, ending)
            want, seen = re.findall(r"to reach (\d+), it is (\d+)", ending[1])[0]
            at_last += int(seen) >= int(want)
    assert at_last > 0


@pytest.mark.parametrize("op", [CACHED, COMBINE], ids=["dispatch", "combine"])
def test_a_rank_that_stays_away_from_a_call_in_place_is_named(op: int) -> None:
    """Not those that lack room or rows because all wait for its announcement."""
    for endings in run_all("twolevel_failures.absence", [(op, seed) for seed in range(SOAK)]):
        for rank, ending in enumerate(endings):
            assert rank == FAILED_RANK or (ending is not None and ending[2] == FAILED_RANK), (
                rank,
                ending,
            )


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ("exact", "hidden"),
        ("cached", "hidden"),
        ("combine", "dtype"),
        ("exact, in place", "in_place"),
        ("cached, in place", "in_place"),
        ("cached, both in place", "hidden"),
        ("combine, in place", "in_place"),
    ],
)
def test_ranks_in_different_calls_all_raise_mismatch(what: str, field: str) -> None:
    """Also those that hear of it through a node header or a tag from another node."""
    for endings in run_all("twolevel_failures.disagreement", [(what, seed) for seed in SHORT]):
        for rank, ending in enumerate(endings):
            assert ending is not None
            kind, text, _ = ending
            assert kind == "Mismatch", f"rank {rank}: {kind}: {text}"
            assert re.search(rf"ranks disagree on {field}\b", text), text


@pytest.mark.parametrize(
    ("op", "exact", "in_place"),
    [
        (*call, in_place)
        for at, call in enumerate(
            [(DISPATCH, True), (DISPATCH, False), (CACHED, True), (COMBINE, True)]
        )
        for in_place in (at % 2 == 1, at % 2 == 0)[:SOAK]
    ],
)
def test_a_refusal_reaches_all(op: int, exact: bool, in_place: bool) -> None:
    for endings in run_all(
        "twolevel_failures.refusal", [(op, exact, in_place, seed) for seed in SHORT]
    ):
        for rank, ending in enumerate(endings):
            assert ending is not None
            kind, text, _ = ending
            if rank == FAILED_RANK and op == DISPATCH and exact:
                assert ending == FINE
            elif rank == FAILED_RANK:
                assert (kind, "this rank refused" in text) == ("PeerError", True), text
            else:
                assert (kind, f"rank {FAILED_RANK} refused its side of" in text) == (
                    "PeerError",
                    True,
                ), text
