"""Host time that DeepEP's V2 buffers add to a native call: ``python tests/run.py elastic_cost``.

As ``deep_ep_cost`` measures it: one rank, CPU tensors, and an engine that answers at once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import tokenyard as ty
from deep_ep_cost import CALLS, EXPERTS, HIDDEN, ROUNDS, TOKENS, TOP, Answers, Call, measure, report
from elastic_calls_of import KINDS


class Bench:
    """A buffer of one rank whose native object answers at once, and all calls that are measured."""

    def __init__(self, group: Any, kind: Any) -> None:
        self.buffer = kind(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOP)
        random = torch.Generator().manual_seed(0)
        x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
        idx = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP, 1).indices
        self.given = x, idx, torch.rand(TOKENS, TOP, generator=random)
        self.by_rank = self._dispatch()
        self.by_expert = self._dispatch(do_expand=True)
        self.ep: Any = self.by_rank[3].ep
        self.ep._calls.engine = Answers(self.ep._calls.engine)

    def _dispatch(self, **options: Any) -> Any:
        x, idx, weights = self.given
        return self.buffer.dispatch(x, idx, weights, num_experts=EXPERTS, **options)

    def calls(self) -> dict[str, tuple[Call, Call | None]]:
        """By name: through the layer, and native."""
        x, idx, weights = self.given
        buffer, ep, major = self.buffer, self.ep, ty.Layout.EXPERT_MAJOR
        rows, _, scores, handle, _ = self.by_rank
        blocks, _, _, expanded, _ = self.by_expert
        native, by_expert = handle.native, expanded.native
        return {
            "dispatch": (self._dispatch, lambda: ep.dispatch(x, idx, weights)),
            "dispatch, static": (
                lambda: self._dispatch(do_cpu_sync=False),
                lambda: ep.dispatch(x, idx, weights, exact=False),
            ),
            "dispatch, expanded": (
                lambda: self._dispatch(do_expand=True),
                lambda: ep.dispatch(x, idx, weights, layout=major),
            ),
            "cached dispatch": (
                lambda: buffer.dispatch(x, handle=handle, do_cpu_sync=False),
                lambda: ep.dispatch(x, handle=native),
            ),
            "combine": (lambda: buffer.combine(rows, handle), lambda: ep.combine(rows, native)),
            "combine with weights": (
                lambda: buffer.combine(rows, handle, topk_weights=scores),
                lambda: ep.combine(rows, native, reduce_weights=scores),
            ),
            "combine, expanded": (
                lambda: buffer.combine(blocks, expanded),
                lambda: ep.combine(blocks, by_expert),
            ),
        }


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("microseconds: through the layer, native, added")
    for kind in KINDS:
        bench = Bench(dist.group.WORLD, kind)
        with torch.no_grad():
            print(f"{kind.__name__}\n{report(measure(bench.calls(), ROUNDS, CALLS))}")
        bench.buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
