"""Members and a newcomer look at each other's GPUs before anything changes. (That they meet:
``tests/ranks/test_recover.py``.)
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokenyard.admission import accept, invite
from tokenyard.config import Config
from tokenyard.engines import select
from tokenyard.engines.base import Choice, Request
from tokenyard.errors import NotSupported
from tokenyard.memory.preflight import Report

SIZES = {"num_experts": 4, "hidden": 8, "num_topk": 2, "max_tokens_per_rank": 3}
NVLINK = Choice(lambda _: None, None, "", request=Request("nvlink", num_sms=8), most_sms=132)  # pyright: ignore[reportArgumentType]


def seen(rank: int, reaches: tuple[str, ...] = ("a", "b")) -> str:
    """A report of rank's own GPU, ``a`` of rank 0 and ``b`` of rank 1."""
    return json.dumps(Report(rank, "host", "ab"[rank], rank, ("a", "b"), reaches))


def meet(store: dist.Store, mine: str, theirs: str) -> list[Any]:
    """What comes of it at member 0 and at the newcomer."""
    config = Config(**SIZES, rank=0, world_size=2, timeout=60.0, absent=(1,))
    facts = {"epoch": 1, **NVLINK.terms()}

    def newcomer(terms: dict[str, Any]) -> str:
        assert Request(**terms["request"]) == Request("nvlink", num_sms=8)
        assert terms["most_sms"] == 132
        return theirs

    def outcome(call: Any) -> Any:
        try:
            return call()
        except NotSupported as error:
            return str(error)

    part = dist.PrefixStore("object", store)
    with ThreadPoolExecutor(2) as pool:
        member = pool.submit(outcome, lambda: invite(part, config, 1, "here", facts, mine))
        other = pool.submit(outcome, lambda: accept(store, 1, "here", 60.0, newcomer))
        return [member.result(), other.result()]


def test_gpus_that_do_not_reach_each_other_change_nothing() -> None:
    """Both are told, and the next attempt meets elsewhere."""
    store = dist.HashStore()
    first = meet(store, seen(0), seen(1, ("b",)))
    why = "rank 1 cannot be admitted, as GPUs do not fit: ranks 0 and 1 have no peer-to-peer path"
    assert first[0] == first[1] and first[0].startswith(why), first
    place, (other, config, facts) = meet(store, seen(0), seen(1))
    assert isinstance(place, dist.PrefixStore) and isinstance(other, dist.PrefixStore)
    assert (config.rank, config.absent, facts["epoch"]) == (1, (), 1)
    assert dist.PrefixStore("object", store).get("verdict") == b"0 1 elsewhere"


def test_what_a_rank_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing over gloo; on a CPU, and of a smaller GPU, why it cannot."""
    over_gloo = Choice(NVLINK.make, None, "", request=Request("collective")).terms()
    assert select.report_of(None, None, 1, over_gloo) == ""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    told = Report(*json.loads(select.report_of(None, cpu, 1, NVLINK.terms())))
    assert told.rank == 1 and "CUDA devices" in told.problem
    monkeypatch.setattr(select, "report", lambda rank, _: Report(rank, "host", "b", 1, (), ()))
    monkeypatch.setattr(select, "obstacle_of", lambda _: "")
    for number, problem in ((132, ""), (131, "has 131 multiprocessors, others count on 132")):
        monkeypatch.setattr(select, "multiprocessors", lambda _, number=number: number)
        told = Report(*json.loads(select.report_of(None, gpu, 1, NVLINK.terms())))
        assert told.problem == problem
