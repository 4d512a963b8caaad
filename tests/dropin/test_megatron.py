"""megatron-core, unmodified, over tokenyard's DeepEP: equal to its own allgather dispatcher,
forward and backward.

Where the oracle may sum in another order or precision, and so cannot be equal in every bit, is said
in ``docs/how-to/megatron.md``.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from nvlink_pool import SOAK
from tokenyard.deep_ep.hybrid import HybridEPBuffer
from tokenyard.launch import preload
from tokenyard.testing import Ranks, distributed_test

preload("megatron_layers")

PATTERNS = ("even", "uneven", "first rank empty", "only the last rank")
FEW = PATTERNS if SOAK > 1 else PATTERNS[1:3]
"""Where other tests have all of them."""
DTYPES = (torch.float32, torch.bfloat16)


def part(dtype: torch.dtype, picks: Iterable[int]) -> list[tuple[int, str]]:
    """Numbers of picks with every other spread of tokens, those between with another dtype; all of
    them under ``make soak``.
    """
    odd = dtype == torch.bfloat16
    cases = product(enumerate(picks), enumerate(PATTERNS))
    return [
        (topk, pattern)
        for (at, topk), (turn, pattern) in cases
        if SOAK > 1 or (at + turn + odd) % 2
    ]


def by_turns(patterns: Sequence[str]) -> list[tuple[torch.dtype, str]]:
    """Each spread of tokens with a dtype; with both under ``make soak``."""
    if SOAK > 1:
        return list(product(DTYPES, patterns))
    return [(DTYPES[at % 2], pattern) for at, pattern in enumerate(patterns)]


def tokens_of(pattern: str, world_size: int) -> list[int]:
    """How many tokens each rank has."""
    return {
        "even": [6] * world_size,
        "uneven": [5 + 3 * rank for rank in range(world_size)],
        "first rank empty": [0, *range(4, 3 + world_size)],
        "only the last rank": [0] * (world_size - 1) + [9],
    }[pattern]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=["fp32", "bf16", "fp16"])
@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_same_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    """As the allgather dispatcher whose sums over ranks are made in rank order, in float32."""
    import megatron_layers as mg

    with mg.model_parallel(ranks) as compare:
        for topk, pattern in part(dtype, range(1, 9) if SOAK > 1 else (1, 3, 8)):
            setting = mg.Setting(dtype=dtype, topk=topk)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            got = mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            compare(got, want, where=f"{setting}, {pattern}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_hybridep(ranks: Ranks, dtype: torch.dtype) -> None:
    """The backend that permutes: rows come by expert, and go back to their tokens."""
    import megatron_layers as mg

    with mg.model_parallel(ranks) as compare:
        for topk, pattern in product((1, 3, 8) if SOAK > 1 else (3,), PATTERNS):
            setting = mg.Setting(dtype=dtype, topk=topk)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            got = mg.run(setting.layer(ranks, "hybridep"), x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            compare(got, want, where=f"{setting}, {pattern}")
        assert type(mg.fused_a2a._hybrid_ep_buffer) is HybridEPBuffer
        # As many rows for each expert on every rank: Megatron knows their number without the host.
        full = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
        setting = mg.Setting(dtype=dtype, topk=4, options=full)
        x, grad = mg.batch(ranks, setting, tokens_of("even", ranks.world_size))
        got = mg.run(setting.layer(ranks, "hybridep"), x, grad, mg.whole_layer)
        compare(got, mg.run_oracle(ranks, setting, x, grad), where=str(setting))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@distributed_test(world_size=4 if SOAK == 1 else (2, 4))
def test_untouched_oracle(ranks: Ranks, dtype: torch.dtype) -> None:
    """As the allgather dispatcher as it is. With rows of one or two ranks per token no order of
    sums can differ.
    """
    import megatron_layers as mg

    loose = {"gradient of input": 1e-6, "output": 1e-6}
    if (
        dtype != torch.float32
    ):  # rounded once here, after every rank there; the output is summed in float32 by both
        loose = {"gradient of input": 2**-8}
    with mg.model_parallel(ranks) as compare:
        for topk, pattern in part(dtype, (1, 2, 4, 8) if SOAK > 1 else (2, 8)):
            setting = mg.Setting(dtype=dtype, topk=topk)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            got = mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad, in_rank_order=False)
            ordered = min(ranks.world_size, topk) <= 2
            compare(got, want, where=f"{setting}, {pattern}", loose=None if ordered else loose)


@pytest.mark.parametrize(
    "options",
    [
        {"moe_expert_capacity_factor": 0.5},
        {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01},
    ],
    ids=["capacity", "position", "groups", "sigmoid", "aux_loss"],
)
@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_options(ranks: Ranks, options: dict[str, Any]) -> None:
    import megatron_layers as mg

    with mg.model_parallel(ranks) as compare:
        for dtype, pattern in by_turns(
            PATTERNS[:2]
        ):  # Megatron's grouped routing fails on empty ranks
            setting = mg.Setting(dtype=dtype, topk=4, options=options)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            got = mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            compare(got, want, where=f"{setting}, {pattern}")


@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_padding_of_experts(ranks: Ranks) -> None:
    """``moe_router_padding_for_quantization`` (to 16 rows) on top of dispatch, where there are rows
    enough to pad with.
    """
    import megatron_layers as mg

    with mg.model_parallel(ranks) as compare:
        for dtype, pattern in by_turns(PATTERNS):
            setting = mg.Setting(dtype=dtype, topk=4)
            x, grad = mg.batch(
                ranks, setting, [8 * tokens for tokens in tokens_of(pattern, ranks.world_size)]
            )
            layer = setting.layer(ranks, "flex")
            layer.config.moe_router_padding_for_quantization = (
                True  # the constructor wants TransformerEngine for it
            )
            got = mg.run(layer, x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            # More rows, though zeros, are another order of sums in the matrix product of a weight's
            # gradient.
            bound = 1e-6 if dtype == torch.float32 else 2**-8
            compare(
                got,
                want,
                where=f"{setting}, {pattern}",
                loose={n: bound for n in got if "experts" in n},
            )
            counts = layer.token_dispatcher._comm_manager.tokens_per_expert
            assert pattern != "even" or not (counts % 16).any(), counts


@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_without_async(ranks: Ranks) -> None:
    import megatron_layers as mg

    setting = mg.Setting(dtype=torch.bfloat16)
    with mg.model_parallel(ranks) as compare:
        x, grad = mg.batch(ranks, setting, tokens_of("uneven", ranks.world_size))
        layer = setting.layer(ranks, "flex")
        for name in ("token_dispatch", "token_combine"):
            now = partial(
                getattr(layer.token_dispatcher, name),
                async_finish=False,
                allocate_on_comm_stream=False,
            )
            setattr(layer.token_dispatcher, name, now)
        got = mg.run(layer, x, grad, mg.whole_layer)
        compare(got, mg.run_oracle(ranks, setting, x, grad), where=str(setting))


@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_tokens_nowhere(ranks: Ranks) -> None:
    import megatron_layers as mg

    setting = mg.Setting()
    with mg.model_parallel(ranks):
        x, grad = mg.batch(ranks, setting, [0] * ranks.world_size)
        for name, tensor in mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer).items():
            assert not tensor.any(), name


@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_many_outstanding(ranks: Ranks) -> None:
    """Three layers of growing width and three micro-batches, all before the first backward."""
    import megatron_layers as mg

    settings = [
        mg.Setting(torch.bfloat16, topk, hidden) for topk, hidden in ((2, 32), (3, 64), (5, 128))
    ]
    patterns = ("uneven", "first rank empty", "even")
    with mg.model_parallel(ranks) as compare:
        batches = [
            mg.batch(ranks, settings[0], tokens_of(pattern, ranks.world_size), seed)
            for seed, pattern in enumerate(patterns)
        ]
        for order in ((0, 1, 2), (2, 0, 1)):
            got = mg.run_outstanding(
                [each.layer(ranks, "flex") for each in settings], batches, order, mg.whole_layer
            )
            with mg.oracle(ranks, in_rank_order=True) as allgather:
                layers = [each.layer(ranks, "allgather") for each in settings]
                want = mg.run_outstanding(layers, batches, order, allgather)
            compare(got, want, where=f"backwards in order {order}")


@distributed_test(world_size=2)
def test_two_groups(ranks: Ranks) -> None:
    """Layers in two groups of ranks: Megatron then makes a new buffer for every call, and backward
    finds none of forward's.
    """
    import megatron_layers as mg

    setting = mg.Setting(torch.bfloat16)
    with mg.model_parallel(ranks) as compare:
        group = dist.new_group()
        wide = mg.Setting(torch.bfloat16, hidden=2 * setting.hidden)
        batches = [mg.batch(ranks, setting, tokens_of("uneven", 2), seed) for seed in range(2)]
        layers = [setting.layer(ranks, "flex"), wide.layer(ranks, "flex", group)]
        got = mg.run_outstanding(layers, batches, (1, 0), mg.whole_layer)
        with mg.oracle(ranks, in_rank_order=True) as allgather:
            layers = [setting.layer(ranks, "allgather"), wide.layer(ranks, "allgather", group)]
            want = mg.run_outstanding(layers, batches, (1, 0), allgather)
        compare(got, want, where="two groups")
        dist.destroy_process_group(group)


@pytest.mark.parametrize("way", ["megatron", "reentrant", "not_reentrant"])
@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_recomputed(ranks: Ranks, way: str) -> None:
    """Recomputation dispatches again in backward: Megatron's own of a MoE layer, and
    PyTorch's two.
    """
    import megatron_layers as mg

    def recomputed(layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(mg.whole_layer, layer, x, use_reentrant=way == "reentrant")

    options = (
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
        if way == "megatron"
        else {}
    )
    with mg.model_parallel(ranks) as compare, mg.generators(ranks):
        for dtype, pattern in by_turns(FEW):
            setting = mg.Setting(dtype=dtype, topk=3)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            layer = mg.Setting(dtype=dtype, topk=3, options=options).layer(ranks, "flex")
            assert layer.moe_layer_recompute == bool(options)
            got = mg.run(layer, x, grad, mg.whole_layer if options else recomputed)
            want = mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer)
            compare(got, want, where=f"{setting}, {pattern}")


@pytest.mark.parametrize(
    ("expert_ranks", "expert_tensor"), [(2, 1), (2, 2), (4, 2)], ids=["2x1", "1x2", "2x2"]
)
@distributed_test(world_size=4)
def test_groups_of_ranks(ranks: Ranks, expert_ranks: int, expert_tensor: int) -> None:
    """Groups of ranks side by side, and ranks that share each expert (then Megatron asks for top-2K
    of twice the experts).
    """
    import megatron_layers as mg

    with mg.model_parallel(ranks, expert_ranks, expert_tensor) as compare:
        for topk, (dtype, pattern) in product((1, 3), by_turns(FEW)):
            setting = mg.Setting(dtype=dtype, topk=topk)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            got = mg.run(setting.layer(ranks, "flex"), x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            compare(got, want, where=f"{setting}, {pattern}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@distributed_test(world_size=4)
def test_native_dispatcher(ranks: Ranks, dtype: torch.dtype) -> None:
    """The dispatcher of ``examples/``, dropped picks too. It sums the rows of one rank in float32
    and rounds once, so bits differ where a token has several there.
    """
    import megatron_layers as mg

    on_tokenyard = runpy.run_path(str(EXAMPLES / "megatron_dispatcher.py"))["on_tokenyard"]
    dropping = {"moe_expert_capacity_factor": 0.5}
    bound = 1e-6 if dtype == torch.float32 else 2**-7
    with mg.model_parallel(ranks) as compare:
        for topk, pattern, options in product((1, 3), FEW, ({}, dropping)):
            setting = mg.Setting(dtype=dtype, topk=topk, options=options)
            x, grad = mg.batch(ranks, setting, tokens_of(pattern, ranks.world_size))
            layer = on_tokenyard(setting.layer(ranks, "allgather"))
            got = mg.run(layer, x, grad, mg.whole_layer)
            want = mg.run_oracle(ranks, setting, x, grad)
            loose = None if topk == 1 else dict.fromkeys(got, bound)
            compare(got, want, where=f"{setting}, {pattern}", loose=loose)


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["megatron_moe_layer", "megatron_dispatcher"][:SOAK])
def test_example(name: str) -> None:
    """As a program; ``test_native_dispatcher`` has what the other adds to the first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("relative error against allgather: output") == 2
    assert name != "megatron_moe_layer" or done.stdout.count("output 0.0e+00") == 2
    assert "Traceback" not in done.stderr, done.stderr
