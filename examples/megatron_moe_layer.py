"""A MoE layer of Megatron-core on tokenyard: its flex dispatcher with the deepep backend, on GPUs
or on a CPU.

    pip install megatron-core==0.16.1
    python examples/megatron_moe_layer.py
    torchrun --nproc-per-node 4 examples/megatron_moe_layer.py

The layer is compared with the same one on Megatron's own allgather dispatcher, forward and
backward.
"""

import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist

import tokenyard.deep_ep
from tokenyard import launch

TOKENS, HIDDEN, FFN, EXPERTS, TOPK = 512, 256, 512, 8, 2

# Megatron looks for DeepEP when it is imported, so this comes first (and Megatron in the ranks
# below, because it takes seconds). Programs that you do not want to touch: python -m
# tokenyard.deep_ep run PROGRAM
sys.modules |= {"deep_ep": tokenyard.deep_ep, "deep_ep.utils": tokenyard.deep_ep.utils}


def moe_layer(dispatcher: str, device: torch.device) -> torch.nn.Module:
    """A layer with weights that depend on the rank only."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = TransformerConfig(
        moe_token_dispatcher_type=dispatcher,  # "flex" and the next line make Megatron take DeepEP
        moe_flex_dispatcher_backend="deepep",
        moe_router_dtype="fp32",
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        expert_model_parallel_size=dist.get_world_size(),
        num_layers=1,
        num_attention_heads=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        bf16=True,
    )
    torch.manual_seed(dist.get_rank())
    layer = MoELayer(config, get_moe_module_spec(use_te=False, num_experts=EXPERTS).submodules).to(
        device
    )
    router = layer.router
    with torch.no_grad():  # the same on every rank
        router.weight.copy_(
            torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(0))
        )
    # In 0.16.1 the router's own product needs TransformerEngine.
    router.gating = lambda x: torch.nn.functional.linear(x.float(), router.weight.float())
    return layer


def forward_and_backward(layer: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Output and gradients of one step."""
    torch.manual_seed(1000 + dist.get_rank())
    x, grad = torch.randn(2, TOKENS, 1, HIDDEN).to(device, torch.bfloat16)
    x = x.clone().requires_grad_()
    y, _ = layer(x)
    y.backward(grad)
    weights = torch.cat([weight.grad.flatten() for weight in layer.parameters()])
    return {"output": y.detach(), "gradient of input": x.grad, "gradient of weights": weights}


def compare(layer: Callable[[torch.device], torch.nn.Module], device: torch.device) -> None:
    """A layer, made when Megatron is ready, with Megatron's own on this rank."""
    warnings.simplefilter(
        "ignore"
    )  # Megatron misses TransformerEngine and Apex, which this example does not need
    from megatron.core import parallel_state

    rank = dist.get_rank()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tokenyard").setLevel(logging.INFO)  # which engine, and why
    torch.compiler.set_stance(
        "force_eager"
    )  # Megatron compiles small functions; not worth the wait here
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    got = forward_and_backward(layer(device), device)
    on_gpu = (
        device.type == "cuda"
    )  # the allgather dispatcher puts its results on the current GPU, or we tell it otherwise
    with mock.patch.object(
        torch.cuda, "current_device", return_value=torch.cuda.current_device() if on_gpu else device
    ):
        want = forward_and_backward(moe_layer("allgather", device), device)
    errors = {
        name: ((got[name] - want[name]).float().norm() / want[name].float().norm()).item()
        for name in got
    }
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"rank {rank}: {TOKENS} tokens, relative error against allgather: {told}")
    assert max(errors.values()) < 2**-7, errors  # allgather rounds after every rank it adds


def run(main: Callable[[torch.device], None]) -> None:
    """On the ranks of torchrun, or on two of its own."""
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


def main(device: torch.device) -> None:
    """The comparison on this rank."""
    compare(partial(moe_layer, "flex"), device)


if __name__ == "__main__":
    run(main)
