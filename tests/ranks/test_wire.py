"""Headers and counts from a peer that lies: a named error, and nothing is sized or addressed by
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tokenyard as ty
from bad_input import CASE, Inputs, assert_works, check, error_of, make, make_hasty, meet
from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.collective import DISPATCH
from tokenyard.engines.gloo_transport import GlooTransport
from tokenyard.engines.plans import note_bad_index
from tokenyard.engines.transport import Spans
from tokenyard.handle import Spec
from tokenyard.header import COUNTS, NUM_ROWS, NUM_TOKENS, Fingerprint
from tokenyard.rows import Payload
from tokenyard.testing import Ranks, distributed_test

PICKS, EXPERTS, LOCAL = 3, 7, 3
FIRST, STATUS, TEXT = 1, 1 + len(fields(Fingerprint)), NUM_TOKENS - head.TEXT_WORDS
SAID = {
    "op": DISPATCH,
    "call": 5,
    "hidden": 40,
    "exact": 1,
    "expert_alignment": 1,
    "capacity": -1,
    "weighted": 1,
}
CALL = Fingerprint(**{**dict.fromkeys((f.name for f in fields(Fingerprint)), 0), **SAID})


def honest(num_ranks: int = 3) -> Tensor:
    """One header from each rank, as rank 0 gets them: 4 rows of 6 tokens, 7 picks."""
    headers = head.blank(CALL, num_ranks, LOCAL, 6)
    headers[:, NUM_ROWS] = 4
    headers[:, COUNTS:] = torch.tensor([4, 0, 3])
    return headers


def verify(
    headers: Tensor, rank: int = 0, picks: int = PICKS, max_rows: int = head.MOST_ROWS
) -> None:
    config = Config(
        num_experts=EXPERTS,
        hidden=40,
        num_topk=picks,
        max_tokens_per_rank=6,
        rank=rank,
        world_size=len(headers),
        timeout=1.0,
    )
    head.verify(headers, config, max_rows=max_rows)


def test_honest_headers_pass() -> None:
    verify(honest())
    verify(honest(1))
    quiet = head.blank(CALL, 3, LOCAL, 6)
    verify(quiet)
    huge = honest()
    huge[:, NUM_TOKENS] = 2**31 - 1
    verify(huge)


@pytest.mark.parametrize("magic", [0, -1, head.MAGIC + 1, head.MAGIC ^ (1 << 62)])
def test_another_magic(magic: int) -> None:
    headers = honest()
    headers[2, 0] = magic
    with pytest.raises(ty.PeerError, match="rank 2 sent something that is not a tokenyard header"):
        verify(headers)


LIES: dict[str, Callable[[Tensor], object]] = {
    "negative tokens": lambda row: row[NUM_TOKENS].fill_(-1),
    "negative rows": lambda row: row[NUM_ROWS].fill_(-4),
    "more rows than tokens": lambda row: row[NUM_ROWS].fill_(7),
    "tokens beyond int32": lambda row: row[NUM_TOKENS].fill_(2**31),
    "everything beyond int32": lambda row: row[NUM_TOKENS:].fill_(2**40),
    "a negative count": lambda row: row[COUNTS].fill_(-1),
    "a negative count that others make up for": lambda row: row[COUNTS:].copy_(
        torch.tensor([-1, 4, 4])
    ),
    "a count above the rows": lambda row: row[COUNTS].fill_(5),
    "a huge count": lambda row: row[COUNTS].fill_(2**62),
    "counts whose sum wraps": lambda row: row[COUNTS:].fill_(2**63 - 1),
    "fewer picks than rows": lambda row: row[COUNTS:].copy_(torch.tensor([1, 1, 1])),
    "counts without rows": lambda row: row[NUM_ROWS].fill_(0),
    "rows without counts": lambda row: row[COUNTS:].fill_(0),
    "an unknown status": lambda row: row[STATUS].fill_(7),
    "a negative status": lambda row: row[STATUS].fill_(-1),
}


@pytest.mark.parametrize("lie", LIES)
def test_impossible_numbers(lie: str) -> None:
    headers = honest()
    LIES[lie](headers[1])
    with pytest.raises(ty.PeerError, match="rank 1"):
        verify(headers)


def to_every_rank(*lies: int) -> Tensor:
    """Honest headers that also say how many rows go to each of three ranks; rank 1 says
    ``lies``.
    """
    headers = torch.cat([honest(), torch.tensor([6, 0, 4]).expand(3, -1)], 1)
    headers[1, COUNTS + LOCAL :] = torch.tensor(lies)
    return headers


def test_rows_to_every_rank() -> None:
    """What is told of other ranks is bounded as well: by the tokens that there are, and by the room
    for them.
    """
    verify(to_every_rank(0, 6, 6))
    for lies in ((-1, 0, 0), (0, 7, 0), (0, 0, -(2**63)), (0, 0, 2**40)):
        with pytest.raises(ty.PeerError, match="rank 1 announced impossible counts"):
            verify(to_every_rank(*lies))
    verify(to_every_rank(0, 6, 0), max_rows=6)
    many = to_every_rank(0, 6, 0)
    many[:, NUM_TOKENS] = 9
    many[1, -1] = 9
    with pytest.raises(ty.PeerError, match="rank 1 announced impossible counts"):
        verify(many, max_rows=6)


def test_more_rows_than_there_is_room_for() -> None:
    verify(honest(), max_rows=4)
    with pytest.raises(ty.PeerError, match="announced impossible counts: 4 rows of 6 tokens"):
        verify(honest(), max_rows=3)


@pytest.mark.parametrize("rank", range(3))
def test_counts_for_an_expert_of_another_rank(rank: int) -> None:
    """7 experts: rank 0 has three of them, the others two, so that their headers' third count is
    nobody's.
    """
    headers = honest()
    headers[:, COUNTS:] = torch.tensor([4, 3, 0])
    verify(headers, rank)
    headers[2, COUNTS:] = torch.tensor([4, 2, 1])
    if rank == 0:
        verify(headers, rank)
    else:
        with pytest.raises(ty.PeerError, match="rank 2 announced impossible counts"):
            verify(headers, rank)


def test_more_picks_than_tokens_can_have() -> None:
    headers = honest()
    headers[1, NUM_ROWS] = 1
    headers[1, COUNTS:] = 1
    verify(headers)
    with pytest.raises(
        ty.PeerError, match="rank 1 announced impossible counts: 1 rows of 6 tokens"
    ):
        verify(headers, picks=2)


@pytest.mark.parametrize("name", [f.name for f in fields(Fingerprint)])
@pytest.mark.parametrize("value", [99, -7, 2**62])
def test_a_fingerprint_of_nonsense(name: str, value: int) -> None:
    """Numbers that are no word of ours are nobody's index."""
    headers = honest()
    headers[2, FIRST : FIRST + len(astuple(CALL))] = torch.tensor(
        astuple(replace(CALL, **{name: value}))
    )
    with pytest.raises(ty.Mismatch, match=r"ranks disagree on .*rank 0 says .*, rank 2 says"):
        verify(headers)


