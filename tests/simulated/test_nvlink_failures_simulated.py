"""Engine nvlink when things go wrong, on simulated ranks with a simulated clock: nobody hangs, and
everybody is told why.

``make soak`` runs many times as many seeds of deaths and of plans that have hardly time.
"""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nvlink_cases import DISAGREEMENTS, FAILED_RANK, FINE, TIMEOUT, Ending
from nvlink_failures import QUEUE
from nvlink_pool import SOAK, run_all, seeds, without_devices
from tokenyard.engines.failures import FailureReports
from tokenyard.engines.status import StatusMonitor
from tokenyard.errors import PeerTimeout
from tokenyard.header import CACHED, COMBINE, DISPATCH, OPS

pytestmark = without_devices

DEATHS = {2: 2, 3: 5 if SOAK == 1 else 6, 4: 1}
"""Seeds by world size."""
SHORT = range(3) if SOAK > 1 else range(1)
"""Seeds of what many cases have besides."""
SILENT = re.compile(
    r"rank (\d+) did not send (?:its part of the plan|its counts|its barrier signal|its rows|"
    r"room for rows|the end of its rows) "
    rf"to rank (\d+) within {TIMEOUT} s \((?:dispatch|cached dispatch|combine) #\d+, waiting for "
    r"(?:tickets|(?:arrivals|entered|dones)\[\d+\]|"
    r"(?:tails|heads|landed)\[\d+, \d+\](?: \((?:sender|receiver|reducer)\))?) "
    r"to reach \d+, it is \d+\)(; it had reported: .*)?(?:\. If it is only slow, .*)?"
)
ABSENT = re.compile(r"rank (\d+) waited [\d.]+ s in allocate\(\) for rank\(s\) \[(\d+)\]")


@cache
def deaths(world_size: int, tried: range) -> list[tuple[int, int, list[Ending | None]]]:
    """Who dies when, and how all end."""
    return run_all("nvlink_failures.death", [(world_size, seed) for seed in tried])


def relayed(world_size: int, tried: range) -> int:
    """How many ranks learnt from another's report whom that one had waited for. All name
    who died.
    """
    reports = 0
    for seed, (victim, when, endings) in zip(tried, deaths(world_size, tried), strict=True):
        where = f"seed {seed}, rank {victim} dies after {when} of 1000: {endings}"
        assert all(ending is not None or rank == victim for rank, ending in enumerate(endings)), (
            where
        )
        for rank, ending in enumerate(endings):
            if ending is None or ending == FINE:
                continue
            assert ending[0] == "PeerTimeout", where
            assert ending[2] == victim, where
            said = SILENT.fullmatch(ending[1])
            told = (
                (said[2], said[1], said[3])
                if said
                else (*ABSENT.fullmatch(ending[1]).groups(), None)
            )
            assert told[0] == str(rank), where
            assert told[1] == str(victim) or f"rank {victim} did not send" in told[2], where
            reports += told[2] is not None
    return reports


@pytest.mark.parametrize("world_size", DEATHS, ids="ranks{}".format)
def test_a_rank_that_dies_is_named(world_size: int) -> None:
    """By all others: who waits for one that gave up itself learns from its report whom that one
    waited for.
    """
    relayed(world_size, seeds(DEATHS[world_size]))


def test_reports_are_relayed() -> None:
    """What the test above relies on. It takes a death between the rows to two others: one seed of
    40 has one, with kernels as they are now seed 40."""
    batches = [range(40, 41), *(range(begin, begin + 24) for begin in range(0, 336, 24))]
    assert any(relayed(3, tried) for tried in batches)


def test_a_call_that_returns_has_a_complete_plan() -> None:
    """Even if its deadline passes about when the last counts come: one program tells the host,
    another completes the plan.
    """
    returned = run_all("nvlink_failures.hurried", [(seed,) for seed in range(216, 216 + 16 * SOAK)])
    assert {one for each in returned for one in each} == {True, False}


