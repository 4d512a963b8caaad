"""``tokenyard plan``: which GPU, which clock and which column its figures come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenyard.cli import app
from tokenyard.cli.consoles import bytes_text
from tokenyard.cli.plan_command import us_text
from tokenyard.planner.model import (
    collective_call,
    flat_call,
    nvlink_combine,
    nvlink_dispatch,
    nvlink_in_place,
    twolevel_combine,
    twolevel_dispatch,
)
from tokenyard.planner.prediction import plan
from tokenyard.planner.rates import HOPPER
from tokenyard.planner.record import read
from tokenyard.planner.sizes import nvlink_sizes, twolevel_sizes
from tokenyard.planner.traffic import Traffic, traffic
from tokenyard.planner.workload import Workload

MANY = Workload(nodes=4, gpus_per_node=8, tokens=4096, hidden=7168, experts=256, topk=8)
FLOWS = ("nvlink", "nic", "flat_nvlink", "flat_nic", "own")


def only(rows: Traffic, kept: str) -> Traffic:
    """Without what the other GPUs have (``kept`` is "busiest"), or without the busiest one
    ("mean").
    """
    return replace(rows, **{name: replace(getattr(rows, name), **{kept: 1.0}) for name in FLOWS})


def test_the_busiest_gpu_sets_every_time() -> None:
    rows = traffic(MANY, "zipf")
    assert rows.flat_nic.busiest > 1.2 * rows.flat_nic.mean
    one, sizes, inner = (
        replace(MANY, nodes=1),
        twolevel_sizes(MANY),
        nvlink_sizes(replace(MANY, nodes=1)),
    )
    calls = HOPPER.collective, HOPPER.collective_back
    calls = [
        *(
            lambda rows, call=call: call(one, rows, inner, HOPPER)
            for call in (nvlink_dispatch, nvlink_in_place, nvlink_combine)
        ),
        *(
            lambda rows, call=call: call(MANY, rows, sizes, HOPPER)
            for call in (twolevel_dispatch, twolevel_combine)
        ),
        *(
            lambda rows, call=call: collective_call(MANY, rows, call, MANY.row_bytes, HOPPER)
            for call in calls
        ),
        *(
            lambda rows, call=call: flat_call(MANY, rows, call, MANY.row_bytes, HOPPER)
            for call in calls
        ),
    ]
    for call in calls:
        assert call(rows) == call(only(rows, "mean"))
        assert call(rows).us > 1.5 * call(only(rows, "busiest")).us


def test_rows_come_back_as_bf16() -> None:
    """Whatever they were sent as."""
    rows, sizes, inner = (
        traffic(MANY, "zipf"),
        twolevel_sizes(MANY),
        nvlink_sizes(replace(MANY, nodes=1)),
    )
    fp8 = replace(MANY, dtype="fp8")
    assert twolevel_combine(fp8, rows, sizes, HOPPER) == twolevel_combine(MANY, rows, sizes, HOPPER)
    assert (
        twolevel_dispatch(fp8, rows, sizes, HOPPER).us
        < twolevel_dispatch(MANY, rows, sizes, HOPPER).us
    )
    assert nvlink_combine(fp8, rows, inner, HOPPER) == nvlink_combine(MANY, rows, inner, HOPPER)


@pytest.mark.parametrize("nodes", [1, 4])
def test_tables_hold_what_their_heads_say(nodes: int) -> None:
    done = CliRunner().invoke(app, ["plan", "--nodes", str(nodes)])
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "Call Engine Routing Time NVLink NIC Programs Latency Fill Bound by" in lines
    assert "Call Engine Routing NVLink mean NIC mean" in lines
    found = plan(replace(MANY, nodes=nodes), HOPPER, skews=("uniform", "zipf"))
    flows = [call.nic if nodes > 1 else call.nvlink for call in found.calls]
    assert any(flow.busiest > 1.05 * flow.mean for flow in flows)
    for call in found.calls:
        name, terms = f"{call.name} {call.dtype} {call.engine} {call.skew}", call.terms
        times = (terms.us, terms.nvlink, terms.nic, terms.programs, terms.latency, terms.fill)
        assert f"{name} {' '.join(map(us_text, times))} {terms.bound}" in lines
        sizes = (call.nvlink.busiest, call.nvlink.mean, call.nic.busiest, call.nic.mean)
        assert f"{name} {' '.join(map(bytes_text, sizes))}" in lines
    calls = (
        HOPPER.dispatch,
        HOPPER.in_place,
        HOPPER.combine,
        HOPPER.collective,
        HOPPER.collective_back,
    )
    there, in_place, back, first, second = (round(call.link_gbs) for call in calls)
    rates = (
        f"Dispatch {there} GB/s, in place {in_place}, combine {back}, collective {first} and "
        f"{second}; NIC 45 GB/s, 5 us, 0.1 us per put."
    )
    assert any(line.startswith("Rates ") and line.endswith(rates) for line in lines)


@pytest.mark.parametrize(
    ("device", "us"), [({"median": 5.0, "min": 4.0, "p99": 6.0}, 5.0), (None, 8.0)]
)
def test_a_record_is_read_by_the_median_on_the_device(
    device: dict[str, float] | None, us: float, tmp_path: Path
) -> None:
    job = {
        "tokens": 64,
        "hidden": 256,
        "topk": 2,
        "experts": 8,
        "skew": "uniform",
        "dtype": "bf16",
        "layout": "flat",
    }
    row = {
        "job": {**job, "quantize": "none"},
        "name": "tokenyard nvlink",
        "phase": "combine",
        "sms": None,
    }
    path = tmp_path / "record.json"
    row |= {"device": device, "wall": {"median": 8.0, "min": 7.0, "p99": 9.0}}
    path.write_text(json.dumps({"devices": ["a", "b"], "rows": [row]}))
    assert [(point.call, point.us) for point in read(path)] == [("combine", us)]
