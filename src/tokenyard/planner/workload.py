"""What a plan is about: a machine, a layer, a dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from tokenyard.config import Config
from tokenyard.engines.rings import DEFAULT_BUFFER_BYTES
from tokenyard.engines.tuning import crosses_once
from tokenyard.formats import FORMATS
from tokenyard.routing import expert_bounds
from tokenyard.topology import Topology
from tokenyard.types import Quantize

H200_SMS = 132

Dtype = Literal["bf16", "fp8"]
DTYPES: tuple[Dtype, ...] = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One dispatch and one combine on every GPU.

    Attributes:
        nodes, gpus_per_node: the machine; one rank per GPU.
        tokens: per rank.
        hidden, experts, topk: of the layer; experts over all ranks.
        dtype: of rows on their way to the experts; ``fp8`` has a float32 scale per 128 channels.
            They return as bf16.
        sms: multiprocessors that a call may use; ``most_sms`` are all that a GPU has.
        buffer_bytes: of all rings of a GPU.

    Raises:
        ValueError: a size is not a whole number of at least 1, or more picks than experts, or more
            SMs than there are.
    """

    nodes: int
    gpus_per_node: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: Dtype = "bf16"
    sms: int = H200_SMS
    most_sms: int = H200_SMS
    buffer_bytes: int = DEFAULT_BUFFER_BYTES

    def __post_init__(self) -> None:
        sizes: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        del sizes["dtype"]
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype ({self.dtype!r}) must be one of {', '.join(DTYPES)}")
        if self.topk > self.experts:
            raise ValueError(
                f"topk ({self.topk}) must be at most experts ({self.experts}): a token picks an "
                f"expert once"
            )
        if self.sms > self.most_sms:
            raise ValueError(
                f"sms ({self.sms}) must be at most {self.most_sms}, which is all that a GPU has"
            )

    @property
    def grid(self) -> Topology:
        return Topology(self.nodes, self.gpus_per_node)

    @property
    def crosses_once(self) -> bool:
        """Whether engine low_latency would let tokens cross once per node: its own choice."""
        return crosses_once(self.config(self.grid))

    def config(self, grid: Topology) -> Config:
        """Of an object of the ranks of ``grid``."""
        return Config(
            num_experts=self.experts, hidden=self.hidden, num_topk=self.topk,
            max_tokens_per_rank=self.tokens, rank=0, world_size=grid.world_size, timeout=1.0,
            topology=grid,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def bounds(self) -> list[int]:
        """First expert of each rank, and the end."""
        return expert_bounds(self.experts, self.ranks)

    @property
    def row_bytes(self) -> int:
        """A row on its way to the experts: payload and scales, as ``tokenyard bench`` counts it."""
        if self.dtype == "bf16":
            return self.payload_bytes
        return self.payload_bytes + 4 * FORMATS[Quantize.FP8].scale_words(self.hidden)

    @property
    def payload_bytes(self) -> int:
        """The same without scales."""
        return self.back_bytes if self.dtype == "bf16" else self.hidden

    @property
    def back_bytes(self) -> int:
        """A row on its way back."""
        return 2 * self.hidden
