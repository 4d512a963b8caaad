"""DeepEP's helper modules, as its own test programs and frameworks use them; on ranks see
``deep_ep_v2_program.py``.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

import tokenyard as ty
from deep_ep_world import from_fp8, to_fp8
from tokenyard.deep_ep.helpers import (
    arithmetic,
    benchmarking,
    communication,
    environment,
    missing,
    plain_exchange,
)


def test_sizes() -> None:
    for x, ceiling in ((0, 0), (1, 1), (128, 1), (129, 2)):
        assert arithmetic.ceil_div(x, 128) == ceiling
        assert arithmetic.align(x, 128) == 128 * ceiling
    assert (arithmetic.safe_div(6, 3), arithmetic.safe_div(0, 5), arithmetic.safe_div(0, 0)) == (
        2,
        0,
        0,
    )
    with pytest.raises(ZeroDivisionError):
        arithmetic.safe_div(1, 0)
    parts: Any = torch.zeros(3), [torch.zeros(2, dtype=torch.int64), None], None
    assert arithmetic.count_bytes(*parts) == 12 + 16 and arithmetic.count_bytes(None) == 0


@pytest.mark.parametrize("hidden", [128, 384, 200])
def test_casts(hidden: int) -> None:
    """As plain code does it, also where channels do not fill the last group; exponents in int32."""
    x = torch.randn(5, hidden, dtype=torch.bfloat16)
    x[1] = 0
    data, scales = arithmetic.per_token_cast_to_fp8(x)
    wide = torch.nn.functional.pad(x, (0, -hidden % 128))
    want = to_fp8(wide)
    assert data.shape == x.shape and scales.shape == (5, -(-hidden // 128))
    assert torch.equal(data.float(), want[0].float()[:, :hidden])
    assert torch.equal(scales, want[1])
    again = arithmetic.per_token_cast_back(data, scales)
    assert torch.equal(again, from_fp8(*want)[:, :hidden])
    assert arithmetic.calc_diff(again, x) < 1e-3 and arithmetic.calc_diff(x, x) == 0
    packed = torch.full((5, 1), 0x7F807F7F, dtype=torch.int32)  # 1, 1, 2, 1
    factors = torch.tensor([1, 1, 2, 1]).repeat_interleave(128)[:hidden]
    got = arithmetic.per_token_cast_back(data, packed)
    assert torch.equal(got, (data.float() * factors).bfloat16())
    assert arithmetic.per_token_cast_back(data[:0], scales[:0]).shape == (0, hidden)


def test_ids_and_scores() -> None:
    x = torch.tensor([[0, 1, 0, 2], [3, 3, -1, -1], [-1, -1, -1, -1]])
    arithmetic.inplace_unique(x, 4)
    assert x.tolist() == [[2, 1, 0, -1], [3, -1, -1, -1], [-1] * 4]
    wide = torch.tensor([[1, 0, 1]])
    arithmetic.inplace_unique(wide, 2)
    assert wide.tolist() == [[1, 0, -1]]
    given = torch.arange(1.0, 13).view(2, 6)
    kept = arithmetic.create_grouped_scores(given, torch.tensor([[0, 2], [1, 1]]), 3)
    assert kept.tolist() == [[1, 2, 0, 0, 5, 6], [0, 0, 9, 10, 0, 0]]


def test_hashes() -> None:
    tensors = [torch.arange(8), torch.arange(6).bool(), torch.arange(5).half(), torch.tensor(3.0)]
    for each in tensors:
        assert arithmetic.hash_tensor(each) == arithmetic.hash_tensor(each.clone())
    assert len({arithmetic.hash_tensor(each) for each in tensors}) == len(tensors)
    assert arithmetic.hash_tensor(torch.arange(4.0).view(2, 2).t()) == arithmetic.hash_tensor(
        torch.tensor([0.0, 2, 1, 3])
    )
    a, b = tensors[:2]
    both = arithmetic.hash_tensor(a) ^ arithmetic.hash_tensor(b)
    assert arithmetic.hash_tensors(a, [b, None], 3) == both != arithmetic.hash_tensors(a)


def test_caching() -> None:
    calls: list[tuple[Any, int]] = []

    class Holder:
        @arithmetic.weak_lru(maxsize=None)
        def twice(self, key: int) -> int:
            calls.append((id(self), key))
            return 2 * key

    first, second = Holder(), Holder()
    assert [first.twice(3), first.twice(3), second.twice(3), first.twice(4)] == [6, 6, 6, 8]
    assert calls == [(id(first), 3), (id(second), 3), (id(first), 4)]
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    assert (arithmetic.value_or(None, 5), arithmetic.value_or(0, 5)) == (5, 0)


def test_times_and_bytes(capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    mean, least, most = benchmarking.bench(lambda: calls.append(1), 2, 5, lambda: calls.append(2))
    assert 0 < least <= mean <= most and calls.count(1) == 7 and calls.count(2) == 5
    with benchmarking.suppress_stdout_stderr():
        os.write(1, b"lost")
        os.write(2, b"lost")
    with benchmarking.empty_suppress():
        os.write(1, b"kept")
    assert capfd.readouterr() == ("kept", "")
    for text, number in (("1", 1), ("64M", 64 << 20), ("1GiB", 1 << 30), (" 4 K ", 4096)):
        assert benchmarking.parse_num_bytes(text) == number
    assert benchmarking.parse_num_bytes("1.5M") == 3 << 19
    for wrong in ("", "abc", "-1", "0", "1e3", "1.2.3", "1G1", "nan"):
        with pytest.raises(ValueError, match="positive number of bytes"):
            benchmarking.parse_num_bytes(wrong)
    if not torch.cuda.is_available():
        with pytest.raises(ty.NotSupported, match="use bench"):
            benchmarking.bench_kineto(lambda: None, "dispatch")


def test_times_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what the profiler tells: of a name, in the order in which they ran."""

    def event(name: str, start: int, microseconds: int, kind: DeviceType = DeviceType.CUDA) -> Any:
        span = SimpleNamespace(start=start, elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=kind, time_range=span)

    events = [
        event("x::combine()", 5, 40),
        event("x::dispatch()", 4, 30),
        event("x::dispatch()", 1, 10),
        event("dispatch", 0, 1000, DeviceType.CPU),
    ]
    told = SimpleNamespace(events=lambda: events)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: nullcontext(told))
    calls: list[int] = []

    def measure(names: Any, period: int = 1) -> Any:
        options = {"flush_l2": False, "num_kernels_per_period": period}
        return benchmarking.bench_kineto(lambda: calls.append(1), names, 3, **options)

    assert measure("dispatch") == pytest.approx(20e-6) and len(calls) == 4
    assert measure(("dispatch", "combine")) == pytest.approx((20e-6, 40e-6))
    assert measure("dispatch", 2) == pytest.approx([10e-6, 30e-6])
    for name, period in (("dispatch_impl", 1), ("combine", 2)):
        with pytest.raises(ty.NotSupported, match=r"there were x::combine\(\), x::dispatch\(\)"):
            measure(name, period)


