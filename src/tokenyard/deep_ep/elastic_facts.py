"""What DeepEP's V2 buffers tell of their ranks, their memory and the multiprocessors of a call."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tokenyard.arguments import MOST_EXPERTS, MOST_PICKS, real
from tokenyard.deep_ep.inputs import whole
from tokenyard.deep_ep.natives import rings_for
from tokenyard.topology import Topology

NVLINK_GBS, RDMA_GBS = 450.0, 50.0
"""GB/s each way, of fourth-generation NVLink and of a 400 Gb/s adapter: what counts where a caller
says nothing."""

RATES = ("rdma_gbs", "nvlink_gbs", "sm_read_gbs", "sm_write_gbs")


class Estimate(NamedTuple):
    """How a version of DeepEP estimates multiprocessors: default :data:`RATES`, a ``margin`` as a
    factor, a multiple of ``unit``; whether combine counts."""

    rates: tuple[float, ...]
    margin: float
    unit: int
    combines: bool


V2_1 = Estimate((RDMA_GBS, NVLINK_GBS, 200.0, 50.0), 1.25, 2, combines=False)
V2_5 = Estimate((RDMA_GBS, NVLINK_GBS, 180.0, 45.0), 1.3, 4, combines=True)

SMS_WITHOUT_GPU = 132
"""Multiprocessors that count where there is no GPU: those of an H100 or H200."""

HINT_UNIT, TOKEN_UNIT = 2 << 20, 128
"""Bytes to which rings are rounded up in a size hint, as DeepEP's; and those it counts per token
besides. Programs keep a buffer while its size is at least the hint, and then take its
``num_max_tokens_per_rank`` for enough: a hint for more tokens must be larger."""

FEWEST_SMS, FEWEST_ALONE = 4, 64
"""Of a call; of one that need not leave any to computation."""


class Domains(NamedTuple):
    """A grid of ranks: ``scaleout`` groups (over a network) of ``scaleup`` ranks each (NVLink)."""

    scaleout: int
    scaleup: int


def domains_of(grid: Topology | None, num_ranks: int, hybrid: bool) -> tuple[Domains, Domains]:
    """The physical and the logical one. Logically all ranks are one group unless ``hybrid``; hosts
    that form no grid count as one per rank, and logically as one.

    >>> domains_of(Topology(2, 4), 8, hybrid=False)
    (Domains(scaleout=2, scaleup=4), Domains(scaleout=1, scaleup=8))
    """
    alone = Domains(1, num_ranks)
    if grid is None:
        return Domains(num_ranks, 1), alone
    physical = Domains(grid.num_nodes, grid.ranks_per_node)
    return physical, physical if hybrid else alone


def size_hint(num_ranks: int, tokens: Any, hidden: Any, num_topk: Any) -> int:
    """Bytes of symmetric memory per rank for up to ``tokens`` of every rank; more for more tokens.

    >>> size_hint(8, 1, 7168, 8) >> 20, size_hint(8, 300, 7168, 0) >> 20
    (32, 66)
    >>> size_hint(8, 8192, 7168, 8) < size_hint(8, 8193, 7168, 8)
    True
    """
    most = whole("num_max_tokens_per_rank", tokens, 1)
    channels = whole("hidden", hidden, 1)
    whole("num_topk", num_topk, 0, MOST_PICKS)
    rings = -(-rings_for(most, channels, num_ranks) // HINT_UNIT) * HINT_UNIT
    return rings + TOKEN_UNIT * most


def check_rates(rates: tuple[Any, ...], defaults: tuple[float, ...]) -> tuple[float, ...]:
    """GB/s of :data:`RATES` as a caller gave them; 0 stands for those of ``defaults``."""
    for name, value in zip(RATES, rates, strict=True):
        if not 0 <= real(value) < math.inf:
            raise ValueError(f"{name} ({value!r}) must be GB/s, 0 (for a default) or more")
    return tuple(real(rate) or default for rate, default in zip(rates, defaults, strict=True))


def check_gate(num_experts: Any, num_topk: Any, num_scaleout_topk: Any) -> tuple[int, int]:
    if whole("num_scaleout_topk", num_scaleout_topk):
        raise ValueError(
            f"num_scaleout_topk ({num_scaleout_topk}) must be 0, as in DeepEP: picks limited to "
            f"groups are not modelled"
        )
    experts = whole("num_experts", num_experts, 1, MOST_EXPERTS)
    return experts, whole("num_topk", num_topk, 1, MOST_PICKS)


@lru_cache(maxsize=256)
def theoretical_num_sms(
    num_experts: int,
    num_topk: int,
    physical: Domains,
    logical: Domains,
    rates: tuple[float, ...],
    overlaps: bool,
    estimate: Estimate,
) -> int:
    """Multiprocessors whose copies keep up with the slowest link, of picks that are spread evenly:
    even, at most those of the GPU. Bytes are counted in rows that arrive. ``rates``: as of
    :func:`check_rates`."""
    rdma_gbs, nvlink_gbs, read_gbs, write_gbs = rates
    ranks = logical.scaleout * logical.scaleup
    sends = 1 / reached(num_experts, num_topk, ranks)  # a token is read once for all its rows
    if logical.scaleout > 1:
        groups = reached(num_experts, num_topk, logical.scaleout)
        stays = groups / logical.scaleout
        read = sends + sends * groups
        written = 1 + sends + sends * stays
        network, inside = sends * (groups - stays), 1 - 1 / logical.scaleup
    else:
        near = physical.scaleup / ranks
        read, written = sends, near + (sends if physical.scaleout > 1 else 0)
        network, inside = 0, near * (1 - 1 / physical.scaleup)
    device = _device_sms()
    seconds = max(network / rdma_gbs, inside / nvlink_gbs)
    copying = max(read / read_gbs, written / write_gbs)
    if estimate.combines:
        back = (written - inside) / read_gbs, (read + inside) / write_gbs
        copying = max(copying, *back)
    needed, unit = device if not seconds else copying / seconds, estimate.unit
    number = unit * math.ceil(estimate.margin * needed / unit)
    return min(max(FEWEST_SMS if overlaps else FEWEST_ALONE, number), device // 2 * 2)


def reached(num_experts: int, num_topk: int, num_groups: int) -> float:
    """Groups that a token's picks reach, of ``num_groups`` with equally many experts; expected.

    >>> reached(256, 1, 8)
    1.0
    """
    missed, elsewhere = 1.0, num_experts - num_experts / num_groups
    for pick in range(min(num_topk, num_experts)):
        missed *= max(0.0, elsewhere - pick) / (num_experts - pick)
    return num_groups * (1 - missed)


def _device_sms() -> int:
    if not torch.cuda.is_available():
        return SMS_WITHOUT_GPU
    from tokenyard.memory.kernel_launch import multiprocessors

    return multiprocessors(torch.device("cuda", torch.cuda.current_device()))
