"""A program as DeepEP's users write them: it knows nothing of tokenyard, and starts its ranks
itself.
"""

import inspect
import sys

import deep_ep
import deep_ep_cpp
import torch
import torch.distributed as dist
import torch.multiprocessing
from deep_ep.buffer import Buffer
from deep_ep.utils import EventHandle, EventOverlap

from deep_ep_world import World


def main(rank: int, num_ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=num_ranks, rank=rank)
    torch.set_default_dtype(torch.bfloat16)
    group = dist.new_group(list(range(num_ranks)))
    world = World(num_ranks)
    buffer = deep_ep.Buffer(
        group, int(1e9), 0, low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True
    )
    per_rank, _, per_expert, in_ranks, _ = buffer.get_dispatch_layout(
        world.idx[rank], world.num_experts
    )
    recv_x, idx, _, counts, handle, event = buffer.dispatch(
        x=world.x[rank],
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_ranks,
        num_tokens_per_expert=per_expert,
        config=deep_ep.Config(24, 8, 256),
        topk_idx=world.idx[rank].to(deep_ep.topk_idx_t),
        topk_weights=world.weights[rank].float(),
        async_finish=True,
        previous_event=EventOverlap(EventHandle()),
    )
    event.current_stream_wait()
    start = 0
    for source in range(num_ranks):
        end = handle[0][source][rank].item()
        assert torch.equal(recv_x[start:end], world.take(rank, world.x)[start:end])
        start = end
    assert (
        start == recv_x.size(0)
        and counts == world.counts(rank)
        and torch.equal(idx, world.local_idx(rank))
    )
    assert torch.equal(
        buffer.combine(world.work(rank, recv_x), handle)[0].float(), world.combined(rank)
    )
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert (
        Buffer is deep_ep.Buffer
        and deep_ep_cpp.EventHandle is EventHandle
        and deep_ep_cpp.Config is deep_ep.Config
    )
    assert "topk_idx" in inspect.signature(Buffer.dispatch).parameters
    torch.multiprocessing.spawn(main, args=(2, sys.argv[1]), nprocs=2)
    print("all ranks agree", sys.argv[2:])
