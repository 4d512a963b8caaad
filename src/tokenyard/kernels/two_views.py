# pyright: basic
"""What dispatch and combine in place of the two-level engine share: when peers' views may be touched, and when all have been.

Ranks of one node write to each other's views (``kernels/two_direct.py``), or read there (``kernels/two_pull.py``). P workers in all on each.

Who publishes what, who may read when:

* A greeting says that a rank's stream has come to this call: what read its view before is over, and its own rows are there. So a worker
  touches views only once it has seen all greetings (acquire) and all name the same call.
* A worker that has done all its tasks adds 1 to ``dones[me]`` at every rank of its node (release): behind all that it has written and read.
  Program 0 waits until all workers of all ranks of its node have done so, in this call and all earlier ones (acquire); first those of
  its own rank, without a deadline, as they have theirs. The kernel ends behind that, so later kernels may read the view, and write to it.

Program 0 counts the call behind that wait, so workers may read its number at any time. Nobody waits for program 0 meanwhile: its own tasks are done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard.kernels.greet import count_call
from tokenyard.kernels.region import DIRECT_CALLS, done_of, peer_base
from tokenyard.kernels.sync import ON_END, RANK, add_release, wait_beside, wait_for_all, words


@triton.jit
def end_in_views(peers, state, programs, R: tl.constexpr, P: tl.constexpr, C: tl.constexpr, RP: tl.constexpr):
    """A worker's end. ``programs``: workers of a rank."""
    r, me = tl.arange(0, RP), tl.load(words(state) + RANK).to(tl.int32)
    near = (r < R) & (r // P == me // P)
    calls = tl.load(words(state) + DIRECT_CALLS)
    bases = tl.load(words(peers) + r, mask=near, other=0)
    add_release(done_of(bases, me, R, C), tl.full((RP,), 1, tl.int64), near)
    if tl.program_id(0) == 0:
        dones, want = done_of(peer_base(peers, me), r, R, C), (calls + 1) * programs + (r * 0)
        if wait_beside(dones, want, r == me, state):  # this rank's workers have deadlines of their own, and know better whom they lack
            wait_for_all(dones, want, near, state, ON_END, r, MORE=False)
        count_call(state)
        tl.store(words(state) + DIRECT_CALLS, calls + 1)
