"""Feed EXPERT_MAJOR rows to torch's grouped matrix product: all local experts in one call.

    torchrun --nproc-per-node 2 examples/grouped_matmul.py     # or: python
    examples/grouped_matmul.py

Rows arrive sorted by expert, each expert's block aligned as the grouped kernel wants it, and
``recv.expert_offsets[1:]`` are the ends of the blocks. Padding rows are zeros, so their product is
zero and combine never reads it.
"""

import torch

import tokenyard as ty
from tokenyard import launch

TOKENS, HIDDEN, FFN, EXPERTS, TOPK, ALIGNMENT = 128, 256, 512, 16, 4, 16


def layer(
    ep: ty.ExpertParallel,
    x: torch.Tensor,
    router: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Top-k MoE layer; ``up [L, H, F]`` and ``down [L, F, H]`` belong to this rank's experts."""
    weights, picks = (x @ router).float().softmax(-1).topk(TOPK)
    recv = ep.dispatch(x, picks, weights, layout=ty.Layout.EXPERT_MAJOR, expert_alignment=ALIGNMENT)
    ends = recv.expert_offsets[1:]
    inner = torch.nn.functional.silu(torch._grouped_mm(recv.x, up, offs=ends))
    return ep.combine(torch._grouped_mm(inner, down, offs=ends), recv.handle, weighted=True)


def main(device: torch.device) -> None:
    """One forward and backward on this rank, compared with a loop over experts."""
    torch.manual_seed(0)  # the same weights on every rank, of which each uses its share
    router = torch.randn(HIDDEN, EXPERTS, device=device).bfloat16() / HIDDEN**0.5
    up = torch.randn(EXPERTS, HIDDEN, FFN, device=device).bfloat16() / HIDDEN**0.5
    down = torch.randn(EXPERTS, FFN, HIDDEN, device=device).bfloat16() / FFN**0.5
    with ty.ExpertParallel(
        num_experts=EXPERTS, hidden=HIDDEN, num_topk=TOPK, max_tokens_per_rank=TOKENS
    ) as ep:
        torch.manual_seed(1 + ep.rank)
        x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16().requires_grad_()
        bounds = ty.expert_bounds(EXPERTS, ep.world_size)
        mine = slice(bounds[ep.rank], bounds[ep.rank + 1])
        y = layer(
            ep, x, router, up[mine].clone().requires_grad_(), down[mine].clone().requires_grad_()
        )
        y.float().square().mean().backward()
        weights, picks = (x @ router).float().softmax(-1).topk(TOPK)
        want = torch.zeros(TOKENS, HIDDEN, device=device)
        for k in range(TOPK):
            inner = torch.nn.functional.silu(torch.einsum("th,thf->tf", x, up[picks[:, k]]))
            want += weights[:, k : k + 1] * torch.einsum("tf,tfh->th", inner, down[picks[:, k]])
        error = ((y - want).norm() / want.norm()).item()
        print(
            f"rank {ep.rank}: {ep.why}; relative error {error:.1e}, gradient norm "
            f"{x.grad.float().norm().item():.3f}"
        )
        assert error < 2e-2, error


if __name__ == "__main__":
    if launch.under_torchrun():
        with launch.joined_by_launcher() as device:
            main(device)
    else:
        launch.spawn(main, 2)