SPEC: dict[str, Any] = {
    "layout": ty.Layout.EXPERT_MAJOR,
    "exact": False,
    "expert_alignment": 4,
    "capacity": 9,
}


def told(**changes: Any) -> dict[str, int]:
    """The fingerprint of one and the same call but for ``changes``."""
    plain = {
        "op": DISPATCH,
        "call": 5,
        "payload": Payload(torch.zeros(2, 8).bfloat16(), torch.zeros(2, 3)),
        "spec": Spec(**SPEC),
        "mode": ty.Quantize.FP8,
        "weighted": True,
        "routing": 77,
        "scaled": False,
    }
    given = {**plain, **changes}
    call, routing = given.pop("call"), given.pop("routing")
    return asdict(head.fingerprint_of(head.CallKind(**given), call, routing))


TOLD: dict[str, tuple[int, dict[str, Any]]] = {
    "op": (head.COMBINE, {"op": head.COMBINE}),
    "call": (6, {"call": 6}),
    "hidden": (9, {"payload": Payload(torch.zeros(2, 9).bfloat16(), torch.zeros(2, 3))}),
    "dtype": (2, {"payload": Payload(torch.zeros(2, 8), torch.zeros(2, 3))}),
    "scale_words": (4, {"payload": Payload(torch.zeros(2, 8).bfloat16(), torch.zeros(2, 4))}),
    "scale_dtype": (7, {"payload": Payload(torch.zeros(2, 8).bfloat16(), torch.zeros(2, 3).int())}),
    "layout": (0, {"spec": Spec(**{**SPEC, "layout": ty.Layout.FLAT})}),
    "exact": (1, {"spec": Spec(**{**SPEC, "exact": True})}),
    "expert_alignment": (8, {"spec": Spec(**{**SPEC, "expert_alignment": 8})}),
    "capacity": (-1, {"spec": Spec(**{**SPEC, "capacity": None})}),
    "quantize": (0, {"mode": None}),
    "weighted": (0, {"weighted": False}),
    "routing": (78, {"routing": 78}),
    "scaled": (1, {"scaled": True}),
    "in_place": (1, {"in_place": True}),
}


