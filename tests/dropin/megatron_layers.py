"""MoE layers of megatron-core: through tokenyard's DeepEP, and through Megatron's own allgather
dispatcher (the oracle).

Test bodies import this module where they run, because it imports Megatron, which takes seconds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

import tokenyard.deep_ep
import tokenyard.deep_ep.utils
from tokenyard.deep_ep.hybrid import HybridEPBuffer
from tokenyard.testing import Ranks, assert_close, assert_same_bits

with warnings.catch_warnings():
    # Megatron looks for deep_ep when it is imported, never later: the name is lent for that long.
    warnings.simplefilter("ignore")
    lent = ModuleType("deep_ep")  # one with all its buffers
    vars(lent).update(vars(tokenyard.deep_ep) | {"HybridEPBuffer": HybridEPBuffer})
    sys.modules |= {"deep_ep": lent, "deep_ep.utils": tokenyard.deep_ep.utils}
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import fused_a2a
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    del sys.modules["deep_ep"], sys.modules["deep_ep.utils"]

assert fused_a2a.Buffer is tokenyard.deep_ep.Buffer, (
    "Megatron was imported before, with another deep_ep or none"
)

EXPERTS = 8
FFN = 32

Forward = Callable[[Any, Tensor], Tensor]
"""Sends ``[T, B, H]`` through a layer."""


class Router(TopKRouter):
    """Megatron's router. Its linear layer needs TransformerEngine (a NameError in 0.16.1) and a
    GPU; this one does not.
    """

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())


@dataclass(frozen=True)
class Setting:
    """What both layers of a comparison have in common; ``options`` go to Megatron's
    configuration.
    """

    dtype: torch.dtype = torch.float32
    topk: int = 2
    hidden: int = 64
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, top-{self.topk}, hidden {self.hidden}, {dict(self.options)}"

    def layer(self, ranks: Ranks, dispatcher: str, group: dist.ProcessGroup | None = None) -> Any:
        """A layer with weights that depend on this setting and the rank only; the router's are the
        same on every rank.

        Args:
            dispatcher: "allgather", "flex" (over DeepEP) or "hybridep" (flex over that).
            group: of all ranks, if it shall not be the one of :func:`model_parallel`.
        """
        options: dict[str, Any] = {
            "num_layers": 1,
            "num_attention_heads": 1,
            "hidden_size": self.hidden,
            "ffn_hidden_size": FFN,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": self.topk,
            "moe_router_dtype": "fp32",
            "moe_router_pre_softmax": True,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "flex" if dispatcher == "hybridep" else dispatcher,
            "moe_flex_dispatcher_backend": "hybridep" if dispatcher == "hybridep" else "deepep",
            "use_cpu_initialization": True,
            "init_method_std": 0.3,
            "params_dtype": self.dtype,
            "bf16": self.dtype == torch.bfloat16,
            "fp16": self.dtype == torch.float16,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
        submodules = get_moe_module_spec(use_te=False, num_experts=EXPERTS).submodules
        submodules.router = Router
        torch.manual_seed(ranks.rank)
        groups = get_default_pg_collection()
        if group is not None:
            groups.ep = groups.tp_ep = group
        layer = MoELayer(
            TransformerConfig(**options | dict(self.options)), submodules, pg_collection=groups
        )
        with torch.no_grad():
            layer.router.weight.copy_(
                torch.randn(EXPERTS, self.hidden, generator=torch.Generator().manual_seed(7))
            )
        return layer.to(ranks.device)


class Comparisons:
    """Compares on this rank and goes on, so that no rank leaves the others waiting; what was wrong
    is told at the end.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(
        self,
        got: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        *,
        where: str,
        loose: Mapping[str, float] | None = None,
    ) -> None:
        """Bit for bit (0.0 and -0.0 are equal), but relative errors up to ``loose[name]`` where
        that is given.
        """
        assert list(got) == list(want)
        for name in got:
            what = f"{where}: {name}"
            try:
                if name in (loose or {}):
                    assert_close(got[name], want[name], relative=(loose or {})[name], what=what)
                else:
                    assert_same_bits(got[name] + 0.0, want[name] + 0.0, what=what)
            except AssertionError as error:
                self.failures.append(str(error))

    def tell(self) -> None:
        """Raise ``AssertionError`` if anything was wrong."""
        assert not self.failures, f"{len(self.failures)} tensors are wrong, first:\n" + "\n".join(
            self.failures[:5]
        )


@contextmanager
def model_parallel(
    ranks: Ranks, expert_ranks: int | None = None, expert_tensor: int = 1
) -> Generator[Comparisons, None, None]:
    """Megatron's groups for a while, without ``torch.compile`` (Megatron wraps small functions in
    it).

    Args:
        expert_ranks: ranks that share out the experts of a layer (default: all); other groups of
            ranks do the same beside them.
        expert_tensor: ranks that share out each expert.
    """
    torch.compiler.set_stance("force_eager")
    # Without this, scatter_add on a GPU sums the rows of a token in any order.
    torch.use_deterministic_algorithms(ranks.device.type == "cuda", warn_only=True)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=(expert_ranks or ranks.world_size) // expert_tensor,
        expert_tensor_parallel_size=expert_tensor,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield (compare := Comparisons())
        compare.tell()
    finally:
        fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None
        groups = parallel_state._global_process_group_list[
            1:
        ]  # the first stands for the default group
        # forgets most groups, which keep their threads and sockets
        parallel_state.destroy_model_parallel()
        for group in groups:
            if group in dist.distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)
        torch.use_deterministic_algorithms(False)
        torch.compiler.set_stance("default")


