"""What a call tells other ranks in one word: every mode and dtype has a place of its own, with room
for more.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import fields, replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tokenyard import header
from tokenyard.arguments import MOST_PICKS
from tokenyard.config import Config
from tokenyard.engines import low_latency_signatures, status
from tokenyard.engines.status import (
    LARGEST,
    TAG_FIELDS,
    StatusMonitor,
    check_room,
    pack,
    pack_routing,
    unpack,
)
from tokenyard.header import Fingerprint
from tokenyard.types import Layout, Quantize

pytestmark = pytest.mark.portable

CONFIG = Config(
    num_experts=8, hidden=7168, num_topk=3, max_tokens_per_rank=4, rank=0, world_size=2, timeout=1.0
)
PLAIN = Fingerprint(*[0] * len(fields(Fingerprint)))
EARLIER = {
    "op": 2,
    "quantize": 2,
    "scaled": 1,
    "dtype": 3,
    "hidden": 20,
    "scale_words": 11,
    "scale_dtype": 3,
    "layout": 2,
    "exact": 1,
    "weighted": 1,
    "in_place": 1,
}
"""Bits that each field had before there was room: what they told apart must stay so."""


def test_all_that_there_is_fits() -> None:
    check_room(TAG_FIELDS, LARGEST)
    assert sum(TAG_FIELDS.values()) == 63
    assert set(TAG_FIELDS) <= {each.name for each in fields(Fingerprint)}
    assert LARGEST["quantize"] == max(mode.value for mode in Quantize)
    assert LARGEST["dtype"] == LARGEST["scale_dtype"] == len(header.DTYPES) - 1
    assert LARGEST["layout"] == max(layout.value for layout in Layout)
    assert (LARGEST["op"], LARGEST["hidden"]) == (len(header.OPS) - 1, MOST_PICKS)


def test_there_is_room_for_sixteen_modes_and_dtypes() -> None:
    """No mode is 0."""
    check_room(TAG_FIELDS, {**LARGEST, "quantize": 16, "dtype": 15, "scale_dtype": 15})


@pytest.mark.parametrize("name", LARGEST)
def test_a_value_too_many_is_refused_at_import(name: str) -> None:
    most = (1 << TAG_FIELDS[name]) - 1
    check_room(TAG_FIELDS, {**LARGEST, name: most})
    with pytest.raises(
        RuntimeError,
        match=rf"{name} goes up to {most + 1}, but TAG_FIELDS gives it {TAG_FIELDS[name]}",
    ):
        check_room(TAG_FIELDS, {**LARGEST, name: most + 1})


def test_the_module_checks_itself() -> None:
    """As it is imported: with one dtype more than there are places."""
    source = open(status.__file__).read()  # noqa: SIM115
    with (
        mock.patch.object(header, "DTYPES", (torch.int8,) * 17),
        pytest.raises(RuntimeError, match="dtype goes up to 16"),
    ):
        exec(compile(source, status.__file__, "exec"), {"__name__": "tokenyard.engines.again"})


def test_a_tag_has_so_many_bits() -> None:
    with pytest.raises(RuntimeError, match="TAG_FIELDS has 64 bits, but a tag has 63"):
        check_room({**TAG_FIELDS, "layout": TAG_FIELDS["layout"] + 1}, LARGEST)


@pytest.mark.parametrize("name", [name for name in TAG_FIELDS if name not in ("hidden", "routing")])
def test_every_value_comes_back(name: str) -> None:
    for value in range(min(1 << TAG_FIELDS[name], 64)):
        tag = pack(replace(PLAIN, **{name: value}, hidden=CONFIG.hidden), CONFIG) | pack_routing(
            0xABCD
        )
        assert 0 <= tag < 2**63
        assert unpack(tag) == {**dict.fromkeys(TAG_FIELDS, 0), name: value, "routing": 0xABCD}


@pytest.mark.parametrize("name", ["op", "quantize", "dtype", "hidden", "scale_dtype", "layout"])
def test_what_does_not_fit_is_not_cut(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} \({1 << TAG_FIELDS[name]}\) must be at most"):
        pack(replace(PLAIN, **{name: 1 << TAG_FIELDS[name]}), CONFIG)


def earlier(print_: Fingerprint) -> int:
    tag, at = 0, 0
    for name, bits in EARLIER.items():
        tag |= (getattr(print_, name) & ((1 << bits) - 1)) << at
        at += bits
    return tag


@pytest.mark.parametrize("hidden", [1, 3, 4096, 4099, 7168, 8192, 8195, 2**20 + 3, 2**31 - 1])
def test_what_was_told_apart_still_is(hidden: int) -> None:
    """Of payloads that an object can have: rows of its ``hidden`` channels, and weights, one for
    each pick.
    """
    draw, config = random.Random(hidden), replace(CONFIG, hidden=hidden)
    for top in (1, 2, 3, 8, MOST_PICKS):
        widths, tags = (hidden, top), dict[int, int]()
        sizes = (0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 2**31 - 1)
        some = [draw.choice(range(8)) for _ in range(6)]
        for op, width, words, dtype, mode in product(range(3), widths, sizes, some, range(4)):
            flags = {
                name: draw.randrange(2) for name in ("scaled", "exact", "weighted", "in_place")
            }
            more = {"scale_dtype": draw.randrange(8), "layout": draw.randrange(3)}
            print_ = replace(
                PLAIN,
                op=op,
                hidden=width,
                scale_words=words,
                dtype=dtype,
                quantize=mode,
                **flags,
                **more,
            )
            before = tags.setdefault(pack(print_, config), earlier(print_))
            assert before == earlier(print_)


def test_messages_say_channels() -> None:
    """0 stands for the object's own."""
    found = object.__new__(StatusMonitor)
    found._config = CONFIG
    found._begun = [SimpleNamespace(op=header.CACHED, number=4)]  # pyright: ignore[reportAttributeAccessIssue]
    found._status = [0] * 16
    mine, theirs = (
        unpack(pack(replace(PLAIN, op=header.CACHED, hidden=width), CONFIG)) for width in (7168, 3)
    )
    assert "hidden (cached dispatch #4): rank 0 says 7168, rank 1 says 3" in str(
        found._disagreement(1, mine, theirs)
    )


VALUES: dict[str, Any] = {
    "quantize": range(17),
    "dtype": range(16),
    "scale_dtype": range(16),
    "layout": range(8),
}


def test_low_latency_has_no_bits_to_run_out_of() -> None:
    """Its tag of 24 bits is a digest of the whole fingerprint: every value of every field gives
    another, none of them 0.
    """
    for name in (each.name for each in fields(Fingerprint)):
        prints = [replace(PLAIN, **{name: value}) for value in VALUES.get(name, range(100))]
        numbers = [low_latency_signatures._number(print_) for print_ in prints]
        tags = [low_latency_signatures._tag(number) for number in numbers]
        assert len(set(tags)) == len(tags), name
        assert all(0 < tag < 2**24 for tag in tags)
    signature = low_latency_signatures.CombineSignature(
        numbers=(zlib.crc32(b"a"), zlib.crc32(b"b")), launch=print
    )
    both = (False, True)
    assert len({signature.tag(each, number) for each in both for number in range(100)}) == 200
