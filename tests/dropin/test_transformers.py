"""Models of the transformers library, expert-parallel, against the same unmodified models on one
process.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tokenyard as ty
import transformers_models as tiny
from nvlink_pool import SOAK
from tokenyard.launch import preload
from tokenyard.testing import Ranks, assert_close, assert_same_bits, distributed_test

preload(*tiny.NEEDED)

ROOT = Path(__file__).parents[2]

MESHES = {
    "two expert groups": {"fsdp_size": 4, "ep_size": 2},
    "two replicas": {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
    "tensor parallel": {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    "one batch for all": {"tp_size": 4, "ep_size": 4},
}
BATCHES = (tiny.even, tiny.uneven, tiny.lonely)


@pytest.mark.parametrize("name", tiny.MODELS)
@distributed_test(world_size=2 if SOAK == 1 else (2, 4))
def test_logits_and_gradients(ranks: Ranks, tmp_path: Path, name: str) -> None:
    pair = tiny.load(ranks, tmp_path, name)
    for batches in BATCHES:
        pair.check(batches(pair.batches), batches.__name__)


@pytest.mark.parametrize("mesh", MESHES)
@distributed_test(world_size=4)
def test_meshes(ranks: Ranks, tmp_path: Path, mesh: str) -> None:
    pair = tiny.load(ranks, tmp_path, "Qwen3Moe", **MESHES[mesh])
    for batches in BATCHES:
        pair.check(batches(pair.batches), batches.__name__)


@distributed_test(world_size=2)
def test_ways_to_run_experts(ranks: Ranks, tmp_path: Path) -> None:
    """The library's own kernels for the experts of a rank, and recomputed layers: the same
    results.
    """
    pair = tiny.load(ranks, tmp_path, "Qwen3Moe")
    for how in ("eager", "grouped_mm", "batched_mm"):
        pair.many.set_experts_implementation(how)
        pair.check(tiny.uneven(2), how)
        pair.check(tiny.lonely(2), f"{how}, lonely")
    pair.many.train()
    for reentrant in (True, False):
        pair.many.gradient_checkpointing_enable({"use_reentrant": reentrant})
        pair.check(tiny.uneven(2), f"checkpointing, reentrant={reentrant}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@distributed_test(world_size=4)
def test_experts_alone(ranks: Ranks, tmp_path: Path, dtype: torch.dtype) -> None:
    """Ranks without tokens, ranks that receive none, picks that repeat: more than a whole model
    lets happen.
    """
    pair = tiny.load(ranks, tmp_path, "Qwen3Moe", dtype)
    # FSDP wants to see the whole model first.
    pair.many(tiny.even(4)[0].to(ranks.device), use_cache=False)
    many, one = tiny.experts(pair.many), tiny.experts(pair.one)
    relative = tiny.RELATIVE if dtype == torch.float32 else 1e-2
    for name in ("uniform", "zipf", "duplicates", "one_rank", "local", "empty_ranks"):
        many.zero_grad()
        one.zero_grad()
        got = tiny.through(many, *tiny.picks_of(ranks, name, ranks.rank, dtype))
        wanted = [tiny.through(one, *tiny.picks_of(ranks, name, rank, dtype)) for rank in range(4)]
        for what, value in wanted[ranks.rank].items():
            assert_close(got[what], value, relative=relative, what=f"{name}: {what}")
        for parameter in one.parameters():
            parameter.grad /= 4  # FSDP averages over the ranks
        tiny.check_gradients(many, one, relative, name)


@distributed_test(world_size=2)
def test_generate(ranks: Ranks, tmp_path: Path) -> None:
    """Greedy decoding with a cache; one rank ends early and keeps the other company."""
    pair = tiny.load(ranks, tmp_path, "Qwen3Moe")
    prompts = [prompt[:1] for prompt in tiny.uneven(2)]
    told = {"max_new_tokens": 6, "do_sample": False}
    last = int(pair.one.generate(prompts[1].to(ranks.device), **told)[0, -5])
    wanted = [
        pair.one.generate(prompt.to(ranks.device), eos_token_id=last, **told) for prompt in prompts
    ]
    assert wanted[0].shape[1] - prompts[0].shape[1] != wanted[1].shape[1] - prompts[1].shape[1]
    got = pair.many.generate(prompts[ranks.rank].to(ranks.device), eos_token_id=last, **told)
    assert_same_bits(got, wanted[ranks.rank], what="tokens")


@distributed_test(world_size=2)
def test_objects_belong_to_a_model(ranks: Ranks, tmp_path: Path) -> None:
    """One native object for two layers, another for another model, even where the first lingers on
    one rank; none left.
    """
    from tokenyard.integrations import transformers as integration

    def natives() -> set[ty.ExpertParallel]:
        gc.collect()
        return {
            native for objects in integration._known.values() for native in objects.made.values()
        }

    before = natives()
    first = tiny.load(ranks, tmp_path, "Qwen3Moe")
    first.check(tiny.uneven(2), "first model")
    (native,) = natives() - before
    assert native.stats().calls == {"dispatch": 2, "combine": 4, "cached dispatch": 2}, (
        native.stats().calls
    )
    lingering = first if ranks.rank == 0 else None
    del first, native
    assert len(natives() - before) == (1 if lingering else 0)
    second = tiny.load(ranks, tmp_path, "Qwen3Moe")
    second.check(tiny.uneven(2), "second model")
    del lingering, second
    assert not natives() - before


@distributed_test(world_size=2)
def test_a_silent_rank_has_a_name(ranks: Ranks, tmp_path: Path) -> None:
    from tokenyard.integrations.transformers import TokenyardEP

    pair = tiny.load(ranks, tmp_path, "Qwen3Moe")
    x = torch.ones(3, tiny.COMMON["hidden_size"], device=ranks.device)
    idx = torch.arange(6, device=ranks.device).view(3, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenyardEP, "timeout", 1.0)
        for late in (
            0,
            1,
        ):  # rank 1 comes when rank 0 has given up, so that both have tried to make as many objects
            if ranks.rank == late:
                told = r"for rank.* 1" if late == 0 else "rank 0 had given up an attempt before"
                with torch.no_grad(), pytest.raises(ty.PeerTimeout, match=told) as caught:
                    tiny.experts(pair.many)(x, idx, torch.ones(3, 2, device=ranks.device))
                assert caught.value.rank == 1 - late
            dist.barrier()


@distributed_test(world_size=4)
def test_the_documented_example(ranks: Ranks, tmp_path: Path) -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "how-to" / "transformers.md").read_text(),
        re.DOTALL,
    )
    assert len(block.splitlines()) <= 14
    pair = tiny.load(ranks, tmp_path, "Qwen3Moe")
    model_name = '"Qwen/Qwen3-30B-A3B"'
    assert block.count(model_name) == 1
    ids = tiny.even(4)[ranks.rank].to(ranks.device)
    names: dict[str, Any] = {"ids": ids}
    with tiny.as_launched(ranks):
        exec(block.replace(model_name, repr(str(tmp_path))), names)
    assert_close(
        names["loss"].detach(),
        pair.one(ids, labels=ids).loss.detach(),
        relative=tiny.RELATIVE,
        what="loss",
    )


def test_an_old_transformers_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    monkeypatch.delitem(sys.modules, "tokenyard.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"needs transformers 5.23 or newer .*pip install"):
        importlib.import_module("tokenyard.integrations.transformers")


def test_training_example() -> None:
    """In one command, on two CPU ranks that it starts itself."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_qwen3_moe.py")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [
        (float(one), float(many))
        for one, many in re.findall(r"^ +\d+ +(\S+) +(\S+) ", done.stdout, re.MULTILINE)
    ]
    assert len(losses) == 5
    assert losses[-1][0] < 0.9 * losses[0][0]
    assert all(abs(one - many) < 1e-5 for one, many in losses)
