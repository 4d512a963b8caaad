"""Which native objects a buffer makes, with what, when it uses which again, and when it lets go:
told by stand-ins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tokenyard as ty
from tokenyard.api import BESIDE_COLLECTIVES
from tokenyard.deep_ep import natives, normal
from tokenyard.deep_ep.decode import LowLatencyState, size_hint
from tokenyard.deep_ep.handles import NormalHandle
from tokenyard.deep_ep.inputs import Asked
from tokenyard.header import CACHED, COMBINE, DISPATCH

CPU = torch.device("cpu")
MIB = 1 << 20
SIZES = (128, 12, 3, 28, CPU)
OTHERS = [
    (256, 12, 3, 28, CPU),
    (128, 13, 3, 28, CPU),
    (128, 12, 4, 28, CPU),
    (128, 12, 3, 29, CPU),
]


class Native:
    """What was made, and whether it was closed."""

    made: list[Native]
    asked: list[str]
    unsupported: tuple[str, ...] = ()
    serves = "collective"

    def __init__(self, group: Any, **options: Any) -> None:
        self.asked.append(options["engine"])
        if options["engine"] in self.unsupported:
            raise ty.NotSupported(options["engine"])
        self.group, self.options, self.closed, self.silent = group, options, False, None
        self.engine = {"auto": self.serves}.get(options["engine"], options["engine"])
        low = SimpleNamespace(silent_rank=partial(getattr, self, "silent"))
        self.told: list[tuple[int, bool]] = []
        self.ended: list[bool] = []
        self._calls = SimpleNamespace(
            close=partial(self.ended.append, True),
            low=low if self.engine == "low_latency" else None,
            gone="",
            refuse=self.refuse,
        )
        most = options.get("max_tokens_per_rank")
        self.config, self.device = (
            SimpleNamespace(timeout=options["timeout"], max_tokens_per_rank=most),
            None,
        )
        self.active_mask = torch.ones(2, dtype=torch.int32)
        self.masked: list[tuple[int, bool]] = []
        self.made.append(self)

    def close(self) -> None:
        self.closed = True

    def refuse(self, op: int, exact: bool, error: Exception) -> Exception:
        self.told.append((op, exact))
        return error

    def mask(self, rank: int) -> None:
        self.masked.append((rank, True))

    def unmask(self, rank: int) -> None:
        self.masked.append((rank, False))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(
        num_nvl_bytes: int = 0, masks: bool = False, unsupported: tuple[str, ...] = ()
    ) -> natives.Natives:
        Native.made, Native.asked, Native.unsupported = [], [], unsupported
        group: Any = SimpleNamespace()
        return natives.Natives(group, 0, 2, num_nvl_bytes, masks)

    for name in (natives.ENGINE_VARIABLE, natives.LOW_LATENCY_VARIABLE, natives.TIMEOUT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(natives, "ExpertParallel", Native)
    return make


def test_what_they_are_made_with(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes by their names; rings within bounds in normal mode, none of their own in the other;
    variables.
    """
    for given, rings in ((0, None), (1, 32 * MIB), (64 * MIB, 64 * MIB), (1 << 40, 128 * MIB)):
        known = make(given)
        normal, low, count = known.normal(SIZES), known.low_latency(SIZES), known.counting(4, CPU)
        same = {
            "hidden": 128,
            "num_experts": 12,
            "num_topk": 3,
            "max_tokens_per_rank": 28,
            "device": CPU,
        }
        more = {"timeout": 100.0, "num_sms": None, "spare_sms": BESIDE_COLLECTIVES}
        assert normal.options == {**same, **more, "engine": "auto", "buffer_bytes": rings}
        assert low.options == {**same, **more, "engine": "low_latency", "buffer_bytes": None}
        assert count.options == normal.options | {
            "hidden": 4, "num_experts": 2, "num_topk": 1, "max_tokens_per_rank": 2,
        }  # fmt: skip
    monkeypatch.setenv(natives.ENGINE_VARIABLE, "twolevel")
    monkeypatch.setenv(natives.LOW_LATENCY_VARIABLE, "nvlink")
    monkeypatch.setenv(natives.TIMEOUT_VARIABLE, "2.5")
    known = make()
    assert [made.options["engine"] for made in (known.normal(SIZES), known.low_latency(SIZES))] == [
        "twolevel",
        "nvlink",
    ]
    assert {made.options["timeout"] for made in Native.made} == {2.5} and len(Native.made) == 2


