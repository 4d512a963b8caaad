"""Ranks of which some call a native object that the others, with other sizes, do not call, but make
another one instead.

Each would wait for the others. Whoever makes an object looks now and then whether a rank waits for
it in a call of an older one, and answers there with a refusal that says what they disagree on: all
raise ``Mismatch`` before a row has moved, and every object stays in step. Over gloo, where ranks
tell each other in which call they wait (``engines/failures.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenyard.api import ExpertParallel
from tokenyard.errors import Mismatch
from tokenyard.header import DISAGREE, DISPATCH

NAMES = ("hidden", "num_experts", "num_topk", "max_tokens_per_rank", "device")


def refuse_others(
    objects: Iterable[tuple[tuple[Any, ...], ExpertParallel]], sizes: tuple[Any, ...]
) -> None:
    """Refuse a call of one of ``objects`` (and their sizes) in which others wait for this rank,
    which makes one of ``sizes``.

    Raises:
        Mismatch: there was one; the others raise it too.
    """
    for theirs, ep in objects:
        calls: Any = ep._calls  # pyright: ignore[reportPrivateUsage]
        peer = None if calls.gone else calls.engine.awaited()
        differ = [each for each in zip(NAMES, theirs, sizes, strict=True) if each[1] != each[2]]
        if peer is not None and differ:
            name, his, mine = differ[0]
            error = Mismatch(
                f"{DISAGREE}{name}: rank {peer} says {his}, rank {ep.rank} says {mine}"
            )
            calls.refuse(DISPATCH, True, error)
            raise error
