"""Counters of an object, without one: what goes where, and what crosses a wire."""

from __future__ import annotations

from math import isnan

import pytest

from tokenyard.stats import Stats, Traffic


def counted() -> Stats:
    """Rank 1 of 2x2 after an exchange of rows of 10 bytes, 1 to rank 0, 2 to itself, ... and 50
    from rank 0, 60 from itself, ...
    """
    stats = Stats.zeros(1, 4, [0, 0, 1, 1])
    stats.record("dispatch", [1, 2, 3, 4], [50, 60, 70, 80], 10, [0.1, 0.2, 0.3, 0.4])
    return stats


def test_own_rows_count_and_cross_no_wire() -> None:
    stats = counted()
    assert (stats.rows_sent, stats.rows_received) == ([1, 2, 3, 4], [50, 60, 70, 80])
    assert (stats.bytes_sent, stats.bytes_received) == ([10, 0, 30, 40], [500, 0, 700, 800])
    assert stats.calls == {"dispatch": 1} and stats.last_wait == [0.1, 0.2, 0.3, 0.4]


def test_across_and_inside_are_other_ranks() -> None:
    """Rows and bytes, sent and received; of the own node without this rank."""
    stats = counted()
    assert stats.across == Traffic(
        rows_sent=7, rows_received=150, bytes_sent=70, bytes_received=1500
    )
    assert stats.inside == Traffic(rows_sent=1, rows_received=50, bytes_sent=10, bytes_received=500)
    alone = Stats.zeros(0, 3)
    alone.record("dispatch", [1, 2, 3], [4, 5, 6], 1, [0.0] * 3)
    assert (alone.nodes, alone.across, alone.inside) == (
        [0] * 3,
        Traffic(0, 0, 0, 0),
        Traffic(5, 11, 5, 11),
    )


def test_exchanges_add_up_by_name() -> None:
    stats = counted()
    stats.record("combine", [50, 60, 70, 80], [1, 2, 3, 4], 100, [1.0, 2.0, 3.0, 4.0])
    stats.record("dispatch", [0, 0, 0, 1], [0] * 4, 1, [5.0] * 4)
    assert stats.calls == {"dispatch": 2, "combine": 1}
    assert (stats.rows_sent, stats.rows_received) == ([51, 62, 73, 85], [51, 62, 73, 84])
    assert (stats.bytes_sent, stats.bytes_received) == ([5010, 0, 7030, 8041], [600, 0, 1000, 1200])
    assert stats.last_wait == [5.0] * 4


def test_what_the_host_does_not_learn_counts_as_a_call() -> None:
    stats = counted()
    stats.record_unknown("cached dispatch")
    assert stats.calls == {"dispatch": 1, "cached dispatch": 1}
    assert (
        stats.rows_sent == [1, 2, 3, 4]
        and all(map(isnan, stats.last_wait))
        and len(stats.last_wait) == 4
    )


def test_a_copy_stays_as_it_was() -> None:
    """And so does what was counted with lists that the caller goes on using."""
    stats, waits = counted(), [0.0] * 4
    stats.record("combine", [0] * 4, [0] * 4, 1, waits)
    copy = stats.copy()
    stats.record("combine", [1] * 4, [1] * 4, 1, [9.0] * 4)
    stats.calls["x"] = 1
    waits[0] = 7.0
    assert copy.calls == {"dispatch": 1, "combine": 1}
    assert (copy.rows_sent, copy.bytes_received, copy.last_wait) == (
        [1, 2, 3, 4],
        [500, 0, 700, 800],
        [0.0] * 4,
    )


def test_lists_are_not_shared() -> None:
    stats = Stats.zeros(0, 2)
    stats.record("dispatch", [1, 2], [3, 4], 5, [0.0] * 2)
    assert (stats.rows_sent, stats.rows_received, stats.bytes_sent, stats.bytes_received) == (
        [1, 2],
        [3, 4],
        [0, 10],
        [0, 20],
    )
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        stats.record("dispatch", [1, 2], [3], 5, [0.0] * 2)


def test_waits_and_totals_as_prometheus_reads_them() -> None:
    stats = Stats.zeros(1, 2)
    stats.record("dispatch", [1, 2], [3, 4], 10, [0.0, 0.0])
    stats.record_unknown("combine")
    stats.waits["dispatch, counts"] = [0.5, 0.0]
    before = stats.copy()
    stats.waits["dispatch, counts"][0] = 9.0
    stats.waits["combine, rows"] = [1.0, 1.0]
    stats.calls["combine"] = 7
    mine = 'rank="1",layer="a\\\\\\"b\\nc"'
    assert before.prometheus(layer=3) == before.prometheus(layer="3")
    assert before.prometheus(layer='a\\"b\nc').splitlines() == [
        "# TYPE tokenyard_calls_total counter",
        f'tokenyard_calls_total{{{mine},op="dispatch"}} 1',
        f'tokenyard_calls_total{{{mine},op="combine"}} 1',
        "# TYPE tokenyard_rows_total counter",
        f'tokenyard_rows_total{{{mine},direction="sent",peer="0"}} 1',
        f'tokenyard_rows_total{{{mine},direction="sent",peer="1"}} 2',
        f'tokenyard_rows_total{{{mine},direction="received",peer="0"}} 3',
        f'tokenyard_rows_total{{{mine},direction="received",peer="1"}} 4',
        "# TYPE tokenyard_bytes_total counter",
        f'tokenyard_bytes_total{{{mine},direction="sent",peer="0"}} 10',
        f'tokenyard_bytes_total{{{mine},direction="sent",peer="1"}} 0',
        f'tokenyard_bytes_total{{{mine},direction="received",peer="0"}} 30',
        f'tokenyard_bytes_total{{{mine},direction="received",peer="1"}} 0',
        "# TYPE tokenyard_wait_seconds_total counter",
        f'tokenyard_wait_seconds_total{{{mine},for="dispatch, counts",source="0"}} 0.5',
        f'tokenyard_wait_seconds_total{{{mine},for="dispatch, counts",source="1"}} 0.0',
    ]
    for name in ("rank", "source", "a b", "1st", "\u00e4", "__name__"):
        with pytest.raises(ValueError, match="must be a word"):
            before.prometheus(**{name: "1"})
