"""A token dispatcher of torchtitan on tokenyard: tokens travel once to each rank, arrive sorted by
expert, and come back weighted and summed. No permutation, no second copy, gradients included.

    pip install torchtitan==0.3.0
    python examples/torchtitan_dispatcher.py
    torchrun --nproc-per-node 4 examples/torchtitan_dispatcher.py

To train with it, this folder on PYTHONPATH, add to torchtitan's command line

    --override.imports 'torchtitan_dispatcher.on_tokenyard={"hidden_dim": <the model's dim>}'

Here a layer with it is compared with the same one on torchtitan's own all-to-all, forward and
backward.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import derive, override
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import moe
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
)

import tokenyard as ty
from tokenyard import launch
from tokenyard.api import BESIDE_COLLECTIVES

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 512, 256, 512, 8, 2


@functools.cache
def shared(group: dist.ProcessGroup, num_experts: int, hidden: int, topk: int) -> ty.ExpertParallel:
    """One object for all layers of the same sizes."""
    return ty.ExpertParallel(
        group,
        num_experts=num_experts,
        hidden=hidden,
        num_topk=topk,
        max_tokens_per_rank=1,  # bounds static shapes, and ours are exact
        spare_sms=BESIDE_COLLECTIVES,  # FSDP gathers the next layer meanwhile
    )


class TokenyardTokenDispatcher(BaseEPTokenDispatcher):
    """For ``RoutedExperts.Config(token_dispatcher=TokenyardTokenDispatcher.Config(...))``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """``hidden_dim``: the model's ``dim``."""

        hidden_dim: int

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.hidden_dim = config.hidden_dim

    def init_buffer(self) -> None:
        """torchtitan calls it once ``ep_mesh`` is known."""
        group = self.ep_mesh.get_group()
        self._ep = shared(group, self.num_experts, self.hidden_dim, self.top_k)

    def dispatch(
        self,
        x_TD: torch.Tensor,  # noqa: N803 (torchtitan's names)
        topk_scores_TK: torch.Tensor,  # noqa: N803
        topk_expert_ids_TK: torch.Tensor,  # noqa: N803
        num_local_tokens_per_expert_E: torch.Tensor,  # noqa: N803
    ) -> tuple[torch.Tensor, torch.Tensor, ty.Handle]:
        """Rows ``[R, D]`` sorted by expert, how many are each one's, and the handle."""
        recv = self._ep.dispatch(
            x_TD, topk_expert_ids_TK, topk_scores_TK, layout=ty.Layout.EXPERT_MAJOR
        )
        return recv.x, recv.tokens_per_expert, recv.handle

    def combine(
        self,
        routed_output_RD: torch.Tensor,  # noqa: N803
        metadata: ty.Handle,
        x_TD: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        """``[T, D]``: the sum of each token's rows times their scores, in float32."""
        return self._ep.combine(routed_output_RD, metadata, weighted=True)


@override(target=AllToAllTokenDispatcher.Config, description="expert parallelism by tokenyard")
def on_tokenyard(
    config: AllToAllTokenDispatcher.Config, *, hidden_dim: int
) -> TokenyardTokenDispatcher.Config:
    """Puts it in the place of every ``AllToAllTokenDispatcher`` of a model."""
    return derive(config, TokenyardTokenDispatcher.Config, hidden_dim=hidden_dim)


def routed_experts(dispatcher: Any, mesh: DeviceMesh, device: torch.device) -> torch.nn.Module:
    """torchtitan's module with this rank's share of ``EXPERTS``."""
    experts = moe.GroupedExperts.Config(
        dim=HIDDEN, hidden_dim=FFN, num_experts=EXPERTS // mesh.size()
    )
    layer = moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build()
    generator = torch.Generator().manual_seed(mesh.get_local_rank())
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer.to(device)


def forward_and_backward(layer: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Output and gradients of one step."""
    torch.manual_seed(1000 + dist.get_rank())
    x, grad = torch.randn(2, 1, TOKENS, HIDDEN).to(device, torch.bfloat16)
    logits = torch.randn(1, TOKENS, EXPERTS).to(device).requires_grad_()
    x = x.clone().requires_grad_()
    scores, picks = logits.softmax(-1).topk(TOPK)
    counts = torch.bincount(picks.flatten(), minlength=EXPERTS)
    y = layer(x, scores, picks, counts)
    y.backward(grad)
    weights = torch.cat([weight.grad.flatten() for weight in layer.parameters()])
    return {
        "output": y.detach(),
        "gradient of input": x.grad,
        "gradient of scores": logits.grad,
        "gradient of weights": weights,
    }


def main(device: torch.device) -> None:
    """The comparison on this rank."""
    set_spmd_backend("partial_dtensor")  # all-to-all takes the mesh it is given
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=("ep",))
    sizes = {"num_experts": EXPERTS, "top_k": TOPK}
    ours = TokenyardTokenDispatcher.Config(**sizes, hidden_dim=HIDDEN)
    theirs = AllToAllTokenDispatcher.Config(**sizes)
    got, want = (
        forward_and_backward(routed_experts(each, mesh, device), device) for each in (ours, theirs)
    )
    errors = {
        name: ((got[name] - want[name]).float().norm() / want[name].float().norm()).item()
        for name in got
    }
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"rank {dist.get_rank()}: {TOKENS} tokens, relative error against all-to-all: {told}")
    assert max(errors.values()) < 2**-7, errors  # all-to-all rounds each row before it adds them


if __name__ == "__main__":
    kind = (
        "cuda"
        if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
        else "cpu"
    )
    if launch.under_torchrun():
        with launch.joined_by_launcher(kind) as here:
            main(here)
    else:
        launch.spawn(main, 2, device=kind)
