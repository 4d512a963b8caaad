"""One rank of two (``python fork_program.py FILE RANK``): rank 0 forks a child that comes to its
end as programs do; both go on.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import tokenyard as ty

LIMIT = 60.0


def ends(child: int) -> int:
    """The exit code of a child; that of SIGKILL if it does not end."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2
)
ep = ty.ExpertParallel(
    num_experts=4, hidden=8, num_topk=2, max_tokens_per_rank=8, timeout=4 * LIMIT
)
x, idx = torch.ones(3, 8), torch.tensor([[0, 3]] * 3)
recv = ep.dispatch(x, idx)
if dist.get_rank() == 0:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    print("the child's exit code:", ends(child))
assert torch.equal(ep.dispatch(x, idx).x, recv.x)
assert torch.equal(ep.combine(recv.x, recv.handle), 2 * x)
dist.barrier()
print("alive", flush=True)
os._exit(0)
