"""Host waits of engines on GPUs, told by stand-ins: Ctrl-C and reports of ranks that gave up end
them.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from cuda_streams import Machine
from tokenyard.calls import Calls
from tokenyard.engines.failures import IN_ORDER, FailureReports
from tokenyard.engines.group_transport import GroupTransport
from tokenyard.engines.status import Begun, StatusMonitor
from tokenyard.errors import PeerLost
from tokenyard.header import DISPATCH
from tokenyard.kernels import sync
from tokenyard.memory import aside, cuda
from tokenyard.memory.kernel_launch import wait_until

GPU = torch.device("cuda", 0)
PATIENT = 1e6


class Memory:
    """Of a GPU on which nothing ever comes to an end."""

    device, shared_gpu = GPU, False

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        return wait_until(ready, timeout)


def strike(when: Callable[[], bool] = lambda: True, seconds: float = 0.3) -> None:
    """Ctrl-C for the main thread, in a while."""

    def send() -> None:
        while not when():
            time.sleep(0.05)
        time.sleep(seconds)
        _thread.interrupt_main()

    threading.Thread(target=send, daemon=True).start()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(monkeypatch)
    monkeypatch.setattr(type(made.main), "query", lambda stream: False, raising=False)
    return made


def monitoring(store: Any, rank: int = 0) -> tuple[StatusMonitor, Any]:
    config: Any = SimpleNamespace(rank=rank, timeout=PATIENT)
    workspace: Any = SimpleNamespace(
        memory=Memory(), status=torch.zeros(sync.STATUS_WORDS).long(), state=torch.zeros(16).long()
    )
    monitor = StatusMonitor(config, workspace, FailureReports(store, rank, PATIENT))
    monitor._begun.append(Begun(DISPATCH, 3, 0, 0))
    return monitor, workspace


def test_ctrl_c_while_the_host_waits_for_counts(machine: Machine) -> None:
    """It is told to the others, and this rank's kernels are told to stop, by a stream that does not
    wait for them.
    """
    store = dist.HashStore()
    monitor, workspace = monitoring(store)
    made: list[Any] = []
    engine: Any = SimpleNamespace(
        waits_on_host=False,
        name="nvlink",
        calls_begun=3,
        decoder=None,
        interrupt=monitor.interrupt,
        close=lambda _: made.append(1),
    )
    config: Any = SimpleNamespace(rank=0, world_size=2, num_local_experts=1, padded_rows=1)
    calls = Calls(config, engine, torch.device("cpu"))
    strike()
    with pytest.raises(KeyboardInterrupt):
        calls.make("dispatch", monitor.wait, lambda: False)
    assert workspace.state[sync.GIVEN_UP.value] == 1
    with pytest.raises(
        RuntimeError, match=r"was interrupted in dispatch #3 \(KeyboardInterrupt\).*make a new one"
    ):
        calls.check_open()
    other, _ = monitoring(store, rank=1)
    with pytest.raises(PeerLost, match=r"rank 0 was interrupted in dispatch #3") as lost:
        other.wait(lambda: False)
    assert lost.value.rank == 0
    calls.close()
    assert made == [1]


def test_who_waits_for_the_device_hears_of_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels wait for rows of the rank that gave up, whose counts had come: they are told to
    stop.
    """
    over = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: over.wait(PATIENT))
    store = dist.HashStore()
    monitor, workspace = monitoring(store, rank=1)
    FailureReports(store, 0, 1.0).report("rank 0 was interrupted", 0)
    with pytest.raises(PeerLost, match="rank 0 was interrupted"):
        monitor.finish()
    assert workspace.state[sync.GIVEN_UP.value] == 1
    over.set()
    other, workspace = monitoring(dist.HashStore(), rank=1)
    other.finish()
    assert not workspace.state.any()


def test_a_wait_that_is_over_asks_nobody(machine: Machine) -> None:
    store = dist.HashStore()
    monitor, workspace = monitoring(store, rank=1)
    FailureReports(store, 0, 1.0).report("rank 0 was interrupted", 0)
    monitor.wait(lambda: True)
    assert not workspace.state.any()


def test_ctrl_c_over_the_group(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has not come: the host asks an event, not the tensor; who waits there too hears
    why.
    """
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    store, asked = dist.HashStore(), list[bool]()
    wires = [
        GroupTransport(cast("Any", None), GPU, "nccl", FailureReports(store, rank, PATIENT))
        for rank in range(2)
    ]
    strike(lambda: bool(asked))
    with pytest.raises(KeyboardInterrupt):
        wires[0]._wait(lambda: bool(asked.append(True)), "dispatch #3")
    wires[0].interrupt("rank 0 was interrupted in dispatch #3")
    with pytest.raises(PeerLost, match="rank 0 was interrupted in dispatch #3"):
        wires[1]._wait(lambda: False, "dispatch #3")


def test_an_error_inside_the_with_block_over_the_group(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives do not end by themselves: who waits in one hears why the other has left. A close
    in order ends nobody's wait.
    """
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    for why, ends in ((IN_ORDER, False), ("had left the with block by KeyError: 5", True)):
        store = dist.HashStore()
        reports = [FailureReports(store, rank, PATIENT) for rank in range(2)]
        GroupTransport(cast("Any", None), GPU, "nccl", reports[0]).close(why)
        found = reports[1].first()
        assert (found is not None and found.text == f"rank 0 {why}") == ends


def test_what_is_closed_while_kernels_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait for the GPU, not the life of memory that kernels use."""
    busy, inside = threading.Event(), threading.Event()
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: (inside.set(), busy.wait(PATIENT))
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "_HELD", [])
    memory: Any = SimpleNamespace(device=GPU, _kept=["region"])
    strike(inside.is_set)
    with pytest.raises(KeyboardInterrupt):
        cuda.CudaMemory.close(memory)
    assert cuda._HELD == [["region"]]
    cuda.CudaMemory.close(memory)
    busy.set()


def test_calls_aside_say_what_they_came_to() -> None:
    assert aside.wait_for(lambda: 5) == 5
    with pytest.raises(ValueError, match="mine"):
        aside.wait_for(lambda: int("mine"))
    helper = aside.Aside()
    begun = [helper.start(lambda at=at: at) for at in range(3)]
    assert [each.wait(PATIENT) and each.result() for each in begun] == [0, 1, 2]
    helper.close()
    again = helper.start(lambda: "again")
    assert again.wait(PATIENT) and again.result() == "again"
