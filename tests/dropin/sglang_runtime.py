"""SGLang 0.5.23's dispatchers, without its kernels and its server."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from deep_ep_world import to_fp8
from frameworks import lend, lend_deep_ep

FRAMEWORK = "sglang-0.5.23"
DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
KERNELS = "sglang.kernels.ops"
BARE = (
    *("sglang", "sglang.srt.configs", "sglang.srt.layers.moe", DISPATCHERS),
    *("sglang.kernels", KERNELS, f"{KERNELS}.moe"),
)
ABSENT = (
    *("pybase64", "requests", "starlette", "zmq"),
    *("sglang.srt.eplb", "sglang.srt.layers.deep_gemm_wrapper", "sglang.srt.layers.moe.topk"),
    *(f"{KERNELS}.communication", f"{KERNELS}.memory", f"{KERNELS}.quantization"),
)
CONFIG = (
    '{"normal_dispatch": {"num_sms": 24, "num_max_nvl_chunked_send_tokens": 16}, '
    '"normal_combine": {"num_sms": 24, "num_max_nvl_chunked_recv_tokens": 512}}'
)


def quantized(x: Tensor, block: int, **options: bool) -> tuple[Tensor, Tensor]:
    """In place of SGLang's kernel."""
    assert block == 128 and not any(options.values())
    return to_fp8(x)


@contextmanager
def sglang(generation: str, module: str) -> Generator[Any]:
    """A module of dispatchers as on a GPU with DeepGEMM, not of Blackwell, after the start of a
    server.
    """
    lend_deep_ep(generation)
    lend(FRAMEWORK, bare=BARE, absent=ABSENT)
    from importlib import import_module

    from sglang.srt import runtime_context
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils

    its = import_module(f"{DISPATCHERS}.{module}")
    gpu = SimpleNamespace(multi_processor_count=132)
    runtime_context.get_flags().moe.deepep_config = CONFIG
    with ExitStack() as stack:
        for where, name, value in (
            (deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
            (deep_gemm_wrapper, "DEEPGEMM_BLACKWELL", False),
            (deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", False),
            (deep_gemm_wrapper, "DEEPGEMM_NEED_TMA_ALIGNED_SCALES", False),
            (utils, "get_server_args", lambda: None),
            (its, "sglang_per_token_group_quant_fp8", quantized),
            (torch.cuda, "get_device_properties", lambda device: gpu),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        if module == "deepep":
            stack.enter_context(mock.patch.object(its, "get_cuda_version", return_value=(13, 0)))
        yield its


def is_prefill(yes: bool) -> None:
    """Whether the batch that comes is one of prompts: normal mode; else low-latency mode."""
    from sglang.srt.runtime_context import get_forward

    get_forward().set("is_extend_in_batch", yes)
