"""What a ``HybridEPBuffer`` was made with, in the names of DeepEP's branch ``hybrid-ep``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tokenyard.arguments import LARGEST, MOST_EXPERTS
from tokenyard.deep_ep.chunks import MOST_SMS
from tokenyard.deep_ep.handles import RANKS_PER_NODE
from tokenyard.deep_ep.inputs import check_fork, flag, whole

USUAL_SMS = 32
"""What DeepEP's kernels take of one node's multiprocessors."""

FLAGS = ("use_mnnvl", "use_shared_buffer", "load_cached_kernels", "enable_custom_allgather")
"""Options of the constructor, in one version of the branch or another, that change nothing here."""

NODE = ("num_of_ranks_per_nvlink_domain", "num_of_hybrid_ep_ranks_per_nvlink_domain")
"""Names of the ranks of a node, in older and newer versions."""


@dataclass
class BufferConfig:
    """Sizes. All but ``max_num_of_tokens_per_rank`` (static shapes) and the experts are echoed."""

    hidden_dim: int
    max_num_of_tokens_per_rank: int
    num_of_experts_per_rank: int
    num_of_ranks_per_node: int
    num_of_nodes: int
    use_fp8: bool = False
    num_of_blocks_dispatch_api: int = USUAL_SMS
    num_of_blocks_combine_api: int = USUAL_SMS
    num_of_blocks_preprocessing_api: int = USUAL_SMS
    pad_multiple: int = 0


def ranks_per_node(given: Mapping[str, Any], num_ranks: int) -> int:
    """Of the options ``given``, or 8 if that divides the ranks, or all."""
    asked = next((given[name] for name in NODE if given.get(name) is not None), None)
    if asked is None:
        return RANKS_PER_NODE if num_ranks % RANKS_PER_NODE == 0 else num_ranks
    number = whole("num_of_ranks_per_nvlink_domain", asked, 1)
    if num_ranks % number:
        raise ValueError(
            f"num_of_ranks_per_nvlink_domain ({number}) must divide the {num_ranks} ranks of the "
            f"group: leave it out, as nodes change nothing here"
        )
    return number


def check_old(given: Mapping[str, Any]) -> None:
    """Options of the constructor beside its parameters: known and of their kind."""
    permute = "num_sms_permute_api"
    check_fork("HybridEPBuffer", given, dict.fromkeys((*FLAGS, *NODE, permute), ""))
    sms(permute, given.get(permute))
    for name in FLAGS:
        flag(name, given.get(name))


def sms(name: str, value: Any) -> int:
    """Multiprocessors or blocks, echoed: engines take what they need. None: DeepEP's choice."""
    return USUAL_SMS if value is None else whole(name, value, 0, MOST_SMS * 64)


def changed(config: BufferConfig, given: Mapping[str, Any]) -> BufferConfig:
    """``config`` with what ``update_template_config`` was ``given``; None changes nothing."""
    names = {each.name for each in fields(BufferConfig)}
    said = {_NAMES.get(name, name): value for name, value in given.items() if value is not None}
    most = {"num_of_experts_per_rank": MOST_EXPERTS}
    ours = {
        name: flag(name, value)
        if name == "use_fp8"
        else whole(name, value, most=most.get(name, LARGEST))
        for name, value in said.items()
        if name in names
    }
    tokens = ours.get("max_num_of_tokens_per_rank", 0)
    ours["max_num_of_tokens_per_rank"] = max(tokens, config.max_num_of_tokens_per_rank)
    return replace(config, **ours)


_NAMES = {
    "num_local_experts": "num_of_experts_per_rank",
    "num_of_tokens_per_rank": "max_num_of_tokens_per_rank",
}