def test_every_argument_is_told() -> None:
    """What differs between two calls differs in their fingerprints, there and nowhere else."""
    assert set(TOLD) == {f.name for f in fields(Fingerprint)}
    plain = told()
    for name, (value, changes) in TOLD.items():
        assert plain[name] != value, name
        assert told(**changes) == {**plain, name: value}, name
    assert [told(mode=mode)["quantize"] for mode in ty.Quantize] == [1, 2, 3, 4]


def test_digests_tell_routings_apart() -> None:
    """By their ids, by the order of these, and by whose they are."""
    ids = torch.tensor([[0, 3], [-1, 2], [5, -1]])
    others = [
        ids,
        ids.flip(0),
        ids.flip(1),
        ids.clamp(min=0),
        ids.where(ids != 3, 4),
        ids[:2],
        ids.new_full((3, 2), -1),
    ]
    digests = [int(head.digest(each)) for each in others]
    assert len(set(digests)) == len(others)
    assert int(head.digest(ids.int())) == digests[0]
    assert head.mixed([1, 2, 3]) != head.mixed([1, 3, 2]) != head.mixed([3, 1, 2])
    assert min(head.mixed([-(2**63), -1]), head.mixed([2**63 - 1] * 3), head.mixed([-5])) >= 0


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_a_blank_header_says_what_the_call_is_and_announces_no_rows(num_tokens: int) -> None:
    blank = head.blank(CALL, 2, LOCAL, num_tokens)
    said = [head.MAGIC, *astuple(CALL)]
    assert blank[:, : len(said)].tolist() == [said, said]
    assert blank[:, NUM_ROWS - 1].tolist() == [num_tokens, num_tokens]
    assert not blank[:, len(said) : NUM_ROWS - 1].any() and not blank[:, NUM_ROWS:].any()


def test_every_rank_comes_to_the_same_verdict() -> None:
    headers = honest()
    headers[2, FIRST : FIRST + len(astuple(CALL))] = torch.tensor(astuple(replace(CALL, hidden=41)))
    for rank in range(3):
        with pytest.raises(
            ty.Mismatch, match="ranks disagree on hidden: rank 0 says 40, rank 2 says 41"
        ):
            verify(headers, rank)


def test_refusals_carry_their_reason() -> None:
    headers = honest()
    head.refuse(headers[1:2], "x has 39 channels")
    with pytest.raises(
        ty.PeerError, match=r"^rank 1 refused its side of this call: x has 39 channels$"
    ):
        verify(headers)


@pytest.mark.parametrize("reason", ["", "ß" * 300, "e" * 255 + "ß", "\0\0"])
def test_refusals_of_any_text(reason: str) -> None:
    headers = honest()
    head.refuse(headers[1:2], reason)
    with pytest.raises(ty.PeerError, match="rank 1 refused its side of this call"):
        verify(headers)


def test_the_remedy_of_a_refusal_is_not_cut_off() -> None:
    """The longest of our own messages reaches the other ranks whole."""
    headers = honest()
    error = error_of(
        lambda: ty.ExpertParallel(**LONE).dispatch(
            torch.zeros(300, 8), torch.zeros(300, 2).long(), exact=False
        )
    )
    head.refuse(headers[1:2], str(error))
    with pytest.raises(ty.PeerError, match=r"or use exact=True with Layout\.FLAT or EXPERT_MAJOR$"):
        verify(headers)