def test_multiprocessors(make: Callable[..., Any]) -> None:
    """Of objects of normal mode that are made later, for GPUs; at least two for each rank."""
    known, gpu, sizes = make(), torch.device("cuda", 0), SIZES[:3]
    first = known.normal((*sizes, 28, gpu))
    for number, want in ((24, 24), (2, 4), (0, None)):
        known.num_sms, later = number, 99 + number
        on_gpu = known.normal((*sizes, later, gpu)), known.counting(later, gpu)
        assert [made.options["num_sms"] for made in on_gpu] == [want, want]
        assert known.low_latency((*sizes, later, gpu)).options["num_sms"] is None
        assert known.normal((*sizes, later, CPU)).options["num_sms"] is None
        assert known.normal((*sizes, 28, gpu)) is first
    assert first.options["num_sms"] is None


def test_each_size_has_its_own(make: Callable[..., Any]) -> None:
    known = make()
    for get in (known.normal, known.low_latency):
        firsts = [get(sizes) for sizes in (SIZES, *OTHERS)]
        assert len(set(map(id, firsts))) == 5
        for sizes, first in zip((SIZES, *OTHERS), firsts, strict=True):
            seen = {id(get(sizes)), id(get(sizes))}
            assert id(first) in seen
    count = len(Native.made)
    assert count == 5 + 2 * 5
    known.normal(SIZES), known.low_latency(SIZES)
    assert len(Native.made) == count


def test_turns_of_two(make: Callable[..., Any]) -> None:
    """Engine low_latency has two objects that take turns; others have one; without it "auto"
    serves, unless it was asked for.
    """
    known = make()
    turns = [known.low_latency(SIZES) for _ in range(5)]
    assert turns[0] is turns[2] is turns[4] and turns[1] is turns[3] is not turns[0]
    assert known.last_low_latency is turns[4] and known.all_low_latency() == turns[:2]
    known = make(unsupported=("low_latency",))
    assert known.low_latency(SIZES) is known.low_latency(SIZES) and len(Native.made) == 1
    assert Native.made[0].options["engine"] == "auto"