def test_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has, told truly; 0 and False where there is nothing."""
    card = tmp_path / "mlx5_7"
    (card / "ports" / "1").mkdir(parents=True)
    (card / "ports" / "1" / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (card / "hca_type").write_text("MT4131\n")
    monkeypatch.setattr(environment, "CARDS", tmp_path)
    assert environment.get_rdma_gbs("mlx5_7") == 50
    assert environment.check_fast_rdma_atomic_support("mlx5_7")
    assert environment.get_rdma_gbs("none") == 0
    assert not environment.check_fast_rdma_atomic_support("none")
    monkeypatch.setenv("EP_NIC_NAME", "mlx5_7")
    assert environment.get_rdma_gbs() == 50
    monkeypatch.setenv("PATH", str(tmp_path))
    environment.get_nvlink_gbs.cache_clear()
    assert environment.get_nvlink_gbs() == 0
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho ' Link 0: 25 GB/s'; echo ' Link 1: 25.0 GB/s'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment.get_nvlink_gbs.cache_clear()
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert environment.get_nvlink_gbs() == pytest.approx(45)
    environment.get_nvlink_gbs.cache_clear()


def test_unbalanced_scores() -> None:
    torch.manual_seed(0)
    for ratio in (1.0, 2.0):
        ranks = arithmetic.get_unbalanced_scores(4096, 32, 4, 4, ratio, False).topk(4).indices // 8
        tokens = [float((ranks == rank).any(1).sum()) for rank in range(4)]
        assert tokens[0] / (sum(tokens[1:]) / 3) == pytest.approx(ratio, rel=0.1)
    with pytest.raises(ty.NotSupported, match="precise"):
        arithmetic.get_unbalanced_scores(8, 8, 2, 2, 2.0, True)


def test_plain_combine() -> None:
    """Where partial sums are rounded shows: 256 + 1 in BF16 is 256."""
    y = torch.tensor([256.0, 1, 1, 0]).bfloat16().view(1, 4, 1)
    idx = torch.tensor([[0, 1, 6, -1]])  # two per rank: ranks 0, 0, 3 of 4

    def sums(scaleout: int, scaleup: int, bias: Any, *reduce: bool) -> float:
        return plain_exchange.combine(y, idx, scaleout, scaleup, 8, bias, *reduce).item()

    assert sums(1, 4, None, False, False) == 258
    assert sums(1, 4, None, True, False) == 256  # (256 + 1 -> 256) + 1 -> 256
    y[0, 2] = 2
    assert sums(1, 4, None, True, False) == 258
    one = torch.ones(1, 1).bfloat16()
    assert sums(1, 4, one, True, False) == 260  # 1 + 256 + 2, to the even one
    assert sums(2, 2, (one, one), True, True) == 260


MISSING = (
    missing.EngramBuffer,
    missing.PPBuffer,
    missing.BucketBuffer,
    missing.BucketSession,
    missing.NCCLCommHandle,
    missing.get_nccl_comm_handle,
    missing.find_pkg_root,
    missing.find_nccl_root,
)


@pytest.mark.parametrize("call", MISSING, ids=lambda call: call.__name__)
def test_what_is_missing_says_so(call: Any) -> None:
    with pytest.raises(ty.NotSupported, match=call.__name__):
        call(None, num_gpu_bytes=3)


def test_nothing_to_do() -> None:
    """Functions whose answer here is always the same."""
    missing.destroy_all_managed_nccl_comm()
    environment.check_torch_deterministic()
    environment.check_nvlink_connections(None)  # pyright: ignore
    with pytest.raises(ValueError, match="context_idx"):
        communication.barrier(None, context_idx=1)
