"""What ranks of engine collective tell each other before rows move: headers, refusals, bad ids."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import Engine
from tokenyard.engines.failures import Report
from tokenyard.engines.send_plan import SendPlan, counts_by_rank, note_bad_index
from tokenyard.engines.transport import Transport
from tokenyard.handle import Plan, Spec
from tokenyard.header import DISPATCH, CallKind, Fingerprint
from tokenyard.routing import host_ints
from tokenyard.topology import Topology
from tokenyard.types import Layout


class Agreement(Engine):
    """Numbers the calls of one rank, and has all ranks agree on each. ``relays``: whether rows are
    relayed: then headers count rows to each node too."""

    def __init__(
        self, config: Config, transport: Transport, grid: Topology, *, relays: bool
    ) -> None:
        self.config, self._transport, self._grid = config, transport, grid
        self._relays = relays
        self._num_counts = config.most_local_experts + config.matrix_ranks + int(relays)
        self._calls = 0
        self._bad_index: Tensor | None = None

    @property
    def calls_begun(self) -> int:
        return self._calls

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        if not self._has_headers(op, exact):
            return False
        fingerprint = Fingerprint(op, self._calls, *[0] * 13)
        self._calls += 1
        header = head.blank(fingerprint, self.config.world_size, self._num_counts, 0)
        head.refuse(header, reason)
        self._transport.swap(header, f"{head.OPS[op]} #{fingerprint.call}")()
        return True

    def awaited(self) -> int | None:
        return self._transport.awaited(self._calls)

    def failure(self) -> Report | None:
        return self._transport.failure()

    def check(self) -> None:
        """Raise if a static dispatch was given ids out of range; the host waits for the device."""
        if self._bad_index is None:
            return
        at, value = host_ints(self._bad_index)
        if at >= 0:
            self._bad_index.fill_(-1)  # it stays where it is: CUDA graphs write to it
            raise ValueError(
                head.bad_index_text(at, value, self.config.num_topk, self.config.num_experts)
            )

    def _has_headers(self, op: int, exact: bool) -> bool:
        return self._transport.counts_on_host or (op == DISPATCH and exact)

    def _fingerprint(self, kind: CallKind, plan: Plan | None = None) -> Fingerprint:
        """Of the next call; ``plan``: whose routing it repeats."""
        self._calls += 1
        routing = -1 if plan is None else int(plan.splits[2 * self.config.world_size])
        return head.fingerprint_of(kind, self._calls - 1, routing)

    def _check_call(self, fingerprint: Fingerprint, num_tokens: int) -> Callable[[], object]:
        """Agree on the call ahead where headers are cheap; the function returned waits for that."""
        if not self._has_headers(fingerprint.op, False):
            return lambda: None
        size = self.config.world_size
        return self._swap(head.blank(fingerprint, size, self._num_counts, num_tokens), fingerprint)

    def _swap(self, header: Tensor, fingerprint: Fingerprint) -> Callable[[], Tensor]:
        finish = self._transport.swap(header, f"{head.OPS[fingerprint.op]} #{fingerprint.call}")
        config = self.config

        def headers() -> Tensor:
            everybody = finish()
            bounded = not fingerprint.exact or fingerprint.layout == Layout.EXPERT_PADDED.value
            most = config.max_tokens_per_rank if bounded else head.MOST_ROWS
            head.verify(everybody, config, max_rows=most)
            return everybody

        return headers

    def _announce(
        self, fingerprint: Fingerprint, topk_idx: Tensor, send_plan: SendPlan, spec: Spec
    ) -> Callable[[], Tensor | None]:
        """Send headers; the function returned waits for those of all ranks, int64 ``[R, words]`` on
        the host; None where static shapes let the device go on alone."""
        config = self.config
        if not self._has_headers(DISPATCH, spec.exact):
            self._remember_bad_index(topk_idx)
            return lambda: None
        tokens, device = topk_idx.shape[0], topk_idx.device
        header = head.blank(fingerprint, config.world_size, self._num_counts, tokens).to(device)
        head.mark_bad_index(header, topk_idx, config.num_experts)
        header[:, head.NUM_ROWS] = send_plan.counts
        header[:, head.ROUTING] = head.digest(send_plan.topk_idx)
        parts = [
            counts_by_rank(send_plan.topk_idx, config),
            send_plan.counts[: config.matrix_ranks].expand(config.world_size, -1),
        ]
        if self._relays:
            to_node = send_plan.leaving.repeat_interleave(self._grid.ranks_per_node)
            parts.append(to_node.unsqueeze(1))
        header[:, head.COUNTS :] = torch.cat(parts, dim=1)
        return self._swap(header, fingerprint)

    def _remember_bad_index(self, topk_idx: Tensor) -> None:
        """Keep the first bad id of a static call on the device until :meth:`check` asks."""
        if self._bad_index is None:
            with torch.inference_mode(False):
                self._bad_index = torch.full((2,), -1, dtype=torch.int64, device=topk_idx.device)
        note_bad_index(self._bad_index, topk_idx, self.config.num_experts)