def test_an_engine_that_was_asked_for_is_not_replaced(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(natives.LOW_LATENCY_VARIABLE, "low_latency")
    with pytest.raises(ty.NotSupported, match="low_latency"):
        make(unsupported=("low_latency",)).low_latency(SIZES)
    assert Native.asked == ["low_latency"]  # nor tried again


def test_silence_is_told_without_masks_only(make: Callable[..., Any]) -> None:
    """By the dispatch after the call, whichever of the two objects found it, and by every later
    one.
    """
    for which in (0, 1):
        for masks in (False, True):
            known = make(masks=masks)
            objects = [known.low_latency(SIZES), known.low_latency(SIZES)]
            objects[which].silent = 1
            for _ in range(3):
                if masks:
                    assert known.low_latency(SIZES) in objects
                    continue
                with pytest.raises(
                    ty.PeerTimeout, match=r"rank 1 was silent for 100.0 s.*enable_shrink=True"
                ) as told:
                    known.low_latency(SIZES)
                assert told.value.rank == 1


def test_the_end(make: Callable[..., Any]) -> None:
    """All of them are closed, once; then the buffer says so."""
    known = make()
    known.normal(SIZES), known.normal(OTHERS[0]), known.low_latency(SIZES), known.counting(4, CPU)
    made = list(Native.made)
    assert len(made) == 5 and known.check_open() is known
    known.close()
    assert all(each.closed for each in made)
    known.close()
    with pytest.raises(RuntimeError, match="this Buffer was destroyed: make a new one"):
        known.check_open()


def test_whom_a_refusal_tells(make: Callable[..., Any]) -> None:
    """The object of these sizes; if some are not known, of those that agree with most of the others
    the last. In turn.
    """
    known = make()
    assert known.whom_normal(SIZES) is None and known.whom_normal((None,) * 5) is None
    assert known.whom_low_latency(SIZES) is None
    error = ValueError("no")
    assert known.refused_with(error, None, NormalHandle, COMBINE) is error  # nobody to tell
    made = [known.normal(sizes) for sizes in (SIZES, *OTHERS)]
    assert known.last_normal is made[-1]
    for sizes, each in zip((SIZES, *OTHERS), made, strict=True):
        assert known.whom_normal(sizes) is each
    assert known.whom_normal((512, 12, 3, 28, CPU)) is None  # the others make it
    assert known.whom_normal((256, None, None, None, CPU)) is made[1]
    assert known.whom_normal((None, 13, None, None, None)) is made[2]
    assert known.whom_normal((None, 12, None, 28, CPU)) is made[3]  # the last of three
    turns = [known.low_latency(SIZES), known.low_latency(SIZES)]
    assert known.whom_low_latency((None, 12, 3, 28, None)) is turns[0]
    assert known.low_latency(SIZES) is turns[1] and known.last_low_latency is turns[1]


def test_what_a_refusal_tells(make: Callable[..., Any]) -> None:
    """The call that the others are in, and whether it waits for counts."""
    known, error = make(), ValueError("no")
    exact, static = (
        known.normal((64, 12, 3, normal.MAX_TOKENS, CPU)),
        known.normal((64, 12, 3, 20, CPU)),
    )
    bare = known.normal((64, 2, 2, normal.MAX_TOKENS, CPU))
    x, idx, experts = torch.zeros(4, 64), torch.zeros(4, 3), torch.zeros(12)
    cases: list[tuple[Any, Any, Any, bool]] = [
        (x, (idx, 0), exact, True),
        (x, (idx, 40), static, False),
        (x, (idx, 41), static, False),
        ((x, None), (idx, np.int32(40)), static, False),
        (None, (idx, 0), exact, True),
        (x, (None, 0), bare, True),
    ]
    for rows, (picks, worst), ep, waits in cases:
        asked = Asked(
            x=rows,
            handle=None,
            num_tokens_per_expert=experts,
            topk_idx=picks,
            topk_weights=None,
            num_worst_tokens=worst,
        )
        assert normal.refused(known, error, asked) is error
        assert [each.told for each in (exact, static, bare) if each is not ep] == [[], []]
        assert ep.told == [(DISPATCH, waits)]
        ep.told.clear()
    known.last_normal = static
    assert (
        normal.refused(known, error, Asked(handle=object()))
        is known.refused_with(error, None, NormalHandle, COMBINE)
        is error
    )
    assert static.told == [(CACHED, True), (COMBINE, True)]


def test_who_is_let_go_is_closed(make: Callable[..., Any]) -> None:
    """Not sooner than the buffer and all handles are gone, which hold the object."""
    known = make()
    held, ended = known.normal(SIZES), known.normal(SIZES).ended
    Native.made.clear()
    del known
    gc.collect()
    assert held.options["hidden"] == 128 and ended == []
    del held
    gc.collect()
    assert ended == [True]


def test_masks_of_several_objects() -> None:
    """A rank is left out if any of them leaves it out; only those that can are asked; asking for it
    goes to all.
    """
    Native.made, Native.asked = [], []
    options = {"timeout": 1.0}
    first, second, other = (
        Native(None, engine=engine, **options)
        for engine in ("low_latency", "low_latency", "nvlink")
    )
    objects: Any = [first, second, other]
    buffer: Any = LowLatencyState()
    buffer.rank, buffer.group_size, buffer.enable_shrink = 0, 2, True
    buffer._natives = SimpleNamespace(check_open=object, all_low_latency=lambda: objects)
    other.active_mask.zero_()
    for lost in ([], [(0, 1)], [(1, 1)], [(0, 0), (1, 1)]):
        for each in (first, second):
            each.active_mask.fill_(1)
        for which, rank in lost:
            objects[which].active_mask[rank] = 0
        status = torch.full((2,), 7, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [int(any(rank == out for _, out in lost)) for rank in range(2)]
    buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_update_mask_buffer(1, False)
    assert first.masked == second.masked == [(1, True), (1, False)] and other.masked == [(1, True)]
    objects.clear()
    with pytest.raises(ValueError, match="rank 1 cannot be left out yet"):
        buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_update_mask_buffer(1, False)


def test_the_size_hint_grows_with_what_needs_memory() -> None:
    """128 MiB, or both objects of engine low_latency: two halves, a slot for each token of each
    rank, in each.
    """
    assert size_hint(1, 128, 2, 4) == 128 * MIB
    slots = 2 * 2 * 8 * 1024 * (2 * 7168)  # objects, halves, ranks, tokens, bytes of a row
    assert slots < size_hint(1024, 7168, 8, 256) < 1.05 * slots
    assert size_hint(1024, 7168, 16, 256) > 1.9 * size_hint(1024, 7168, 8, 256)
    assert size_hint(2048, 7168, 8, 256) > 1.9 * size_hint(1024, 7168, 8, 256)
    assert size_hint(1024, 14336, 8, 256) > 1.9 * size_hint(1024, 7168, 8, 256)
