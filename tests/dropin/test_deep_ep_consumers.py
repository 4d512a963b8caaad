"""The exact calls of the frameworks that use DeepEP, replayed: their layers give what one process
computes.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from deep_ep_world import TOKENS, World
from nvlink_pool import SOAK
from tokenyard.testing import Ranks, distributed_test

INFERENCE = (
    "vllm_high_throughput",
    "vllm_low_latency",
    "sglang_normal",
    "sglang_low_latency",
    "lmdeploy",
)
WAYS = [
    (tokens, one, other)
    for (at, tokens), one, other in product(enumerate(TOKENS), (False, True), (False, True))
    if SOAK > 1 or (at + one + other) % 2 == 0
]
"""Tokens of ranks with each of two switches, on and off; with both together under ``make soak``."""


@pytest.mark.parametrize("consumer", INFERENCE)
@distributed_test(world_size=3 if SOAK == 1 else (2, 3, 4))
def test_inference(ranks: Ranks, consumer: str) -> None:
    """Asynchronous (or hooks) and not, FP8 and not, even, uneven and empty ranks; bits equal where
    casts are exact.
    """
    import deep_ep_consumers

    layer = getattr(deep_ep_consumers, consumer)
    for tokens, other, fp8 in WAYS:
        world = World.of(ranks, tokens, hidden=512)
        with torch.inference_mode(other):
            got = layer(ranks, world, other, fp8)
        want = world.layered(ranks.rank)
        assert got.dtype == torch.bfloat16 and got.shape == want.shape
        if fp8 and consumer in (
            "vllm_high_throughput",
            "sglang_normal",
        ):  # scales are not powers of two
            assert torch.allclose(got.float(), want.float(), rtol=2**-4, atol=0.1)
        else:
            assert torch.equal(got, want), (tokens, other, fp8)


@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_training(ranks: Ranks) -> None:
    """Megatron-core (always asynchronous), NeMo Automodel (destroys) and torchtitan: output and
    gradients.
    """
    import deep_ep_training

    for tokens, later, destroys in WAYS:
        world = World.of(ranks, tokens)
        out, grad_x, grad_probs = deep_ep_training.training(ranks, world, later, destroys)
        x, idx = world.x[ranks.rank].float(), world.idx[ranks.rank]
        scale = world.coefficients(idx, world.weights[ranks.rank])
        assert torch.equal(out, world.layered(ranks.rank))
        assert torch.equal(grad_x.float(), x * scale)
        want = torch.where(idx < 0, 0.0, (idx % 3 + 1) * (x * x).sum(1, keepdim=True))
        assert torch.equal(grad_probs, want), (tokens, later, destroys)
