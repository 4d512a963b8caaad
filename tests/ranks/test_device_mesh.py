"""``ExpertParallel`` takes a ``DeviceMesh`` of one dimension for a group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh

from bad_input import assert_works, check, error_of, make
from nvlink_pool import without_devices
from tokenyard.testing import Ranks, distributed_test

pytestmark = without_devices


@distributed_test(world_size=(2, 4))
def test_meshes(ranks: Ranks) -> None:
    """A whole mesh, one dimension of a larger one, and one that this process is not in."""
    size, rank = ranks.world_size, ranks.rank
    kind = ranks.device.type
    whole = init_device_mesh(kind, (size,))
    with make(ranks, group=whole) as ep:
        assert ep.group is whole.get_group() and (ep.rank, ep.world_size) == (rank, size)
        assert_works(ranks, ep)
    grid = init_device_mesh(kind, (2, size // 2), mesh_dim_names=("dp", "ep"))
    with make(ranks, group=grid["ep"]) as ep:
        assert dist.get_process_group_ranks(ep.group) == list(
            range(rank - rank % (size // 2), rank - rank % (size // 2) + size // 2)
        )
        x = torch.full((3, ep.config.hidden), float(rank))
        picks = torch.zeros(3, ep.config.num_topk, dtype=torch.int64)
        recv = ep.dispatch(x, picks)
        assert torch.equal(ep.combine(recv.x, recv.handle), x)
    words = ("group is a DeviceMesh of 2 dimensions ('dp', 'ep')", "mesh['ep']")
    check(error_of(lambda: make(ranks, group=grid)), ValueError, *words)
    bare = init_device_mesh(kind, (1, size))
    words = ("DeviceMesh of 2 dimensions (without names, [1,", "mesh.get_group(1)")
    check(error_of(lambda: make(ranks, group=bare)), ValueError, *words)
    first = DeviceMesh(kind, torch.tensor([0]))
    error = error_of(lambda: make(ranks, group=first).close())
    assert (error is None) == (rank == 0)
    if rank:
        check(error, ValueError, "not a member of the group")
    check(error_of(lambda: make(ranks, group="ep")), ValueError, "group ('ep')", "DeviceMesh")
