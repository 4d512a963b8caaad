"""Scenarios for the low-latency engine: calls of one object, drawn from a seed.
``low_latency_ranks.py`` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import tokenyard as ty
from cases import PLAIN, QUANTIZED, Case
from nvlink_cases import with_options
from tokenyard.config import Config
from tokenyard.engines.low_latency_workspace import LowLatencyTuning
from tokenyard.testing import ROUTINGS
from tokenyard.topology import Topology

_, MAJOR, PADDED = ty.Layout
WAYS = ("plain", "weighted", "weighted by the owner", "bias", "two biases")
"""What may follow a dispatch."""


@dataclass(frozen=True)
class Round:
    """One dispatch and the combines that follow, each in one launch or ``in_two``."""

    case: Case
    ways: tuple[str, ...]
    in_two: bool = False


@dataclass(frozen=True)
class Scenario:
    """Calls of one object."""

    world_size: int
    num_experts: int
    num_topk: int
    max_tokens: int
    hidden: int
    programs: int
    rounds: tuple[Round, ...]
    words: int = 64
    pieces: int = 2
    shares: int = 2
    per_node: int = 0
    """Ranks of a node, if those of other nodes are far; 0: none are."""
    network: bool = True
    """Puts go through the simulated network; else through pointers."""
    once: bool = False
    """Rows cross once per node."""
    put_bytes: int = 1
    """Of a chunk for a far rank, which has a row at least."""
    unrolled: int = 8
    """Of more ranks or nodes, programs go through those of a token only."""

    @property
    def tuning(self) -> LowLatencyTuning:
        """Rows take several steps, and programs several rows."""
        # No program has two shares of a token.
        most = 1 << min(self.shares, self.programs).bit_length() - 1
        return LowLatencyTuning(
            programs=self.programs,
            words=self.words,
            sent_channels=32,
            added_channels=64,
            pieces=self.pieces,
            shares=most,
            once_per_node=self.once,
            put_bytes=self.put_bytes,
            unrolled=self.unrolled,
        )

    @property
    def tree(self) -> int | None:
        """Ranks of a node in the tree of sums; None: one level."""
        return self.per_node if self.once else None

    @property
    def buffer_bytes(self) -> int:
        """Room for rows of float32."""
        tokens = (4 if self.per_node else 2) * self.world_size * self.max_tokens
        slot = 4 * self.hidden + 16 * self.num_topk + 512
        return (
            tokens * slot
            + 64 * tokens * (self.num_topk + 2)
            + 64 * self.world_size * (self.num_experts + 2)
        )

    def config(self, rank: int, timeout: float = 5.0) -> Config:
        return Config(
            num_experts=self.num_experts,
            hidden=self.hidden,
            num_topk=self.num_topk,
            max_tokens_per_rank=self.max_tokens,
            rank=rank,
            world_size=self.world_size,
            timeout=timeout,
            topology=Topology(self.world_size // self.per_node, self.per_node)
            if self.per_node
            else None,
        )


def draw(world_size: int, seed: int, wide: bool = False) -> Scenario:
    """The scenario of a seed. ``wide``: of sizes that differ more."""
    random = Random(seed)
    few = world_size > 4
    experts = (world_size, world_size + 1, 2 * world_size, 2 * world_size + 1, 1 if few else 3)
    scenario = Scenario(
        world_size=world_size,
        num_experts=random.choice((*experts, world_size - 1, 30) if wide else experts),
        num_topk=random.choice((1, 2, 6, 12) if wide else (1, 2, 3, 4)),
        max_tokens=random.choice((1, 2, 3) if few else (2, 3, 5)),
        hidden=random.choice((1, 7, 33, 130, 300) if wide else (8, 16, 24, 40, 132, 17)),
        programs=world_size + random.choice((0, 1, 3)),
        words=random.choice((8, 64)),
        pieces=random.choice((1, 2)),
        shares=random.choice((1, 2, 2, 4, 8)),
        rounds=(),
        unrolled=(1, 8)[(seed + world_size) % 2],
    )
    rounds = [
        _round(scenario, random, 4 * seed + i)
        for i in range(1 if few else random.choice((1, 2, 3)))
    ]
    return replace(scenario, rounds=tuple(rounds))


def between_nodes(nodes: int, per_node: int, seed: int, once: bool = False) -> Scenario:
    """The scenario of a seed where ranks of other nodes are far. Every third puts through
    pointers. ``once``: rows cross once per node."""
    scenario = draw(nodes * per_node, seed, once)
    put_bytes = (1, 120, 1)[seed % 3]
    network = seed % 3 != 2
    return replace(scenario, per_node=per_node, network=network, once=once, put_bytes=put_bytes)


def _round(scenario: Scenario, random: Random, seed: int) -> Round:
    layout = random.choice((MAJOR, PADDED))
    dtype, mode = _payload(random)
    case = Case(
        scenario.world_size,
        routing=random.choice(ROUTINGS),
        num_tokens=scenario.max_tokens,
        num_topk=scenario.num_topk,
        num_experts=scenario.num_experts,
        hidden=scenario.hidden,
        dtype=dtype,
        layout=layout,
        exact=False,
        expert_alignment=random.choice((1, 1, 2, 4)) if layout is MAJOR else 1,
        quantize=mode,
        seed=seed,
    )
    ways = tuple(random.sample(WAYS, random.choice((1, 1, 2))))
    return Round(with_options(case, seed, ways), ways, random.random() < 0.3)


def _payload(random: Random) -> tuple[torch.dtype, Any]:
    mode = random.choice((None, None, None, *ty.Quantize))
    return random.choice(PLAIN if mode is not None else (*PLAIN, *QUANTIZED)), mode


def rehearsal(seed: int, part: str = "rings") -> Scenario:
    """Two ranks whose calls follow each other closely, with other picks and weights each time.
    ``part`` "far": through the simulated network; "rail": four, whose rows cross once per node;
    "many": as if there were so many that programs go through those of a token only."""
    size = 4 if part == "rail" else 2
    case = Case(
        size,
        num_tokens=3,
        num_topk=2,
        num_experts=4,
        hidden=40,
        layout=PADDED,
        exact=False,
        seed=16 * seed,
    )
    names = ("uniform", "local", "one_expert", "uniform", "dropped", "uniform")
    owner = "weighted by the owner"
    ways = (
        ("plain",),
        (owner,),
        ("plain", "plain", "weighted"),
        (owner, owner),
        ("weighted",),
        ("plain",),
    )
    rounds = tuple(
        Round(replace(case, routing=name, seed=case.seed + i), each)
        for i, (name, each) in enumerate(zip(names, ways, strict=True))
    )
    scenario = Scenario(
        world_size=size,
        num_experts=4,
        num_topk=2,
        max_tokens=3,
        hidden=40,
        programs=size + 1,
        rounds=rounds,
        put_bytes=(1, 250)[seed % 2],
        unrolled=1 if part == "many" else 8,
    )
    if part == "rail":
        return replace(scenario, per_node=2, once=True, rounds=rounds[:4])
    return replace(scenario, per_node=1) if part == "far" else scenario
