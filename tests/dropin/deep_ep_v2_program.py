"""A program as DeepEP V2's users write them, for either of its buffers: it knows nothing of
tokenyard, starts its ranks itself, and compares with DeepEP's own helpers.
"""

import sys

import deep_ep
import torch
import torch.distributed as dist
import torch.multiprocessing
from deep_ep.utils.envs import dist_print, get_global_seed, get_local_seed, init_dist
from deep_ep.utils.gate import get_unbalanced_scores
from deep_ep.utils.math import count_bytes, per_token_cast_to_fp8
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data, ordered_accumulate

TOKENS, HIDDEN, EXPERTS, PICKS = 32, 256, 8, 3


def check_exchange(buffer, rank: int, size: int) -> None:
    """Rows, ids, weights and sums are those of plain collectives, bit for bit (two terms have one
    sum in either order).
    """
    count = TOKENS - 5 * rank
    scores = get_unbalanced_scores(count, EXPERTS, size, PICKS, 1.5, False)
    weights, idx = scores.topk(PICKS, dim=1)
    idx = idx.to(deep_ep.topk_idx_t)
    idx[torch.rand(idx.shape) < 0.2] = -1
    weights = weights.masked_fill(idx < 0, 0.0)
    data = torch.randn(count, HIDDEN)
    assert data.dtype == torch.bfloat16  # the default, as DeepEP's programs have it
    for x in (data, per_token_cast_to_fp8(data)):
        recv, *facts, handle, event = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, expert_alignment=1
        )
        want, *known, sources, counts = dispatch(x, idx, weights, TOKENS, EXPERTS)
        known[1] = known[1].masked_fill(known[0] < 0, 0.0)
        pairs = zip(recv, want, strict=True) if isinstance(x, tuple) else [(recv, want)]
        assert all(torch.equal(a.float(), b.float()) for a, b in pairs) and event.event is None
        assert torch.equal(facts[0], known[0]) and torch.equal(facts[1], known[1])
        assert torch.equal(handle.recv_src_metadata[:, 0].int(), sources)
        assert int(counts.sum()) == len(sources) == handle.num_recv_tokens
        assert count_bytes(recv, None) == count_bytes(want)
    made = generate_pre_combine_data(sources, TOKENS, PICKS, HIDDEN)
    made[known[0] < 0] = 0
    mine = generate_pre_combine_data(torch.arange(count) + rank * TOKENS, TOKENS, PICKS, HIDDEN)
    mine[idx < 0] = 0
    for bias in (None, torch.ones(count, HIDDEN)):
        sums = combine(mine, idx, 1, size, EXPERTS, bias, True, False)
        assert torch.equal(buffer.combine(ordered_accumulate(made), handle, bias=bias)[0], sums)


def check_load_balance(group, rank: int, size: int) -> None:
    """Each rank lends its first expert to the next rank, and gets a gradient back."""
    plan = deep_ep.BufferAllocator()
    room = plan.allocate((1, deep_ep.get_num_tma_alignment()), torch.uint8)
    buffer = deep_ep.EPBuffer(
        group,
        num_bytes=deep_ep.get_num_allocation_alignment(),
        lb_allocation_plan_or_num_bytes=plan,
        explicitly_destroy=True,
    )
    assert isinstance(buffer, deep_ep.BufferBase) and buffer.num_lb_bytes == plan.num_bytes
    borrowed = torch.arange(size, dtype=torch.int32).roll(1)[:, None]
    own = torch.full((1, 32), rank + 1, dtype=torch.uint8)
    buffer.lb_prefetch_weights(room, own, borrowed, previous_event=buffer.capture()).wait()
    assert (room == 1 + (rank - 1) % size).all()
    grads = torch.ones(1, 32, dtype=torch.float32)
    lent = torch.full((1, 32), rank, dtype=torch.float32)
    buffer.lb_reduce_grads(lent, grads, borrowed, num_sms=buffer.lb_get_theoretical_num_sms())
    assert (grads == 1 + (rank + 1) % size).all()
    buffer.destroy()


def main(local_rank: int, num_local_ranks: int) -> None:
    rank, size, group = init_dist(local_rank, num_local_ranks, seed=7)
    assert (rank, size) == (local_rank, num_local_ranks)
    assert (get_global_seed(), get_local_seed()) == (7, 7 + rank)
    newest = hasattr(deep_ep, "EPBuffer")
    buffer = (deep_ep.EPBuffer if newest else deep_ep.ElasticBuffer)(
        group,
        num_max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        num_topk=PICKS,
        explicitly_destroy=True,
    )
    assert deep_ep.get_physical_domain_size(group) == buffer.get_physical_domain_size() == (1, size)
    with torch.inference_mode():
        check_exchange(buffer, rank, size)
        if newest:
            deep_ep.comm.barrier(buffer, with_cpu_sync=True)
            assert deep_ep.comm.get_logical_domain_size(buffer) == (1, size)
            check_load_balance(group, rank, size)
    buffer.destroy()
    dist_print(f"all ranks agree {sys.argv[1:]}", once_in_node=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(2,), nprocs=2)
