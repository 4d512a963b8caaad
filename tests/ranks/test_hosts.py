"""Ranks on two hosts with a network between them: the collective engine finds out, and moves fewer
bytes over it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import two_hosts


def without_hosts(reason: str) -> None:
    """Skip, but in CI: there a test that never runs would look like one that passes."""
    if os.environ.get("CI"):
        pytest.fail(
            f"two hosts cannot be made here: {reason}; install iproute2 and util-linux, and allow "
            f"namespaces"
        )
    pytest.skip(f"two hosts cannot be made here: {reason}")


def test_no_hosts_is_no_pass_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the tools, by which the script says so."""
    environment = {**os.environ, "PATH": str(tmp_path)}
    script = [sys.executable, two_hosts.__file__, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == two_hosts.NO_HOSTS
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"unshare.* not installed; install iproute2"):
        without_hosts(done.stderr.strip())
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="not installed"):
        without_hosts(done.stderr.strip())


def test_fewer_bytes_cross_the_network(tmp_path: Path) -> None:
    """As the engine counts them and as the kernel's counters of the cable do; hosts are detected,
    nothing is told.
    """
    script = [sys.executable, two_hosts.__file__, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode == two_hosts.NO_HOSTS:
        without_hosts(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(two_hosts.WORLD_SIZE)
    ]
    for name, topology in (("detected", "2x2"), ("flat", "1x4")):
        assert [each[name]["topology"] for each in found] == [topology] * two_hosts.WORLD_SIZE
        for host in range(two_hosts.HOSTS):
            mine = [
                each[name]
                for each in found[host * two_hosts.RANKS_EACH : (host + 1) * two_hosts.RANKS_EACH]
            ]
            counted = sum(each["sent"] for each in mine)
            # Besides rows: headers of ranks and of packets. Both ranks of a host look at the same
            # cable.
            assert all(counted < each["went"] < 1.25 * counted for each in mine), (
                name,
                host,
                counted,
                mine,
            )
    for detected, flat in ((each["detected"], each["flat"]) for each in found):
        for counter in ("sent", "went", "came"):
            assert detected[counter] < 0.75 * flat[counter], (counter, detected, flat)