def test_deaths_are_noticed() -> None:
    """What the test above relies on: deaths in mid-life leave no survivor with all its results."""
    seen = deaths(3, seeds(DEATHS[3]))[:8]
    early = [endings for _, when, endings in seen if when < 700]
    assert len(early) > 3
    for endings in early:
        assert FINE not in endings


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_in_different_calls_all_raise_mismatch(name: str) -> None:
    for endings in run_all(
        "nvlink_failures.disagreement", [(name, seed) for seed in range(min(SOAK, 2))]
    ):
        for rank, ending in enumerate(endings):
            assert ending is not None
            kind, text, _ = ending
            assert kind == "Mismatch", f"rank {rank}: {kind}: {text}"
            assert re.search(rf"ranks disagree on {DISAGREEMENTS[name]}\b", text), text


def test_an_object_outlives_a_mismatch_that_moved_no_rows() -> None:
    for endings in run_all("nvlink_failures.disagreement_and_on", [(seed,) for seed in SHORT]):
        assert endings == [FINE] * 3


@pytest.mark.parametrize(
    ("op", "exact"),
    [(DISPATCH, True), (DISPATCH, False), (CACHED, True), (COMBINE, True)],
    ids=["exact", "static", "cached", "combine"],
)
def test_a_refusal_reaches_all(op: int, exact: bool) -> None:
    for endings in run_all("nvlink_failures.refusal", [(op, exact, seed) for seed in SHORT]):
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


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
def test_counts_that_cannot_be(exact: bool) -> None:
    for endings in run_all("nvlink_failures.impossible_counts", [(exact, seed) for seed in SHORT]):
        for ending in endings:
            assert ending is not None
            kind, text, _ = ending
            assert kind == "PeerError", text
            assert re.match(
                rf"rank {FAILED_RANK} announced (impossible counts: |6 rows in dispatch #0)", text
            ), text


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "static"])
def test_an_expert_that_is_not_there(exact: bool) -> None:
    """The rank's own ValueError; with exact shapes the others learn of it. All go on."""
    for endings in run_all("nvlink_failures.bad_index", [(exact, seed) for seed in SHORT]):
        for rank, ending in enumerate(endings):
            assert ending is not None
            kind, text, _ = ending
            if rank == FAILED_RANK:
                assert kind == "ValueError", text
                assert (
                    text == 'topk_idx[1, 0] is 6, but there are 6 experts (use -1 for "no expert")'
                )
            elif exact:
                assert (kind, "refused its side of this call: topk_idx[1, 0] is 6" in text) == (
                    "PeerError",
                    True,
                ), text
            else:
                assert ending == FINE


def test_the_call_that_failed_is_named_though_others_are_queued_behind_it() -> None:
    """Engines nvlink and twolevel; on a GPU the host is ahead."""
    jobs = [
        (nodes, number)
        for nodes in (0, 2)
        for number in range(2, 8)
        if SOAK > 1 or (number + nodes // 2) % 6 == 0
    ]
    for (_, number), endings in zip(
        jobs, run_all("twolevel_failures.queued_on", jobs), strict=True
    ):
        assert endings.pop(FAILED_RANK) == FINE
        for name, text, rank in filter(None, endings):
            op = OPS[QUEUE[number - 2]]
            assert (
                name == "PeerTimeout"
                and rank == FAILED_RANK
                and f"({op} #{number}, waiting for" in text
            ), text


def test_a_rank_that_closed_in_order_is_told_from_one_that_died() -> None:
    """Engine nvlink; ``make soak``: and twolevel."""
    jobs = [(nodes, 4, True) for nodes in (0, 2)[:SOAK]]
    for endings in run_all("twolevel_failures.queued_on", jobs):
        assert endings.pop(FAILED_RANK) == FINE
        for name, text, rank in filter(None, endings):
            assert name == "PeerTimeout" and rank == FAILED_RANK, text
            assert f"it had reported: rank {FAILED_RANK} had closed its ExpertParallel" in text, (
                text
            )


def test_who_waits_for_memory_with_one_that_gave_up_names_whom_that_one_lost() -> None:
    store = dist.HashStore()
    FailureReports(store, 1, 1.0).report("rank 3 did not send its rows", 3)
    for first, failed_rank in ((1, 3), (2, 2)):
        watch: Any = SimpleNamespace(_failures=FailureReports(store, 0, 0.1))
        lost = StatusMonitor.attributed(
            watch, PeerTimeout(f"rank 0 waited 5.0 s for rank(s) [{first}, 3]", first)
        )
        assert lost.rank == failed_rank
        assert ("it had reported: rank 3 did not send its rows" in str(lost)) == (first == 1)
