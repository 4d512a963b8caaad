"""The header that ranks exchange before rows move: what call this is, with which arguments, and how
many rows follow. Every rank sees every rank's, so that all come to the same verdict: go on, or
raise (``Mismatch``, ``PeerError``, or the rank's own ``ValueError``). Numbers from a peer are
checked here before anything is sized or addressed by them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from tokenyard.config import Config
from tokenyard.errors import Mismatch, PeerError
from tokenyard.formats import SCALE_DTYPES
from tokenyard.handle import Spec
from tokenyard.routing import host_ints
from tokenyard.rows import Payload
from tokenyard.types import FLOAT_DTYPES, QUANTIZED_DTYPES, Layout, Quantize

MAGIC = 0x746F6B656E796472
TEXT_WORDS = 64
MOST_ROWS = 2**31 - 1
DTYPES = tuple(dict.fromkeys((*FLOAT_DTYPES, *QUANTIZED_DTYPES, *SCALE_DTYPES)))
OPS = ("dispatch", "cached dispatch", "combine")
DISPATCH, CACHED, COMBINE = range(3)


@dataclass(slots=True)
class Fingerprint:
    """What all ranks must agree on in one call; every field is an int on the wire."""

    op: int
    call: int
    routing: int
    quantize: int
    scaled: int
    dtype: int
    hidden: int
    scale_words: int
    scale_dtype: int
    layout: int
    exact: int
    expert_alignment: int
    capacity: int
    weighted: int
    in_place: int


class CallKind(NamedTuple):
    """What a fingerprint is made of, besides the call's number and routing. No payload's values."""

    op: int
    payload: Payload
    spec: Spec
    mode: Quantize | None
    weighted: bool
    scaled: bool = False
    in_place: bool = False


def fingerprint_of(kind: CallKind, call: int = 0, routing: int = 0) -> Fingerprint:
    """The fingerprint of one call. ``routing``: the digest that a handle knows, else -1."""
    op, payload, spec, mode, weighted, scaled, in_place = kind
    scales = payload.scales
    return Fingerprint(
        op=op,
        call=call,
        routing=routing,
        scaled=int(scaled),
        dtype=DTYPES.index(payload.x.dtype),
        hidden=payload.x.shape[1],
        scale_words=0 if scales is None else scales.shape[1],
        scale_dtype=0 if scales is None else DTYPES.index(scales.dtype),
        layout=spec.layout.value,
        exact=int(spec.exact),
        expert_alignment=spec.expert_alignment,
        capacity=-1 if spec.capacity is None else spec.capacity,
        quantize=0 if mode is None else mode.value,
        weighted=int(weighted),
        in_place=int(in_place),
    )


_BACKWARDS = {
    CACHED: " (or the backward of a combine)", COMBINE: " (or the backward of a dispatch)"
}  # fmt: skip
_SHOWN: dict[str, Callable[[int], object]] = {
    "op": lambda value: OPS[value] + _BACKWARDS.get(value, ""),
    "call": "#{}".format,
    "dtype": DTYPES.__getitem__,
    "scale_dtype": DTYPES.__getitem__,
    "layout": lambda value: Layout(value).name,
    "exact": bool,
    "weighted": bool,
    "in_place": bool,
    "quantize": lambda value: Quantize(value).name if value else None,
    "scaled": bool,
    "capacity": lambda value: None if value == -1 else value,
    "routing": "{:x}".format,
}
_NAMED = {
    "call": "the call",
    "op": "the call",
    "routing": "the handle (digest of its routing)",
    "scaled": "weighted",
    "weighted": "whether there are weights",
    "scale_words": "scales per row",
}

_NAMES = tuple(f.name for f in fields(Fingerprint))
_FINGERPRINT = 1
CALL_AT = _FINGERPRINT + _NAMES.index("call")
STATUS = _FINGERPRINT + len(_NAMES)
"""This word says whether the rank goes on; two more say where and what a bad id is."""
_TEXT = STATUS + 4
ROUTING = _TEXT + TEXT_WORDS
"""Digest of the sender's routing. All together tell one routing from another, on every rank."""
NUM_TOKENS, NUM_ROWS = ROUTING + 1, ROUTING + 2
COUNTS = NUM_ROWS + 1
"""From this word on: rows for each of the receiver's experts, as many words as the rank with most
has experts; then, where the wire carries them (``Config.matrix_ranks``), rows to each rank; then,
where rows are relayed, rows to the receiver's node."""

