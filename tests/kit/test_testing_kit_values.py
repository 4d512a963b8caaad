"""What tests compare: routings, payloads, bitwise comparison and poison."""

# Torch lacks types:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading

import pytest
import torch

from tokenyard.testing import (
    ROUTINGS,
    Ranks,
    assert_close,
    assert_same_bits,
    distributed_test,
    payload,
    poisoned,
    routing,
)

SHAPES = [(3, 7, 2, 10), (2, 9, 4, 3), (4, 5, 1, 1), (3, 0, 2, 6)]
"""Ranks, tokens, picks and experts."""


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_routing_is_valid_and_repeatable(name: str, shape: tuple[int, int, int, int]) -> None:
    ranks, tokens, topk, experts = shape
    for rank in range(ranks):
        idx, weights = routing(name, rank, ranks, tokens, topk, experts, seed=5)
        expected = 0 if name == "empty_ranks" and rank % 2 else tokens
        assert idx.shape == weights.shape == (expected, topk)
        assert (idx.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert ((idx >= -1) & (idx < experts)).all()
        again = routing(name, rank, ranks, tokens, topk, experts, seed=5)
        assert torch.equal(idx, again[0])
        assert torch.equal(weights, again[1])


def picks(name: str, rank: int = 1, seed: int = 0) -> torch.Tensor:
    """300 tokens, 4 picks of 10 experts, 3 ranks (which hold experts 0-3, 4-6 and 7-9)."""
    return routing(name, rank, 3, 300, 4, 10, seed)[0]


def test_routings_differ_between_ranks_and_seeds() -> None:
    for name in ("uniform", "zipf", "dropped", "duplicates"):
        assert not torch.equal(picks(name, 0), picks(name, 1))
        assert not torch.equal(picks(name, 0), picks(name, 0, seed=1))


def experts_in(picked: torch.Tensor) -> set[int]:
    return {int(expert) for expert in picked.flatten()} - {-1}


def test_routings_are_what_their_names_say() -> None:
    assert all(len(experts_in(row)) == 4 for name in ("uniform", "zipf") for row in picks(name))
    load = picks("zipf").flatten().bincount(minlength=10)
    assert load.max() > 2 * load.min()
    assert len({int(picks("zipf", rank).flatten().bincount().argmax()) for rank in range(3)}) == 1
    assert {int(dropped) for dropped in (picks("dropped") == -1).sum(1)} == {0, 1, 2, 3, 4}
    assert all(len(experts_in(row)) < 4 for row in picks("duplicates"))
    assert len(experts_in(torch.cat([picks("one_expert", rank) for rank in range(3)]))) == 1
    assert (picks("one_expert") >= 0).sum(0).tolist() == [75, 75, 75, 75]
    homes = [{0, 1, 2, 3}, {4, 5, 6}, {7, 8, 9}]
    assert [experts_in(picks("local", rank)) for rank in range(3)] == homes
    chosen = [[experts_in(picks("one_rank", rank, seed)) for rank in range(3)] for seed in range(9)]
    assert all(first in homes and second == first == third for first, second, third in chosen)
    assert len({frozenset(first) for first, _, _ in chosen}) > 1
    assert (picks("none") == -1).all()
    with pytest.raises(ValueError, match="'unifrom' is unknown; use one of uniform, zipf"):
        picks("unifrom")


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8])
def test_payload_rows_are_their_own(dtype: torch.dtype) -> None:
    rows = torch.cat([payload(rank, 600, 16, dtype, seed=3) for rank in (0, 1, 9)])
    assert rows.dtype == dtype
    assert len({tuple(float(digit) for digit in row) for row in rows[:, :8]}) == len(rows)
    assert rows[600 + 513, :8].tolist() == [0, 1, 0, 0, 1, 0, 0, 1]
    assert rows[1200 + 7, :8].tolist() == [1, 1, 0, 0, 0, 0, 0, 7]
    assert_same_bits(payload(1, 600, 16, dtype, seed=3), rows[600:1200], what="payload")
    assert payload(0, 4, 3, dtype, seed=0).shape == (4, 3)


