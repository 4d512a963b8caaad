"""Expert parallelism for models of the ``transformers`` library. Importing this module registers it
there as ``"tokenyard"``.

    import tokenyard.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained( path,
        distributed_config=DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="tokenyard")
    )

See ``docs/how-to/transformers.md``.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import pad

import tokenyard as ty
from tokenyard.api import BESIDE_COLLECTIVES

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise ImportError(
        f"tokenyard.integrations.transformers needs transformers 5.23 or newer ({error}): "
        "pip install 'tokenyard[transformers]'"
    ) from error

__all__ = ["NAME", "TokenyardEP"]

NAME = "tokenyard"
"""What to pass as ``DistributedConfig(ep_implementation=...)``."""


class TokenyardEP(EPImplementation):
    """Brings tokens to the experts of one module and their results back; transformers makes one per
    MoE layer.

    The layers of a model share one ``ExpertParallel`` (per hidden size and top-k). It is made in
    the first forward, by all ranks of the expert group, and goes with the model.
    """

    timeout = 600.0
    """Seconds that a silent rank is waited for; set it on the class before the first forward, the
    same on every rank."""

    num_local_experts: int

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._objects = _objects_of(ep_mesh)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Collective: the weighted sum of each token's experts, wherever they are. Any number of
        tokens, also none.

        Args:
            hidden_states: ``[T, H]`` bf16, fp16 or fp32, the tokens of this rank; those of a TP
                group hold the same ones.
            top_k_index: ``[T, K]`` int64 or int32 global expert ids.
            top_k_weights: ``[T, K]`` float.

        Returns:
            ``[T, H]``, differentiable in tokens, weights and the experts' parameters.

        Raises:
            PeerTimeout: a rank of the expert group did not come within ``timeout`` seconds.
        """
        if self.tp_mesh.size() == 1:
            return self._run(hidden_states, top_k_index, top_k_weights)
        mine = self._run(
            *(_share_of(each, self.tp_mesh) for each in (hidden_states, top_k_index, top_k_weights))
        )
        return _whole(mine, self.tp_mesh, hidden_states.shape[0])

    def _run(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        ep = self._native(x, topk_idx.shape[1])
        recv = ep.dispatch(x, topk_idx, topk_weights, layout=ty.Layout.EXPERT_MAJOR)
        assert recv.row_weights is not None
        weights = recv.row_weights.to(topk_weights.dtype)
        return ep.combine(self._run_experts(recv.x, recv.tokens_per_expert, weights), recv.handle)

    def _run_experts(self, rows: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> Tensor:
        """``rows [N, H]`` through this rank's experts, each through one, times its weight."""
        num_rows = rows.shape[0]
        if num_rows == 0:
            # No expert would run, and this rank would be missing in the backward: let one of them
            # have a row of zeros.
            rows, weights = pad(rows, (0, 0, 0, 1)), pad(weights, (0, 1))
            expert = tokens_per_expert.new_zeros(1, dtype=torch.int64)
        else:
            every = torch.arange(self.num_local_experts, device=rows.device)
            expert = every.repeat_interleave(tokens_per_expert, output_size=num_rows)
        return self.experts_forward(rows, expert.unsqueeze(1), weights.unsqueeze(1))[:num_rows]

    def _native(self, x: Tensor, num_topk: int) -> ty.ExpertParallel:
        """The object for tokens like ``x``; an earlier layer may have made it."""
        key = (self.num_local_experts, x.shape[1], num_topk, x.device)
        if key not in self._objects.made:
            self._objects.made[key] = ty.ExpertParallel(
                self.ep_mesh.get_group(),
                num_experts=self.num_local_experts * self.ep_mesh.size(),
                hidden=x.shape[1],
                num_topk=num_topk,
                max_tokens_per_rank=1,  # bounds static shapes, and ours are exact
                spare_sms=BESIDE_COLLECTIVES,  # FSDP gathers the next layer meanwhile
                timeout=self.timeout,
                device=x.device,
            )
        return self._objects.made[key]


class _Objects:
    """What the layers of one model share: an ``ExpertParallel`` for each kind of tokens."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.made: dict[tuple[int, int, int, torch.device], ty.ExpertParallel] = {}


_known: WeakValueDictionary[int, _Objects] = WeakValueDictionary()
"""By the identity of a model's mesh, which each entry keeps: only so do all ranks agree on which
layers share."""


def _objects_of(mesh: DeviceMesh) -> _Objects:
    found = _known.get(id(mesh))
    if found is None:
        found = _known[id(mesh)] = _Objects(mesh)
    return found


def _share_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows of a tensor that every rank of ``mesh`` holds. Every rank gets the gradient
    of all rows."""
    return (
        DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        .redistribute(mesh, [Shard(0)])
        .to_local()
    )


def _whole(share: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """The tensor whose rows the ranks of ``mesh`` hold in turn; it has the same gradient on every
    rank."""
    shape = torch.Size((num_rows, share.shape[1]))
    shards = DTensor.from_local(
        share.contiguous(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=shape,
        stride=(share.shape[1], 1),
    )
    return shards.full_tensor()


EPImplementationInterface.register(NAME, TokenyardEP)