def test_a_long_refusal_is_cut_where_the_header_ends() -> None:
    headers = honest()
    head.refuse(headers[1:2], "e" * 500 + " and the end" + " is cut")
    with pytest.raises(ty.PeerError, match=r"eee and the end$"):
        verify(headers)


LONE = {"num_experts": 2, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 256, "device": "cpu"}


def test_garbage_instead_of_text() -> None:
    headers = honest()
    headers[1, STATUS] = head.REFUSED
    headers[1, TEXT:NUM_TOKENS] = -1
    with pytest.raises(ty.PeerError, match="rank 1 refused"):
        verify(headers)


def test_bad_ids_are_a_value_error_at_home_and_a_peer_error_elsewhere() -> None:
    headers = honest()
    head.mark_bad_index(headers[1:2], torch.tensor([[0, 1, 2], [3, -1, 7]]), EXPERTS)
    with pytest.raises(
        ValueError, match=r"^topk_idx\[1, 2\] is 7, but there are 7 experts \(use -1 for"
    ) as caught:
        verify(headers, 1)
    assert type(caught.value) is ValueError
    with pytest.raises(
        ty.PeerError, match=r"rank 1 refused its side of this call: topk_idx\[1, 2\] is 7"
    ):
        verify(headers, 0)


BAD_IDS = [
    ([[0, 1, 2], [3, -1, 6]], None),
    ([[0, -1, 2], [9, -1, 8]], (3, 9)),
    ([[0, 1, 2], [3, -2, 7]], (4, -2)),
    ([[7, -5, 2], [3, -2, 7]], (0, 7)),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("ids", "first"), BAD_IDS)
def test_the_first_bad_id_is_the_one_that_is_named(
    ids: list[list[int]], first: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    """In headers, and where the host learns it later: there a call that follows does not take its
    place.
    """
    picks = torch.tensor(ids, dtype=dtype)
    header, seen = head.blank(CALL, 2, LOCAL, 2), torch.tensor([-1, -1])
    head.mark_bad_index(header, picks, EXPERTS)
    status = [head.OK] if first is None else [head.BAD_INDEX, *first, PICKS]
    assert header[:, STATUS : STATUS + len(status)].tolist() == [status] * 2
    for later in (picks, picks[:0], torch.full_like(picks, 70)):
        note_bad_index(seen, later, EXPERTS)
        named = first or ((0, 70) if 70 in later else (-1, -1))
        assert seen.tolist() == list(named)


@pytest.mark.parametrize("words", [(-5, 9, 3), (2**62, -(2**62), 0), (0, 0, -(2**63))])
def test_bad_ids_that_lie(words: tuple[int, int, int]) -> None:
    headers = honest()
    headers[1, STATUS] = head.BAD_INDEX
    headers[1, STATUS + 1 : STATUS + 4] = torch.tensor(words)
    with pytest.raises(ty.PeerError, match="rank 1 refused"):
        verify(headers)


@settings(max_examples=300, deadline=None)
@given(
    peer=st.integers(0, 2),
    changes=st.dictionaries(
        st.integers(0, COUNTS + LOCAL - 1),
        st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1)),
        min_size=1,
        max_size=3,
    ),
)
def test_any_corruption_is_named_or_harmless(peer: int, changes: dict[int, int]) -> None:
    """Whatever words a peer sends: one of our errors, or numbers that can be true."""
    headers = honest()
    for word, value in changes.items():
        headers[peer, word] = value
    try:
        verify(headers, rank=(peer + 1) % 3)
    except (ty.PeerError, ty.Mismatch):
        return
    tokens, rows, counts = (
        int(headers[peer, NUM_TOKENS]),
        int(headers[peer, NUM_ROWS]),
        headers[peer, COUNTS:].tolist(),
    )
    assert 0 <= rows <= tokens < 2**31
    assert all(0 <= count <= rows for count in counts)
    assert rows <= sum(counts) <= rows * PICKS


