"""vLLM 0.33.0's prepare/finalize classes and managers, without its kernels and its server."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deep_ep_world import from_fp8, to_fp8
from frameworks import lend, lend_deep_ep
from tokenyard.testing import Ranks

FRAMEWORK = "vllm-0.33.0"
TOKENS = ("even", "uneven", "empty first", "only last")
MOST = 32
LAYERS = "vllm.model_executor.layers.fused_moe"
ABSENT = (
    *("aiohttp", "cbor2", "openai", "openai_harmony", "requests", "urllib3", "zmq"),
    *("vllm._aiter_ops", "vllm.distributed.kv_transfer", "vllm.model_executor.models"),
)


def to_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data and an exponent (a byte) for each 32 channels; exact for small whole numbers."""
    groups = x.float().view(len(x), x.shape[1] // 32, 32)
    exponents = groups.abs().amax(2).clamp(min=1).log2().floor() - 3
    data = (groups / exponents.exp2()[:, :, None]).to(torch.float8_e4m3fn)
    return data.view(x.shape), (exponents + 127).to(torch.uint8)


def from_mxfp8(data: Tensor, exponents: Tensor) -> Tensor:
    """bf16 rows."""
    scales = (exponents.float() - 127).exp2().repeat_interleave(32, 1)
    return (data.float() * scales).to(torch.bfloat16)


def quantized(
    x: Tensor,
    scale: Tensor | None,
    quant_dtype: Any,
    per_act_token_quant: bool,
    block_shape: list[int] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """In place of vLLM's kernel: in blocks of 32 or 128, or not at all."""
    assert scale is None and not per_act_token_quant
    if quant_dtype is None:
        return x, None
    if quant_dtype == "mxfp8":
        return to_mxfp8(x)
    assert block_shape == [128, 128]
    return to_fp8(x)


def restored(rows: Tensor, scales: Tensor | None, cast: str) -> Tensor:
    """bf16 rows."""
    if scales is None:
        return rows
    return from_mxfp8(rows, scales) if cast == "mxfp8" else from_fp8(rows, scales)


def summed(rows: Tensor, out: Tensor) -> None:
    """In place of vLLM's kernel: the sum over picks, in float32."""
    out.copy_(rows.float().sum(1))


@contextmanager
def vllm(ranks: Ranks, generation: str, *modules: str) -> Generator[Any]:
    """Modules of prepare/finalize classes, and others by their short names, on rank ``ranks.rank``
    of one data-parallel group.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM finds no Triton, which is interpreted here
    lend_deep_ep(generation)
    lend(FRAMEWORK, bare=(LAYERS,), absent=ABSENT)
    names = {name: f"{LAYERS}.prepare_finalize.{name}" for name in modules}
    names |= {name: f"{LAYERS}.{name}" for name in ("config", "modular_kernel")}
    names["weighting"] = f"{LAYERS}.topk_weight_and_reduce"
    names["all2all"] = "vllm.distributed.device_communicators.all2all"
    names |= {"state": "vllm.distributed.parallel_state", "probes": "vllm.utils.import_utils"}
    its = SimpleNamespace(**{name: import_module(path) for name, path in names.items()})
    group = SimpleNamespace(rank_in_group=ranks.rank, world_size=ranks.world_size)
    tolerant = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=True))
    replaced = [
        (its.state, "get_dp_group", lambda: group),
        (its.state, "get_tp_group", lambda: group),
        (its.all2all, "get_current_vllm_config", lambda: tolerant),
        (its.modular_kernel, "PIN_MEMORY", False),
        (its.weighting.ops, "moe_sum", summed),
        (its.probes, "_get_runtime_nccl_version", lambda: 23004),
        (torch.accelerator, "synchronize", lambda: None),
    ]
    replaced += [(getattr(its, name), "moe_kernel_quantize_input", quantized) for name in modules]
    with ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield its


def settings(its: Any, cast: str) -> Any:
    """The experts' quantization: none, "fp8" in blocks of 128, or "mxfp8"."""
    make = its.config.FusedMoEQuantConfig.make
    if cast == "fp8":
        return make(torch.float8_e4m3fn, block_shape=[128, 128])
    return make("mxfp8", is_scale_swizzled=False) if cast else make()


def later_or_now(method: Any, later: bool, *arguments: Any) -> Any:
    """A method, or its asynchronous form, which gives what to call next: a hook first, or none."""
    if not later:
        return method(*arguments)
    then = getattr(method.__self__, f"{method.__name__}_async")(*arguments)
    hook, receiver = then if isinstance(then, tuple) else (None, then)
    if hook is not None:
        hook()
    return receiver()