DISAGREE = "ranks disagree on "
"""How a reason to refuse begins that concerns all ranks alike."""
OK, REFUSED, BAD_INDEX = 0, 1, 2
_NO_WORDS = (0,) * (NUM_TOKENS - STATUS)


def blank(fingerprint: Fingerprint, num_ranks: int, num_counts: int, num_tokens: int) -> Tensor:
    """Headers for all ranks with no rows announced: int64 ``[R, words]`` on the CPU."""
    header = torch.zeros(num_ranks, COUNTS + num_counts, dtype=torch.int64, device="cpu")
    header[:, :NUM_ROWS] = torch.tensor(words_of(fingerprint, num_tokens), device="cpu")
    return header


def words_of(fingerprint: Fingerprint, num_tokens: int) -> list[int]:
    """The words of one header up to :data:`NUM_ROWS`."""
    return [MAGIC, *(getattr(fingerprint, name) for name in _NAMES), *_NO_WORDS, num_tokens]


def refuse(header: Tensor, reason: str) -> None:
    """Mark the header: this rank's arguments were refused, for ``reason``."""
    text = reason.encode()[: 8 * TEXT_WORDS].ljust(8 * TEXT_WORDS, b"\0")
    header[:, STATUS] = REFUSED
    header[:, _TEXT : _TEXT + TEXT_WORDS] = torch.frombuffer(bytearray(text), dtype=torch.int64)


def digest(topk_idx: Tensor) -> Tensor:
    """A number for ``topk_idx [T, K]``, on its device; another for other ids or orders."""
    flat = topk_idx.reshape(-1).long() + 2
    place = torch.arange(1, flat.numel() + 1, device=flat.device)
    mixed = (flat * 0x9E3779B97F4A7C1 + place) * 0x2545F4914F6CDD1
    return ((mixed ^ (mixed >> 29)) * 0x1B873593).sum()


def routing_of(headers: Any) -> int:
    """One number for the routing of all ranks, from ``headers [R, words]`` (a tensor or a numpy
    array); at least 0."""
    return mixed(headers[:, ROUTING].tolist())


def mixed(digests: list[int]) -> int:
    """One number for the digests of all ranks, by rank; at least 0."""
    total = 0
    for digest_of_rank in digests:
        total = (total * 1000003 + digest_of_rank) % (1 << 61)
    return total


def matrix_of(headers: Any, config: Config) -> list[int]:
    """Rows from each rank to each, row by row (``Config.matrix_ranks``), of all headers."""
    begin = COUNTS + config.most_local_experts
    return headers[:, begin : begin + config.matrix_ranks].reshape(-1).tolist()


def mark_bad_index(header: Tensor, topk_idx: Tensor, num_experts: int) -> None:
    """Write where ``topk_idx [T, K]`` leaves ``[-1, num_experts)``; the host is not asked."""
    if topk_idx.numel() == 0:
        return
    flat = topk_idx.reshape(-1)
    bad = (flat < -1) | (flat >= num_experts)
    at = bad.to(torch.uint8).argmax()
    header[:, STATUS] = torch.where(bad.any(), BAD_INDEX, OK)
    header[:, STATUS + 1] = at
    header[:, STATUS + 2] = flat.gather(0, at.view(1)).long()
    header[:, STATUS + 3] = topk_idx.shape[1]


