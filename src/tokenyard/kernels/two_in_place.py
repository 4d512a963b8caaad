# pyright: basic
"""What dispatch and combine in place of the two-level engine share: when peers' in-place buffers
may be touched, and when all have been.

Ranks of one node write to each other's in-place buffers (``kernels/two_direct.py``), or read there
(``kernels/two_pull.py``). P workers in all on each.

Who publishes what, who may read when:

* An announcement says that a rank's stream has come to this call: what read its buffer before is
  over, and its own rows are there. So a worker touches in-place buffers only once it has seen all
  announcements (acquire) and all name the same call.
* A worker that has done all its tasks adds 1 to ``dones[me]`` at every rank of its node (release):
  behind all that it has written and read. Program 0 waits until all workers of all ranks of its
  node have done so, in this call and all earlier ones (acquire); first those of its own rank,
  without a deadline, as they have theirs. The kernel ends behind that, so later kernels may read
  the in-place buffer, and write to it.

Program 0 counts the call behind that wait, so workers may read its number at any time. Nobody waits
for program 0 meanwhile: its own tasks are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.call_barrier import count_call
from tokenyard.kernels.region import DIRECT_CALLS, peer_base, peer_word
from tokenyard.kernels.sync import ON_END, RANK, add_release, wait_beside, wait_for_all, words


@triton.jit
def end_in_place(regions, state, k: tl.constexpr):
    """A worker's end."""
    r, me = tl.arange(0, k.rank_bins), tl.load(words(state) + RANK).to(tl.int32)
    near = (r < k.ranks) & (r // k.grid.ranks_per_node == me // k.grid.ranks_per_node)
    calls = tl.load(words(state) + DIRECT_CALLS)
    bases = tl.load(words(regions) + r, mask=near, other=0)
    dones = peer_word(bases, "dones", me, k)
    add_release(dones, tl.full((k.rank_bins,), 1, tl.int64), near)
    if tl.program_id(0) == 0:
        dones = peer_word(peer_base(regions, me), "dones", r, k)
        want = (calls + 1) * tl.num_programs(0) + (r * 0)
        # this rank's workers have deadlines of their own, and know better whom they lack
        if wait_beside(dones, want, r == me, state):
            wait_for_all(dones, want, near, state, ON_END, r)
        count_call(state)
        tl.store(words(state) + DIRECT_CALLS, calls + 1)