def packed(*places: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([rank << 32 | token for rank, token in places])


def difference(actual: torch.Tensor, expected: torch.Tensor, **labels: object) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(actual, expected, what="x", **labels)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def test_same_bits_are_bits() -> None:
    nan = torch.tensor([[float("nan"), 1.0]])
    other_nan = (
        nan.view(torch.int32).add(torch.tensor([[1, 0]], dtype=torch.int32)).view(torch.float32)
    )
    assert_same_bits(nan, nan.clone(), what="x")
    assert "column 0 is nan (0x7fc00001), expected nan (0x7fc00000)" in difference(other_nan, nan)
    assert "row 1\ncolumn 0 is -0.0 (0x8000), expected 0.0 (0x0000)" in difference(
        torch.tensor([0.0, -0.0], dtype=torch.float16), torch.zeros(2, dtype=torch.float16)
    )
    for empty in (torch.zeros(0, 3), torch.zeros(3, 0), torch.zeros(0)):
        assert_same_bits(empty, empty.clone(), what="x")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32, torch.int64])
def test_a_difference_is_found_in_every_dtype(dtype: torch.dtype) -> None:
    expected = torch.ones(2, 3, 4).to(dtype)
    assert_same_bits(expected.transpose(0, 1), expected.transpose(0, 1).contiguous(), what="x")
    actual = expected.clone()
    actual[1, 0, 2] = 0
    assert "1 of 6 rows are wrong, first row [1, 0]\ncolumn 2 is 0" in difference(actual, expected)


def test_a_difference_is_described() -> None:
    expected = payload(0, 4, 8, torch.float32, seed=0)
    source, experts = packed((0, 3), (2, 5), (2, 7), (3, 0)), torch.tensor([0, 1, 1, 4])
    labels = {"source": source, "experts": experts, "rank": 6}
    swapped = difference(expected[[0, 2, 1, 3]], expected, **labels)
    assert swapped.startswith(
        "rank 6: x: 2 of 4 rows are wrong, first row 1 (source rank 2, token 5, expert 1)\n"
    )
    assert (
        "column 7 is 2.0 (0x40000000), expected 1.0 (0x3f800000); 1 of 8 columns differ" in swapped
    )
    assert "it is misplaced: it equals expected row 2 (source rank 2, token 7, expert 1)" in swapped
    changed = difference(
        expected + torch.eye(4, 8), expected, source=-torch.ones(4, dtype=torch.int64)
    )
    assert "4 of 4 rows are wrong, first row 0 (padding)" in changed
    assert "it equals no expected row" in changed
    assert "first row 0 (experts [4, -1])" in difference(
        -expected, expected, experts=torch.tensor([[4, -1]] * 4)
    )
    assert (
        difference(expected[:2], expected, rank=1)
        == "rank 1: x: got float32 [2, 8], expected float32 [4, 8]"
    )
    assert difference(expected.half(), expected) == "x: got float16 [4, 8], expected float32 [4, 8]"


def test_close_is_relative_to_the_norm_and_never_true_of_nan() -> None:
    expected = torch.full((2, 8), 2.0)
    assert_close(expected * 1.009, expected, relative=0.01, what="y")
    assert_close(expected.bfloat16(), expected, relative=0.0, what="y")
    with pytest.raises(
        AssertionError, match=r"allowed 8\.000e-02 .* largest at \[0, 0\]: 2\.0220.*, expected 2\.0"
    ):
        assert_close(expected * 1.011, expected, relative=0.01, what="y")
    for bad in (float("nan"), float("inf")):
        with pytest.raises(AssertionError, match="y: got 16 of 16 values that are not finite"):
            assert_close(expected * bad, expected * bad, relative=1e9, what="y")
        one_bad = expected.clone()
        one_bad[1, 3] = bad
        for got, wanted, side in ((one_bad, expected, "got"), (expected, one_bad, "expected")):
            with pytest.raises(
                AssertionError, match=f"y: {side} 1 of 16 values that are not finite"
            ):
                assert_close(got, wanted, relative=1e9, what="y")
    with pytest.raises(AssertionError, match=r"got float32 \[8\], expected float32 \[2, 8\]"):
        assert_close(expected[0], expected, relative=1.0, what="y")
    with pytest.raises(AssertionError, match=r"allowed 0\.000e"):
        assert_close(expected, expected * 0, relative=1.0, what="y")


