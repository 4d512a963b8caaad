"""A token dispatcher of Megatron-core on tokenyard, without DeepEP's names: tokens travel once to
each rank, arrive sorted by expert, and come back summed. No permutation, no second copy.

    pip install megatron-core==0.16.1
    python examples/megatron_dispatcher.py
    torchrun --nproc-per-node 4 examples/megatron_dispatcher.py

A layer with it is compared with the same one on Megatron's own allgather dispatcher, forward and
backward (``megatron_moe_layer.py`` lies beside this file).
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

import tokenyard as ty
from tokenyard.api import BESIDE_COLLECTIVES


@functools.cache
def shared(group: dist.ProcessGroup, num_experts: int, hidden: int, topk: int) -> ty.ExpertParallel:
    """One object for all layers of the same sizes."""
    return ty.ExpertParallel(
        group,
        num_experts=num_experts,
        hidden=hidden,
        num_topk=topk,
        max_tokens_per_rank=1,  # bounds static shapes, and ours are exact
        spare_sms=BESIDE_COLLECTIVES,  # gradients are reduced meanwhile
    )


class TokenyardTokenDispatcher(MoETokenDispatcher):
    """Stands in ``MoELayer.token_dispatcher``, in the order that the layer calls it.

    Raises:
        ValueError: several ranks share each expert.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any) -> None:
        super().__init__(config, pg_collection)
        if self.tp_size > 1:
            raise ValueError(
                f"expert_tensor_parallel_size ({self.tp_size}) must be 1 here: for more take "
                f"Megatron's flex dispatcher with backend deepep"
            )
        sizes = config.num_moe_experts, config.hidden_size, config.moe_router_topk
        self._ep = shared(self.ep_group, *sizes)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[S, B, H]`` and ``[T, E]`` to ``[T, H]`` and ``[T, K]``; dropped picks become -1."""
        self._shape = hidden_states.shape
        weights, picks = probs.topk(self.config.moe_router_topk)
        self._picks = picks.masked_fill(~routing_map.gather(1, picks), -1)
        return hidden_states.view(-1, self._shape[-1]), weights

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows sorted by expert, and their weights."""
        self._recv = self._ep.dispatch(
            hidden_states, self._picks, probs, layout=ty.Layout.EXPERT_MAJOR
        )
        return self._recv.x, self._recv.row_weights

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Nothing is left to permute."""
        return hidden_states, self._recv.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing is left to permute."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[T, H]``: the sum of each token's rows, which the experts have weighted."""
        return self._ep.combine(hidden_states, self._recv.handle)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[S, B, H]``."""
        return hidden_states.view(self._shape)


def on_tokenyard(layer: torch.nn.Module) -> torch.nn.Module:
    """A ``MoELayer``, whatever dispatcher it was made with."""
    layer.token_dispatcher = TokenyardTokenDispatcher(layer.config, get_default_pg_collection())
    return layer


def main(device: torch.device) -> None:
    """The comparison on this rank."""
    from megatron_moe_layer import compare, moe_layer

    compare(lambda device: on_tokenyard(moe_layer("allgather", device)), device)


if __name__ == "__main__":
    from megatron_moe_layer import run

    run(main)