def bad_index_text(at: int, value: int, num_picks: int, num_experts: int) -> str:
    token, pick = divmod(at, num_picks)
    return (
        f"topk_idx[{token}, {pick}] is {value}, but there are {num_experts} experts "
        '(use -1 for "no expert")'
    )


def verify(headers: Tensor, config: Config, *, max_rows: int) -> None:
    """Raise what ``headers [R, words]`` (one row from each rank, CPU; zeros of absent ones) call
    for. ValueError: this rank's own ids are out of range. Mismatch: ranks disagree on the call or
    its arguments. PeerError: another rank refused its own, or sent counts that cannot be."""
    everybody = cast("list[list[int]]", headers.tolist())  # pyright: ignore[reportUnknownMemberType]
    rows = {peer: everybody[peer] for peer in config.members}
    own = rows[config.rank]
    if own[STATUS] == BAD_INDEX:
        raise ValueError(_bad_index(own, config.num_experts))
    for peer, row in rows.items():
        if row[0] != MAGIC:
            raise PeerError(
                f"rank {peer} sent something that is not a tokenyard header; do all ranks run the "
                f"same version?"
            )
        if row[STATUS] == REFUSED:
            raw = host_ints(headers[peer, _TEXT : _TEXT + TEXT_WORDS].clone().view(torch.uint8))
            text = bytes(raw).rstrip(b"\0").decode(errors="replace")
            if text.startswith(DISAGREE):
                raise Mismatch(text)
            raise PeerError(f"rank {peer} refused its side of this call: {text}")
        if row[STATUS] not in (OK, BAD_INDEX):
            raise PeerError(
                f"rank {peer} sent a header of unknown status {row[STATUS]}; do all ranks run the "
                f"same version?"
            )
        if row[STATUS] == BAD_INDEX:
            where = _bad_index(row, config.num_experts)
            raise PeerError(f"rank {peer} refused its side of this call: {where}")
    _check_agreement(rows)
    for peer, row in rows.items():
        _check_counts(peer, row, config, max_rows)


def _bad_index(row: list[int], num_experts: int) -> str:
    at, value, num_picks = row[STATUS + 1 : STATUS + 4]
    return bad_index_text(at, value, max(num_picks, 1), num_experts)


def _check_agreement(rows: dict[int, list[int]]) -> None:
    (first, theirs), *_ = rows.items()
    said = theirs[_FINGERPRINT:STATUS]
    if all(row[_FINGERPRINT:STATUS] == said for row in rows.values()):
        return
    for at, name in enumerate(_NAMES, start=_FINGERPRINT):
        for peer, row in rows.items():
            if row[at] != theirs[at]:
                raise Mismatch(
                    f"ranks disagree on {name_of(name)}: rank {first} says "
                    f"{shown(name, theirs[at])}, rank {peer} says {shown(name, row[at])}"
                )


def name_of(field: str) -> str:
    """A field of the fingerprint in the words of the API."""
    return _NAMED.get(field, field)


def shown(name: str, value: int) -> object:
    """``value`` in the words of the API, or as it is if it is none of them."""
    try:
        return _SHOWN.get(name, int)(value)
    except (IndexError, ValueError):
        return value


def _check_counts(peer: int, row: list[int], config: Config, max_rows: int) -> None:
    num_tokens, num_rows, end = row[NUM_TOKENS], row[NUM_ROWS], COUNTS + config.most_local_experts
    counts, sent = row[COUNTS:end], row[end:]
    possible = (
        0 <= num_rows <= num_tokens <= MOST_ROWS
        and num_rows <= max_rows
        and 0 <= min(counts, default=0) <= max(counts, default=0) <= num_rows
        and not any(counts[config.num_local_experts :])
        and 0 <= min(sent, default=0) <= max(sent, default=0) <= min(num_tokens, max_rows)
        and num_rows <= sum(counts) <= num_rows * config.num_topk
    )
    if not possible:
        raise PeerError(
            f"rank {peer} announced impossible counts: {num_rows} rows of {num_tokens} tokens, per "
            f"expert {counts}"
        )