@pytest.mark.parametrize("relative", [float("nan"), float("inf"), -0.1])
def test_close_by_no_number_is_refused(relative: float) -> None:
    """Under NaN nothing, under infinity everything would pass."""
    with pytest.raises(ValueError, match=r"relative \(.*\) must be a finite number of at least 0"):
        assert_close(torch.ones(2), torch.zeros(2), relative=relative, what="y")


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1.0, 1e200, 1e308])
def test_close_at_any_size(size: float) -> None:
    """Where squares are no float64 any more, too."""
    expected = torch.tensor([[size, -size], [0.0, size]], dtype=torch.float64)
    assert_close(expected * 1.0, expected, relative=0.0, what="y")
    assert_close(expected * 0.75, expected, relative=0.26, what="y")
    with pytest.raises(
        AssertionError, match=r"y: norm of the difference is .* largest at \[0, 1\]"
    ):
        assert_close(
            expected * torch.tensor([[1.0, -1.0], [1.0, 1.0]]), expected, relative=0.5, what="y"
        )


def test_close_of_complex_numbers_and_of_nothing() -> None:
    expected = torch.tensor([3 + 4j, 0j])
    assert_close(expected + 0.03j, expected, relative=0.01, what="y")
    for wrong in (expected.conj(), expected.real, expected + 1j):
        with pytest.raises(AssertionError, match="y: norm of the difference"):
            assert_close(wrong, expected, relative=0.01, what="y")
    with pytest.raises(AssertionError, match="y: norm of the difference"):
        assert_close(expected.real, expected, relative=0.01, what="y")
    with pytest.raises(AssertionError, match="y: expected 1 of 2 values that are not finite"):
        assert_close(
            expected, expected + torch.tensor([0, complex(0, float("nan"))]), relative=1.0, what="y"
        )
    for shape in ((0,), (0, 3), (3, 0)):
        assert_close(
            torch.zeros(shape), torch.zeros(shape, dtype=torch.float16), relative=0.0, what="y"
        )
    with pytest.raises(AssertionError, match=r"got float32 \[0, 3\], expected float32 \[0, 4\]"):
        assert_close(torch.zeros(0, 3), torch.zeros(0, 4), relative=1.0, what="y")
    assert_close(torch.tensor(-0.0), torch.tensor(0.0), relative=0.0, what="y")
    with pytest.raises(AssertionError, match=r"largest at 0: 1\.0, expected 2\.0"):
        assert_close(
            torch.tensor(1.0, requires_grad=True), torch.tensor(2.0), relative=0.4, what="y"
        )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_same_bits_of_complex_numbers(dtype: torch.dtype) -> None:
    expected = torch.tensor([[1 + 2j, 3 - 4j], [0j, 5j]], dtype=dtype)
    assert_same_bits(expected.clone(), expected, what="x")
    assert_same_bits(expected.conj().conj(), expected, what="x")
    assert_same_bits(expected.conj(), expected.conj().resolve_conj(), what="x")
    assert_same_bits(expected.conj().imag, -expected.imag, what="x")
    told = difference(expected + torch.tensor([[0, 0], [0, 1j]]), expected)
    assert "1 of 2 rows are wrong, first row 1\ncolumn 1 is 6j (0x" in told
    assert "1 of 2 columns differ" in told
    assert "column 0 is (1-2j)" in difference(expected.conj(), expected)


@torch.library.custom_op("tokenyard_test::fresh", mutates_args=())
def fresh(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like)


@distributed_test(world_size=1)
def test_poison_fills_fresh_memory_wherever_it_is_made(ranks: Ranks) -> None:
    like = torch.ones(5, device=ranks.device)
    with poisoned():
        in_thread: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: in_thread.append(torch.empty_like(like)))
        thread.start()
        thread.join()
        made = [
            torch.empty(5, device=ranks.device),
            torch.empty_like(like),
            torch.empty_strided((2, 2), (1, 2), device=ranks.device),
            like.new_empty(5),
            torch.empty(0, device=ranks.device).resize_(5),
            fresh(like),
            *in_thread,
            *(torch.empty(5, dtype=dtype, device=ranks.device) for dtype in FLOATS),
        ]
        assert all(tensor.float().isnan().all() for tensor in made)
        for dtype in (torch.int8, torch.int32, torch.int64):
            assert (like.new_empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()
        assert like.new_empty(5, dtype=torch.bool).all()
        assert torch.zeros(5, device=ranks.device).eq(0).all()


def interrupted() -> None:
    with poisoned():
        assert torch.are_deterministic_algorithms_enabled()
        raise KeyError


def test_poison_ends_with_its_block() -> None:
    with pytest.raises(KeyError):
        interrupted()
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with poisoned():
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
