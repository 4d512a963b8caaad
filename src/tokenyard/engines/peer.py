"""What engines with rings share beside launches of rows: calls, plans, counts, refusals."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from tokenyard import header as head
from tokenyard.config import Config
from tokenyard.engines.base import Engine
from tokenyard.engines.failures import IN_ORDER, FailureReports, Report
from tokenyard.engines.in_place import GrowingRegion, InPlaceBuffers, ReceiveBuffer
from tokenyard.engines.outputs import CallPlan, Counted, Outputs, filled_of
from tokenyard.engines.result_heap import ResultHeap
from tokenyard.engines.signatures import Launch, Signature, signature_of
from tokenyard.engines.status import REFUSED, StatusMonitor
from tokenyard.engines.tuning import Tuning
from tokenyard.engines.waits import DeviceWaits
from tokenyard.engines.workspace import PeerWorkspace
from tokenyard.forks import keep_for_ever
from tokenyard.handle import Arrived, Plan, Spec
from tokenyard.header import COMBINE, DISPATCH, CallKind, Fingerprint
from tokenyard.kernels import region, two_region
from tokenyard.kernels.plan import Picks, bind_plan
from tokenyard.kernels.stand_in import bind_stand_ins, launch_call, stand_in
from tokenyard.kernels.two_headers import bind_two_call_barrier
from tokenyard.memory.symmetric import SymmetricMemory
from tokenyard.routing import host_ints
from tokenyard.rows import Payload, address
from tokenyard.stats import Stats
from tokenyard.types import Layout


class PeerEngine(Engine):
    """One rank of an engine over peers' memory. All methods are collective and run in one order on
    all ranks.

    Args:
        memory: of this rank; the engine closes it.
        tuning: how work is divided into programs; equal on all ranks.
        buffer_bytes: of all rings on one rank together.
        receive_bytes: of the receive buffer, which combines take if all their rows fit; 0: none.
        heap_bytes: of the heap for results of fresh dispatches; 0: none.
    """

    in_place = True
    hop_counts = 2  # ``ReceiveBuffer.needed``, ``ResultHeap.note``
    _pulls = False
    """Whether a combine in place reads peers' rows where they are; else they are pushed."""
    _table_rows = 0
    """Rows of each node's part of the forwarders' table in the plan that is launched next."""
    _most_tokens = 0
    """Most tokens of any rank in any call so far: so many rows a forwarder's table has room for."""

    def __init__(
        self,
        config: Config,
        memory: SymmetricMemory,
        stats: Stats,
        tuning: Tuning,
        buffer_bytes: int,
        failures: FailureReports,
        receive_bytes: int = 0,
        heap_bytes: int = 0,
    ) -> None:
        self.config, self.stats, self._memory = config, stats, memory
        self._workspace = PeerWorkspace(config, memory, tuning, buffer_bytes, pulls=self._pulls)
        self._workspace.stand_ins = bind_stand_ins(self._workspace)
        self._monitor = StatusMonitor(config, self._workspace, failures)
        self._waits = DeviceWaits(stats, memory, self._workspace.waited, self._monitor.source_of)
        parts = (self._workspace, self._monitor)
        self._growing = in_place, received = GrowingRegion(*parts), GrowingRegion(*parts)
        self._in_place = InPlaceBuffers(config, self._workspace, in_place)
        self._receive = ReceiveBuffer(config, self._workspace, received, receive_bytes)
        self._heap = ResultHeap(*parts, heap_bytes, self._receive.needed_at + 1)
        self._outputs = Outputs(config, memory.device, self._route_words)
        self._signatures: dict[tuple[Any, ...], Signature] = {}
        self._casts: dict[tuple[Any, ...], Launch] = {}
        self._counting = threading.Lock()
        self._calls = 0
        size, width = config.world_size, self._workspace.header_words
        self._local = config.num_local_experts
        self._header_in: Any = self._workspace.header_in.numpy()
        self._host: Any = self._workspace.header_out.numpy()
        self._headers: Any = self._host[3 : 3 + size * width].reshape(size, width)
        self._rows: Any = self._host[3 + size * width :].reshape(size, size)  # from each to each
        self._tokens: Any = self._headers[:, head.NUM_TOKENS]
        self._routings: Any = self._headers[:, head.ROUTING]
        self._counts: Any = self._headers[:, head.COUNTS : head.COUNTS + self._local]
        # where the host learns of a dispatch what ``Plan.splits`` has, in that order
        places = torch.arange(self._workspace.header_out.shape[0], device="cpu")
        headers, rows = places[3:][: size * width].view(size, width), places[3 + size * width :]
        self._told_at: Any = torch.cat((
            rows[size * config.rank :][:size],
            headers[:, head.NUM_ROWS],
            headers[0, :1],  # the routing's place
            rows[: config.matrix_ranks * size],
            headers[0, : self.hop_counts],
            headers[0, head.COUNTS :][: self._local],
        )).numpy()  # fmt: skip
        # ranks whose rows the host counts: those of other nodes are counted by the device
        grid, self._near = self._workspace.grid, np.zeros(size, dtype=np.int64)
        self._near[list(grid.ranks_of(grid.node_of(config.rank)))] = 1
        self._unknown: Any = np.full(2 * size + 1 + self.hop_counts, -1)

    @property
    def calls_begun(self) -> int:
        return self._calls

    @property
    def buffer_bytes(self) -> int:
        """Symmetric memory of this rank: rings, signals, in-place buffer, receive buffer and heap,
        if there are any."""
        growing = sum(each.all_bytes for each in self._growing)
        return self._workspace.num_bytes + growing + self._heap.num_bytes

    def refuse(self, op: int, exact: bool, reason: str) -> bool:
        """With counts to exchange, everybody raises before a row moves and goes on. Otherwise rows
        already fly: others learn of it at once, and all objects of this call are of no more use."""
        self._monitor.raise_if_failed()
        self._monitor.begin(fingerprint := Fingerprint(op, self._calls, *[0] * 13), REFUSED)
        self._calls += 1
        if op != DISPATCH:
            launch = bind_two_call_barrier(self._workspace)
            launch_call(launch, self._workspace, (), REFUSED)
            self._memory.settle()
            return True
        nothing = torch.empty(0, self.config.hidden, dtype=torch.bfloat16, device="cpu")
        spec = Spec(layout=Layout.FLAT, exact=exact)
        kind = CallKind(op, Payload(nothing, None), spec, None, False)
        signature = signature_of(kind, self.config)
        header = head.blank(fingerprint, 1, 0, 0)
        head.refuse(header, reason)
        signature.words, signature.tag = header[0].numpy(), REFUSED
        nobody = torch.empty(0, self.config.num_topk, dtype=torch.int64, device=self._memory.device)
        with self._memory.tensors():
            held = self._count(nobody, None, signature)
            if exact:
                nonce, host = self._calls, self._host
                # Until then the kernel reads the header.
                self._monitor.wait(lambda: host[0] == nonce)
            self._memory.settle()
            self._monitor.stop_short()
            del held
        return True

    def check(self) -> None:
        """Wait for the device; raise if a call failed there or a static dispatch had bad ids."""
        self._monitor.finish()
        self._monitor.raise_if_failed()
        self._monitor.raise_if_bad_index()
        if self._workspace.grid.num_nodes > 1:
            self._count_network()

    def failure(self) -> Report | None:
        return self._monitor.failure()

    def interrupt(self, text: str) -> None:
        self._monitor.interrupt(text)

    def drain(self) -> None:
        self._monitor.drain()
        if self._memory.ranks_per_node:  # NVSHMEM frees nothing without all ranks
            kept = [each.regions[:] for each in self._growing]
            keep_for_ever([self._workspace.__dict__.get("region"), *kept])
        # what other ranks still write to lasts as long as they map it
        self._let_go("this view of symmetric memory ended with recover()")

    def close(self, why: str = IN_ORDER) -> None:
        self._monitor.close(why)
        self._let_go("this view of symmetric memory is gone: its ExpertParallel is closed")

    def _let_go(self, why: str) -> None:
        self.count()
        self._waits.close()
        self._in_place.expire(why)
        for each in self._growing:
            each.regions.clear()
        self._heap.close()
        self._memory.close()
        self._signatures.clear()
        self._casts.clear()
        self._workspace.__dict__.pop("region", None)

    def _signature(self, kind: CallKind) -> Signature:
        """The signature of a call that begins now, unless an earlier one has failed on the
        device."""
        self._monitor.raise_if_failed()
        op, (x, scales), *options = kind
        scaling = None if scales is None else (scales.dtype, scales.shape[1])
        key = op, x.dtype, x.shape[1], scaling, *options
        signature = self._signatures.get(key)
        if signature is None:
            signature = self._signatures[key] = signature_of(kind, self.config)
        signature.fingerprint.call = self._calls
        self._monitor.begin(signature.fingerprint, signature.tag)
        self._calls += 1
        return signature

    # The plan

    def _count(
        self,
        topk_idx: Tensor,
        weights: Tensor | None,
        signature: Signature,
        room: int = 0,
        place: int = 0,
    ) -> Counted:
        """Launch the plan. ``place``: of the block for the result (:meth:`ResultHeap.place`)."""
        config, workspace, spec = self.config, self._workspace, signature.spec
        tokens = topk_idx.shape[0]
        self._most_tokens = max(self._most_tokens, tokens)
        # in place no rank has more than the most
        known = spec.exact and not signature.fingerprint.in_place
        self._table_rows = self._most_tokens if known else config.max_tokens_per_rank
        above = place if workspace.grid.num_nodes == 1 else self._table_rows
        launch = signature.bound(topk_idx.dtype, lambda: bind_plan(
            workspace, config.num_topk, signature.row_layout.meta_words,
            by_expert=signature.experts, padded=spec.layout is Layout.EXPERT_PADDED,
            exact=spec.exact, weighted=signature.weighted, wide=topk_idx.dtype == torch.int64,
        ))  # fmt: skip
        counted = self._outputs.counted(signature, tokens, self._table_rows)
        most, rows = head.MOST_ROWS, room or head.MOST_ROWS
        if not spec.exact:
            rows = signature.static_rows[1]
        if not spec.exact or spec.layout is Layout.EXPERT_PADDED:
            most = config.max_tokens_per_rank
        if spec.exact:
            signature.words[head.CALL_AT] = signature.fingerprint.call
            self._header_in[: signature.words.shape[0]] = signature.words
        stand_in(workspace, signature.tag, plan=True)
        self._memory.gate()
        launch(
            Picks(topk_idx.data_ptr(), address(weights)), workspace.peers, workspace.state_at,
            workspace.scratch_at, counted.route.data_ptr(), filled_of(counted),
            workspace.header_in_at, workspace.header_out_at, self._calls, signature.tag, tokens,
            config.num_experts, most, rows | above << 32, spec.expert_alignment,
        )  # fmt: skip
        return counted

    def _plan_words(self, num_tokens: Any) -> Any:
        """int32 words of the plan of a batch of ``num_tokens`` before the forwarders' table."""
        grid, channels = self._workspace.grid, self._workspace.tuning.channels
        destinations = grid.world_size + grid.num_nodes
        first_rows = two_region.first_forwarded_words(grid.world_size, grid.num_nodes, channels)
        return region.plan_words(destinations, channels, num_tokens, self._local) + first_rows

    def route_shapes(
        self, num_tokens: Any, spec: Spec, new_size: Any
    ) -> tuple[tuple[Any, ...], torch.dtype, Any]:
        if spec.exact:
            return (new_size(),), torch.int32, new_size()
        words = self._route_words(num_tokens, self.config.max_tokens_per_rank)
        return (words,), torch.int32, self.config.padded_rows

    def _route_words(self, num_tokens: Any, table_rows: int) -> Any:
        """int32 words of both."""
        return self._plan_words(num_tokens) + self._table_words(table_rows)

    def _table_words(self, rows: int) -> int:
        """int32 words of the forwarders' table with ``rows`` rows per node."""
        return (self._workspace.grid.num_nodes - 1) * rows * self._workspace.grid.ranks_per_node

    def _with_room(self, counted: Counted) -> Counted:
        """``counted`` with a table for as many tokens as any rank has, now that all are known."""
        if self._most_tokens <= self._table_rows:
            return counted
        self._memory.settle()  # the plan's programs may still write to its outputs
        words, grid = self._plan_words(counted.tokens), self._workspace.grid
        larger = counted.route.new_empty(words + self._table_words(self._most_tokens))
        larger[:words] = counted.route[:words]
        rows_at: int = two_region.table_rows_at(
            grid.world_size, grid.num_nodes, self._workspace.tuning.channels
        )
        larger[rows_at] = self._most_tokens
        return counted._replace(route=larger, route_words=larger.shape[0])

    def _learn(self, signature: Signature) -> Any:
        """Wait on the host for everybody's counts, and check them: ``Plan.splits``."""
        nonce, host, size = self._calls, self._host, self.config.world_size
        if host[0] == nonce:
            self._monitor.raise_if_failed()
        else:
            self._monitor.wait(lambda: host[0] == nonce)
        if host[1]:
            headers = torch.from_numpy(self._headers)  # pyright: ignore[reportUnknownMemberType]
            padded = signature.spec.layout is Layout.EXPERT_PADDED
            most = self.config.max_tokens_per_rank if padded else head.MOST_ROWS
            head.verify(headers, self.config, max_rows=most)
        known, most_tokens = host[self._told_at], max(self._tokens.tolist())
        known[2 * size] = head.mixed(self._routings.tolist())
        known[self._receive.needed_at] = self._receive.needed(self._rows, most_tokens)
        if size > 1:
            np.add.reduce(self._counts, 0, None, known[known.shape[0] - self._local :])
        self._most_tokens = max(self._most_tokens, most_tokens)
        return known

    # Results

    def _finish(
        self, out: Payload, plan: CallPlan, arrived: Arrived, known: Any, signature: Signature
    ) -> tuple[Payload, Plan, Arrived]:
        """Once rows are on their way: results of their true size, counts for the handle."""
        self._memory.settle()
        exact, size = known is not None, self.config.world_size
        if not exact:  # the number of the call tells one routing from another
            known = self._unknown.copy()
            known[2 * size] = signature.fingerprint.call
        plan.counts = known
        if exact and not signature.experts:
            num_rows = sum(known[size : 2 * size].tolist())
            for output in (*out, arrived.topk_idx, arrived.weights, arrived.source):
                if output is not None and output.shape[0] > num_rows:
                    output.resize_(num_rows, *output.shape[1:])  # the storage stays as it is
            signature.learn_room(plan.num_tokens, num_rows)
        signature.count(known[: 2 * size])
        return out, cast("Plan", plan), arrived

    def count(self) -> None:
        with self._counting:  # any thread may ask
            self._waits.count()
            for signature in list(self._signatures.values()):
                told, now = signature.told, (signature.calls, signature.rows.copy())
                signature.told, op = now, signature.fingerprint.op
                out, into = ((now[1] - told[1]).reshape(2, -1) * self._near).tolist()
                if op == COMBINE:
                    out, into = into, out
                row_bytes = signature.row_layout.row_bytes
                self.stats.add(head.OPS[op], now[0] - told[0], out, into, row_bytes)

    def _count_network(self) -> None:
        """Bring to the statistics what kernels counted: rows between ranks of my local index."""
        grid, channels, me = self._workspace.grid, self._workspace.tuning.channels, self.config.rank
        state, begin = self._workspace.state.cpu(), region.state_words(grid.world_size, channels)
        end = cast("int", two_region.state_at("bytes", grid.world_size, grid.num_nodes, channels))
        rows = state[begin:end].view(2, grid.num_nodes, channels).sum(2)
        sent, taken = host_ints(rows[0]), host_ints(rows[1])
        for node, peer in enumerate(grid.rail_of(me)):
            if peer != me:
                self.stats.rows_sent[peer], self.stats.rows_received[peer] = sent[node], taken[node]
                self.stats.bytes_sent[peer] = int(state[end + node])
