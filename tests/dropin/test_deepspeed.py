"""DeepSpeed 0.19.8's own AutoEP layer over V2 ``ElasticBuffer``: as on one process, forward and
backward.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from frameworks import lend, lend_deep_ep, needs, own_ranks
from tokenyard.testing import Ranks, assert_close, distributed_test

FRAMEWORK = "deepspeed-0.19.8"
pytestmark = needs(FRAMEWORK)
__all__ = ["own_ranks"]

EXPERTS, TOPK, HIDDEN, FFN = 6, 3, 64, 32
TOKENS = {"even": (5, 5, 5), "uneven": (3, 9, 6), "first rank empty": (0, 4, 7)}


class Source(nn.Module):
    """A MoE block as AutoEP finds them, the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.bfloat16)
        sizes = {"w1": (HIDDEN, FFN), "w2": (FFN, HIDDEN), "w3": (HIDDEN, FFN)}
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(*size, bias=False, dtype=torch.bfloat16)
                    for name, size in sizes.items()
                }
            )
            for _ in range(EXPERTS)
        )


def layer(rank: int, size: int, apply: str) -> Any:
    """Of ``size`` ranks; ``apply``: whether scores come before or after the experts."""
    from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
    from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

    spec = MoELayerSpec(
        moe_module_name="moe",
        model_family="custom",
        router_name="gate",
        experts_name="experts",
        expert_storage="module_list",
        expert_w1_name="w1",
        expert_w2_name="w2",
        expert_w3_name="w3",
        num_experts=EXPERTS,
        top_k=TOPK,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        score_func="softmax",
        score_apply=apply,
        route_norm=True,
        gate_bias=False,
        return_router_logits=False,
        router_logits_capture_target="none",
        router_logits_capture_index=None,
        router_logits_capture_layer_name=None,
        has_shared_experts=False,
        shared_experts_name="",
    )
    config = AutoEPConfig(
        enabled=True,
        autoep_size=size,
        comm_backend="deepep",
        comm_max_tokens_per_rank=16,
        use_grouped_mm=False,
    )
    return AutoEPMoELayer(spec, Source(), size, rank, config)


def run(layer: Any, x: Tensor, grad: Tensor, again: bool | None = None) -> dict[str, Tensor]:
    """Output and gradient of the input; ``again``: recomputed in backward, reentrant or not."""
    x = x.clone().requires_grad_()
    out = layer(x) if again is None else checkpoint(layer, x, use_reentrant=again)
    out.backward(grad)
    return {"output": out.detach(), "gradient of input": x.grad}


def gradients(layer: Any, ranks: Ranks, whole: bool) -> dict[str, Tensor]:
    """Of this rank's experts, and of the router over all ranks; ``whole``: it has all experts."""
    named = {name: weight.grad for name, weight in layer.named_parameters()}
    for name, gradient in named.items():
        if whole and name.startswith("experts"):
            named[name] = gradient.tensor_split(ranks.world_size)[ranks.rank]
        elif not whole and not name.startswith("experts"):
            torch.distributed.all_reduce(gradient, group=ranks.group)
    layer.zero_grad()
    return named


@pytest.mark.parametrize("apply", ["pre", "post"])
@distributed_test(world_size=3)
def test_layer(ranks: Ranks, apply: str) -> None:
    """Recomputed or not, with uneven and empty ranks."""
    lend_deep_ep("2")
    lend(FRAMEWORK, absent=("einops", "hjson", "msgpack"))
    from deepspeed.module_inject import auto_ep_layer

    one, many = layer(0, 1, apply), layer(ranks.rank, ranks.world_size, apply)
    many.ep_group = ranks.group
    generator = torch.Generator().manual_seed(1)
    with mock.patch.object(auto_ep_layer.dist, "barrier"):  # of CUDA devices
        for (pattern, tokens), again in product(TOKENS.items(), (None, True, False)):
            batches = [
                torch.randn(2, 1, each, HIDDEN, generator=generator).bfloat16() for each in tokens
            ]
            got = run(many, *batches[ranks.rank], again) | gradients(many, ranks, False)
            want = [run(one, *batch) for batch in batches][ranks.rank]
            want |= gradients(one, ranks, True)
            for name, tensor in got.items():
                assert_close(tensor, want[name], relative=2**-6, what=f"{name}, {pattern}, {again}")
        many._deepep_exchange.release()
