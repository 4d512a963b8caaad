"""Bugs of the low-latency engine: see ``plants.py``."""

from __future__ import annotations

from contextlib import AbstractContextManager

from plants import Plant, planted_in

_ROW_FLAG = '    tl.atomic_max(flags, done, mask=goes > 0, sem="release", scope="sys")\n'
_ROW_FLAGS = (
    "    flags = flag_of(bases, call.parity, call.rank, t, sizes) + piece\n"
    "    done = (r * 0).to(tl.int64) + 2 * call.number + 1\n" + _ROW_FLAG
)
_SUM_FLAG = '        tl.atomic_max(flag, 2 * call.number + 1, sem="release", scope="sys")\n'
_SUM_FLAGS = "        flag = flag_of(base, call.parity, call.rank, t, sizes)\n" + _SUM_FLAG
_READY = 'tl.atomic_xchg(words(state) + READY, call.number, sem="release", scope="gpu")'
_READY_SEEN = 'tl.atomic_add(words(state) + READY, 0, sem="acquire", scope="gpu")'
_PARITY = "    parity = (number % 2).to(tl.int32)\n"
_ONE_HALF = "    parity = (number % 1).to(tl.int32)\n"
_SEND = "    if k.cast.mode:  # first what is long, so that it is on its way meanwhile\n"
_SUM = "        for w0 in range(0, H, k.sent_block):\n"
_BARRIER = "    tl.debug_barrier()\n"
_SEEN = "    return seen\n\n\n@triton.jit\ndef "
_COUNTED = "        tl.store(epoch_of(state, pid, sizes), number)\n"


def _plant(
    kind: str, file: str, *changes: tuple[str, str], times: int = 1, within: int = 10
) -> Plant:
    return Plant(kind, f"low_latency_{file}", changes, times, within=within)


def _without(kind: str, file: str, text: str, before: str = "", behind: str = "") -> Plant:
    """``text`` between ``before`` and ``behind`` is missing."""
    return _plant(kind, file, (before + text + behind, before + behind))


def _instead(kind: str, file: str, text: str, old: str, new: str, times: int = 1) -> Plant:
    """``new`` for ``old`` in ``text``."""
    return _plant(kind, file, (text, text.replace(old, new)), times=times)


PLANTS = {
    # What is published
    "dispatch: no barrier before the flag": _without(
        "barrier", "send", _BARRIER, behind="    flags ="
    ),
    "dispatch: flag without order": _instead("release", "send", _ROW_FLAG, "release", "relaxed"),
    "dispatch: flag for this GPU only": _instead("release", "send", _ROW_FLAG, '"sys"', '"gpu"'),
    "dispatch: flag before the row": _plant(
        "flag before data", "send", (_ROW_FLAGS, ""), (_SEND, _ROW_FLAGS + _SEND)
    ),
    "combine: no barrier before the flag": _without(
        "barrier", "combine", "    " + _BARRIER, behind=_SUM_FLAGS
    ),
    "combine: flag without order": _instead("release", "combine", _SUM_FLAG, "release", "relaxed"),
    "combine: flag for this GPU only": _instead("release", "combine", _SUM_FLAG, '"sys"', '"gpu"'),
    "combine: flag before the sum": _plant(
        "flag before data", "combine", (_SUM_FLAGS, ""), (_SUM, _SUM_FLAGS + _SUM)
    ),
    "table: no barrier before READY": _without(
        "barrier", "receive", _BARRIER, behind="    " + _READY
    ),
    "table: READY without order": _instead("release", "receive", _READY, "release", "relaxed"),
    "table: READY before the table": _plant(
        "flag before data",
        "receive",
        (_BARRIER + "    " + _READY + "\n", ""),
        (
            "    pairs = tl.where(present",
            _BARRIER + "    " + _READY + "\n    pairs = tl.where(present",
        ),
    ),
    # What is waited for
    "plain load for an acquire": _plant(
        "acquire",
        "waits",
        ('tl.min(tl.atomic_add(flags, 0, sem="acquire", scope="sys"))', "tl.min(tl.load(flags))"),
        times=2,
    ),
    "one piece waited for": _instead(
        "acquire",
        "waits",
        "flags = flag + tl.arange(0, pieces)",
        "tl.arange(0, pieces)",
        "tl.arange(0, 1)",
    ),
    "plain loads for acquires": _plant(
        "acquire",
        "waits",
        (
            'tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys")',
            "tl.load(flags, mask=mask, other=0)",
        ),
        times=3,
    ),
    "READY seen without order": _instead(
        "acquire", "waits", _READY_SEEN, "acquire", "relaxed", times=2
    ),
    "no barrier behind a flag": _without("barrier", "waits", _BARRIER, behind=_SEEN + "wait_flags"),
    "no barrier behind flags": _without("barrier", "waits", _BARRIER, behind=_SEEN + "agree"),
    "no barrier behind READY": _without(
        "barrier", "waits", _BARRIER, behind="\n\n@triton.jit\ndef wait_flag("
    ),
    # Which call it is
    "dispatch: flags of the last but one": _instead(
        "wrong epoch",
        "receive",
        "        want = 2 * call.number\n",
        "call.number",
        "call.number - 4",
    ),
    "combine: flags of the last but one": _plant(
        "wrong epoch",
        "combine",
        ("wait_flags(flags, want, here", "wait_flags(flags, want - 4, here"),
        ("seen == want + 1", "seen >= want - 3"),
    ),
    "notes of the last but one": _plant(
        "wrong epoch",
        "waits",
        ("(least >= number) & (call_in(tags) >= number)", "(least >= number - 2)"),
    ),
    "weights of the last but one": _plant(
        "wrong epoch",
        "waits",
        ("((look(at, inside) >> 32) != sign)", "(look(at, inside) < 0)"),
        times=2,
    ),
    "calls not counted in combine": _instead(
        "wrong epoch", "combine", _COUNTED, "number)", "number - 1)"
    ),
    # When a slot is written again
    "dispatch: one half only": _plant("reused too early", "dispatch", (_PARITY, _ONE_HALF)),
    "combine: one half only": _plant(
        "reused too early", "combine", (_PARITY, _ONE_HALF), within=40
    ),
    "combine: peers not waited for": _plant(
        "reused too early",
        "combine",
        ("        if pid == P - 1:\n", "        if pid == P:\n"),
        within=40,
    ),
    # What is sent at all
    "dispatch: last piece dropped": _instead(
        "last token",
        "dispatch",
        "for u in range(pid, num_tokens * k.pieces, P)",
        "k.pieces,",
        "k.pieces - 1,",
    ),
    "combine: last slot dropped": _instead(
        "last token", "combine", "for u in range(pid, R * M, P)", "M", "M - 1"
    ),
}
"""By name."""

TORN = Plant(
    "torn sum",
    "low_latency_waits",
    (("    if tl.max(doubted.to(tl.int32)) > 0:\n", "    if tl.max(doubted.to(tl.int32)) > 1:\n"),),
    1,
)
"""Found only where ranks die: ``low_latency_failures.torn``."""


def planted(name: str) -> AbstractContextManager[None]:
    """Inside, low-latency engines launch kernels with the bug ``name``; "" for copies
    without one.
    """
    return planted_in(
        "tokenyard.engines.low_latency_signatures",
        (PLANTS | {TORN.kind: TORN})[name] if name else None,
    )