@contextmanager
def generators(ranks: Ranks) -> Generator[None, None, None]:
    """Lets Megatron recompute on a CPU: it would save the state of a GPU's random numbers."""
    with ExitStack() as stack:
        if ranks.device.type == "cpu":
            stack.enter_context(mock.patch.object(random, "_get_cuda_rng_state"))
            stack.enter_context(mock.patch.object(random, "_set_cuda_rng_state"))
        yield


def whole_layer(layer: Any, x: Tensor) -> Tensor:
    """As users call it."""
    return layer(x)[0]


@contextmanager
def oracle(ranks: Ranks, *, in_rank_order: bool) -> Generator[Forward, None, None]:
    """The forward of a layer whose dispatcher is "allgather"; its backward must run in here too.

    That dispatcher wants as many tokens on every rank: short ranks are filled up with tokens that
    pick no expert.

    Args:
        in_rank_order: sum over ranks in rank order in float32 and round once, as
            ``docs/reference/semantics.md`` says. Otherwise as the collective likes: in any order,
            in the dtype of the rows, which in backward rounds bfloat16 after every rank.
    """

    def forward(layer: Any, x: Tensor) -> Tensor:
        longest = torch.tensor([len(x)], device=x.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=layer.token_dispatcher.tp_ep_group)
        short = int(longest) - len(x)
        probs, routing_map = layer.router(x)
        x = F.pad(x, (0, 0, 0, 0, 0, short))
        probs, routing_map = (
            F.pad(each, (0, 0, 0, short * x.shape[1])) for each in (probs, routing_map)
        )
        rows, _ = layer.routed_experts_compute(
            *layer.dispatch(*layer.preprocess(x, probs, routing_map))
        )
        return layer.postprocess(layer.combine(rows), None)[: len(x) - short]

    with ExitStack() as stack:
        if (
            ranks.device.type == "cpu"
        ):  # allgather puts its results on the current GPU, even over gloo
            stack.enter_context(
                mock.patch.object(torch.cuda, "current_device", return_value=ranks.device)
            )
        if in_rank_order:
            stack.enter_context(
                mock.patch.object(
                    mappings, "dist_reduce_scatter_func", _reduce_scatter_in_rank_order
                )
            )
        yield forward


def _reduce_scatter_in_rank_order(output: Tensor, rows: Tensor, group: dist.ProcessGroup) -> None:
    everyone = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(everyone, rows, group=group)
    total = torch.zeros_like(output, dtype=torch.float32)
    for theirs in everyone:
        total += theirs.chunk(group.size())[group.rank()]
    output.copy_(total)


def gradients(layers: Sequence[Any]) -> dict[str, Tensor]:
    """Of every weight."""
    named = [
        (f"layer {i}: {name}", weight)
        for i, layer in enumerate(layers)
        for name, weight in layer.named_parameters()
    ]
    missing = [name for name, weight in named if weight.grad is None]
    assert not missing, f"no gradient of {missing}"
    return {f"gradient of {name}": weight.grad for name, weight in named}


def run(layer: Any, x: Tensor, grad: Tensor, forward: Forward) -> dict[str, Tensor]:
    """Output and gradients of input, router probabilities and weights, of one forward and
    backward.
    """
    seen: list[Tensor] = []

    def watch(_module: Any, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        if outputs[0].requires_grad:  # not while recomputation only computes
            outputs[0].retain_grad()
            seen.append(outputs[0])

    with layer.router.register_forward_hook(watch):
        x = x.clone().requires_grad_()
        y = forward(layer, x)
        y.backward(grad)
    (of_probs,) = (probs.grad for probs in seen if probs.grad is not None)
    assert x.grad is not None
    own = {
        "output": y.detach(),
        "gradient of input": x.grad,
        "gradient of router probabilities": of_probs,
    }
    return own | gradients([layer])


def run_oracle(
    ranks: Ranks, setting: Setting, x: Tensor, grad: Tensor, *, in_rank_order: bool = True
) -> dict[str, Tensor]:
    """As :func:`run`, of Megatron's own allgather dispatcher."""
    with oracle(ranks, in_rank_order=in_rank_order) as forward:
        return run(setting.layer(ranks, "allgather"), x, grad, forward)


def run_outstanding(
    layers: Sequence[Any],
    batches: Sequence[tuple[Tensor, Tensor]],
    order: Sequence[int],
    forward: Forward,
) -> dict[str, Tensor]:
    """As :func:`run`, of all batches through all layers before the first backward; backwards in
    ``order`` of batches.

    Between two layers rows are repeated to twice their width.
    """
    inputs = [x.clone().requires_grad_() for x, _ in batches]
    outputs: list[Tensor] = []
    for x in inputs:
        for i, layer in enumerate(layers):
            x = forward(layer, torch.cat([x, x], -1) if i else x)
        outputs.append(x)
    for i in order:
        outputs[i].backward(batches[i][1].repeat(1, 1, 2 ** (len(layers) - 1)))
    named = {f"output of batch {i}": y.detach() for i, y in enumerate(outputs)}
    for i, x in enumerate(inputs):
        assert x.grad is not None
        named[f"gradient of batch {i}"] = x.grad
    return named | gradients(layers)


def batch(
    ranks: Ranks, setting: Setting, tokens: Sequence[int], seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Two sequences ``[T, 2, H]`` of this rank, and the gradient that comes back for its output."""
    generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
    x = torch.randn(2, tokens[ranks.rank], 2, setting.hidden, generator=generator).to(
        ranks.device, setting.dtype
    )
    return x[0].clone(), x[1].clone()
