"""Tiny random models of the transformers library: unmodified on one process, and expert-parallel,
from the same weights.

``transformers`` is imported where it is needed: collecting tests must not pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokenyard.testing import Ranks, assert_close, payload, routing

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
NEEDED = (
    *(__name__, "accelerate", "tokenyard.integrations.transformers"),
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("qwen3_moe", "mixtral", "deepseek_v3")
    ),
)
"""What ranks are to have from the start, in this order."""

VOCABULARY, EXPERTS, TOPK = 64, 8, 2
RELATIVE = 1e-5
NOISE = 1e-6
"""Of the largest gradient: less is rounding (of attention to a single token, for instance)."""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": TOPK,
    "initializer_range": 0.3,  # enough for experts and routers to matter in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "Mixtral": {"num_local_experts": EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


@dataclass(frozen=True)
class Pair:
    """The same weights twice.

    Attributes:
        one: the unmodified model, whole on this process.
        many: the model over all ranks.
        batches: how many different batches the ranks hold.
        mine: which of them this rank holds.
    """

    one: Any
    many: Any
    batches: int
    mine: int
    ranks: Ranks

    def check(self, batches: list[Tensor], what: str) -> None:
        """Logits of this rank's batch, and every gradient of the mean of all batches' losses, as on
        one process.
        """
        for model in (self.one, self.many):
            model.zero_grad()
        mine = batches[self.mine].to(self.ranks.device)
        logits = self.many(mine, use_cache=False).logits
        loss(logits).backward()
        wanted = self.one(mine, use_cache=False).logits
        assert_close(logits.detach(), wanted.detach(), relative=RELATIVE, what=f"{what}: logits")
        for batch in batches:
            (
                loss(self.one(batch.to(self.ranks.device), use_cache=False).logits) / len(batches)
            ).backward()
        check_gradients(self.many, self.one, RELATIVE, what)


def loss(y: Tensor) -> Tensor:
    """Different for every element, so that no two may be confused."""
    return (y * torch.arange(1.0, y.numel() + 1, device=y.device).sin().view_as(y)).sum()


def check_gradients(many: nn.Module, one: nn.Module, relative: float, what: str) -> None:
    """Collective: every parameter's gradient. One that cancels to rounding errors must be as small
    on both sides.
    """
    from torch.distributed.tensor import DTensor  # most of a second

    expected = {name: parameter.grad for name, parameter in one.named_parameters()}
    got = {name: parameter.grad for name, parameter in many.named_parameters()}
    assert got.keys() == expected.keys()
    noise = NOISE * max(float(grad.norm()) for grad in expected.values())
    for name, grad in got.items():
        whole, wanted = grad.full_tensor() if isinstance(grad, DTensor) else grad, expected[name]
        if wanted.norm() < noise:
            assert whole.norm() < noise, (
                f"{what}: gradient of {name}: norm {whole.norm()}, expected {wanted.norm()}"
            )
        else:
            assert_close(whole, wanted, relative=relative, what=f"{what}: gradient of {name}")


def load(
    ranks: Ranks, folder: Path, name: str, dtype: torch.dtype = torch.float32, **sizes: Any
) -> Pair:
    """Collective: a random model of family ``name``, saved by rank 0 in ``folder``, loaded whole
    and expert-parallel.

    ``sizes`` are those of ``DistributedConfig``; by default every rank has a batch of its own and
    its share of the experts.
    """
    if ranks.device.type == "cuda" and ranks.world_size > torch.cuda.device_count():
        pytest.skip(
            f"{ranks.world_size} ranks, {torch.cuda.device_count()} GPUs: torch's meshes need one "
            f"each"
        )
    import transformers
    from transformers.distributed import DistributedConfig

    from tokenyard.integrations.transformers import NAME

    transformers.utils.logging.disable_progress_bar()
    sizes = sizes or {"fsdp_size": ranks.world_size, "ep_size": ranks.world_size}
    if ranks.rank == 0:
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**COMMON, **MODELS[name]})
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    dist.barrier()
    one = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(ranks.device)
    with as_launched(ranks):
        many = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            distributed_config=DistributedConfig(**sizes, ep_implementation=NAME),
        )
    batches = sizes.get("dp_replicate_size", 1) * sizes.get("fsdp_size", 1)
    return Pair(one, many, batches, ranks.rank * batches // ranks.world_size, ranks)


@contextmanager
def as_launched(ranks: Ranks) -> Generator[None, None, None]:
    """What ``from_pretrained`` asks the launcher and the machine: the local rank, and which kind of
    device to use.
    """
    kind = torch.device(ranks.device.type)
    local_rank = {"LOCAL_RANK": str(ranks.device.index or 0)}
    machine = mock.patch.object(torch._C, "_get_accelerator", return_value=kind)
    with mock.patch.dict(os.environ, local_rank), machine:
        yield


def experts(model: Any, layer: int = -1) -> Any:
    """The module of a layer's experts."""
    return model.model.layers[layer].mlp.experts


def picks_of(
    ranks: Ranks, name: str, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of one rank with a named routing, as an experts module takes them."""
    idx, weights = routing(name, rank, ranks.world_size, 9, TOPK, EXPERTS, seed=0)
    x = payload(rank, len(idx), COMMON["hidden_size"], dtype, seed=0) / 4
    return x.to(ranks.device), idx.to(ranks.device), weights.to(ranks.device, dtype)


def through(module: nn.Module, x: Tensor, idx: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Forward and backward of an experts module."""
    x, weights = x.requires_grad_(), weights.requires_grad_()
    y = module(x, idx, weights)
    loss(y.float()).backward()
    return {"output": y.detach(), "gradient of x": x.grad, "gradient of weights": weights.grad}


def even(count: int) -> list[Tensor]:
    return [_tokens(2, 6, seed) for seed in range(count)]


def uneven(count: int) -> list[Tensor]:
    """More and longer sequences on later ranks; one token on the first."""
    return [_tokens(seed + 1, 1 + 2 * seed, seed) for seed in range(count)]


def lonely(count: int) -> list[Tensor]:
    """The same single token on every rank: it has ``TOPK`` experts, so most ranks' experts receive
    nothing.
    """
    return [_tokens(1, 1, 0)] * count


def _tokens(sequences: int, length: int, seed: int) -> Tensor:
    return torch.randint(
        1, VOCABULARY, (sequences, length), generator=torch.Generator().manual_seed(seed)
    )
