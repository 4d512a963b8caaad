"""``tokenyard.deep_ep`` where only GPUs can show it: a rank that is killed, memory that streams
share. See ``make test-gpu``.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
from cases import skip_without_gpus
from deep_ep_calls import fresh
from deep_ep_world import World
from tokenyard import deep_ep
from tokenyard.deep_ep.natives import TIMEOUT_VARIABLE
from tokenyard.testing import Ranks, distributed_test
from tokenyard.testing.decorators import DEVICE_VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get(DEVICE_VARIABLE) != "cuda",
        reason="needs GPUs, a process for each: make test-gpu",
    ),
]
TIMEOUT = 2.0
MOST = 28


@distributed_test(world_size=2, engine="low_latency", may_die=(1,))
def test_without_masks_the_call_after_a_death_raises(ranks: Ranks) -> None:
    """The call that waited in vain completes on the device; the next one says who was silent, and
    so does every later one.
    """
    skip_without_gpus(ranks)
    world = World.of(ranks, "even", hidden=512)
    x, idx, weights = world.x[ranks.rank], world.idx[ranks.rank], world.weights[ranks.rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, str(TIMEOUT))
        buffer = deep_ep.Buffer(ranks.group, 0, 1 << 20, True)
        for _ in range(4):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, MOST, world.num_experts, use_fp8=False
            )
            assert handle.ep.engine == "low_latency"
            work = world.by_expert(ranks.rank, rows)
            out, _, _ = buffer.low_latency_combine(work, idx, weights, handle)
        assert torch.allclose(out.float(), world.weighted(ranks.rank), rtol=0.02, atol=0.03)
    dist.barrier()
    torch.cuda.synchronize()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    buffer.low_latency_dispatch(x, idx, MOST, world.num_experts, use_fp8=False)
    torch.cuda.synchronize()
    for hooked in (False, True):
        with pytest.raises(
            ty.PeerTimeout, match=r"rank 1 was silent for 2.0 s .*enable_shrink=True"
        ) as raised:
            buffer.low_latency_dispatch(x, idx, MOST, world.num_experts, return_recv_hook=hooked)
        assert raised.value.rank == 1
    buffer.destroy()


@distributed_test(world_size=(1, 2))
def test_items_of_a_handle_that_is_gone(ranks: Ranks) -> None:
    """An item is read late, on a stream that sleeps; by then its handle is gone and the next call
    has taken memory.
    """
    buffer = deep_ep.Buffer(ranks.group)
    worlds = [World.of(ranks, "even", seed=seed) for seed in range(4)]
    early = buffer.capture()
    for world in worlds:
        *results, event = fresh(buffer, world, async_finish=True)
        event.current_stream_wait()
        torch.cuda._sleep(100_000_000)
        source = results[4][3]
        del results
        for other in worlds:
            fresh(buffer, other, async_finish=True, previous_event=early)
        assert source.tolist() == [token for _, token in world.rows[ranks.rank]]
    torch.cuda.synchronize()
    buffer.destroy()