def test_spans() -> None:
    everybody = range(3)
    assert Spans.among(everybody, 3, [2, 0, 3], [1, 1, 0]) == Spans(
        [0, 2, 2], [2, 0, 3], [0, 1, 2], [1, 1, 0]
    )
    assert Spans.among(everybody, 3, [2, 0, 3], [1, 1, 0], 4) == Spans(
        [0, 4, 8], [2, 0, 3], [0, 4, 8], [1, 1, 0]
    )
    assert Spans.among(range(1), 1, [2], [1]).reversed() == Spans([0], [1], [0], [2])
    some = Spans.among(range(1, 6, 2), 6, [2, 0, 3], [1, 1, 0])
    assert (some.send_starts, some.send_counts) == ([0, 0, 0, 2, 0, 2], [0, 2, 0, 0, 0, 3])
    assert (some.recv_starts, some.recv_counts) == ([0, 0, 0, 1, 0, 2], [0, 1, 0, 1, 0, 0])


def test_a_wire_of_one_rank_needs_no_store() -> None:
    wire = GlooTransport(None, 0, 1, timeout=1.0)
    header = torch.arange(6).view(1, 6)
    assert torch.equal(wire.swap(header, "counts")(), header)
    send, recv = (
        torch.arange(12, dtype=torch.uint8).view(3, 4),
        torch.zeros(3, 4, dtype=torch.uint8),
    )
    wire.exchange(send, recv, Spans.among(range(1), 1, [3], [3]), "rows")()
    assert torch.equal(recv, send)
    wire.close()
    wire.close()


# A peer that lies in a real call. ``rows`` go to each rank; M is 13.

M = CASE.num_tokens
OBJECT_LIES: dict[str, tuple[dict[str, object], Callable[[Tensor], object]]] = {
    "magic": ({}, lambda header: header[:, 0].fill_(1)),
    "negative rows": ({}, lambda header: header[:, NUM_ROWS].fill_(-1)),
    "huge rows": ({}, lambda header: header[:, NUM_ROWS].fill_(2**50)),
    "huge counts": (
        {"layout": ty.Layout.EXPERT_MAJOR},
        lambda header: header[:, COUNTS].fill_(2**50),
    ),
    "static rows beyond M": ({"exact": False}, lambda header: announce(header, M + 1)),
    "padded rows beyond M": (
        {"layout": ty.Layout.EXPERT_PADDED},
        lambda header: announce(header, M + 1),
    ),
}


def announce(header: Tensor, rows: int) -> None:
    """``rows`` rows for each rank, all for its first expert."""
    header[:, [NUM_TOKENS, NUM_ROWS, COUNTS]] = rows


@pytest.mark.parametrize("lie", OBJECT_LIES)
@distributed_test(world_size=2)
def test_an_object_does_not_believe(ranks: Ranks, lie: str) -> None:
    """Rank 1 sends a corrupt header: rank 0 names it before it makes room for its rows, and goes
    on.
    """
    options, corrupt = OBJECT_LIES[lie]
    inputs = Inputs.of(ranks)
    with make(ranks) as ep:
        wire = ep._calls.engine._transport
        honest_swap, asked = wire.swap, []
        if ranks.rank == 1:
            wire.swap = lambda header, what: (corrupt(header), honest_swap(header, what))[1]
        transport = ep._calls.engine._rows
        buffer, transport.buffer = transport.buffer, lambda *a: asked.append(a) or buffer(*a)
        error = error_of(
            lambda: ep.dispatch(inputs.x, inputs.topk_idx, inputs.topk_weights, **options)
        )
        wire.swap = honest_swap
        meet(ranks)
        check(error, ty.PeerError, "rank 1")
        assert [name for name, *_ in asked] == [
            "send"
        ]  # sized by its own tokens; nothing sized by the peer
        assert_works(ranks, ep)


@distributed_test(world_size=3)
def test_counts_for_experts_that_a_rank_does_not_have(ranks: Ranks) -> None:
    """4 experts on 3 ranks: rank 0 has two, the others one; the header has room for two."""
    inputs = Inputs.of(ranks)
    with make_hasty(ranks, num_experts=4) as ep:
        wire = ep._calls.engine._transport
        honest_swap = wire.swap
        if ranks.rank == 0:
            wire.swap = lambda header, what: (
                header[1:, COUNTS + 1].fill_(1),
                honest_swap(header, what),
            )[1]
        error = error_of(lambda: ep.dispatch(inputs.x, inputs.topk_idx.clamp(max=3)))
        meet(ranks)
    if ranks.rank > 0:
        check(error, ty.PeerError, "rank 0")
