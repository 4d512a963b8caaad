"""The ranks of one host that lend experts to each other: how they agree, and their messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard.engines.select import backends_of
from tokenyard.errors import Mismatch, PeerError
from tokenyard.rendezvous import REFUSAL_WAIT

_CALLS = ("lb_prefetch_weights", "lb_reduce_grads")
_FIELDS = (
    "which call this is",
    "whether tensors are CUDA tensors",
    "the number of tensors",
    "bytes per expert",
    "num_local_experts",
    "num_redundant_experts",
    "redundancy_mapping",
)
"""Of a header, behind the word that says whether a rank refuses. Long ones travel as digests."""

Message = tuple[int, Tensor]
"""A rank of the domain, and the contiguous uint8 tensor that goes there or comes from there."""


def _digest(numbers: Sequence[int]) -> int:
    digest = blake2b(",".join(map(str, numbers)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


class Domain:
    """The ranks of a group on this rank's host, made together: this ``rank`` among ``size``."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self.size = size
        first = group.rank() // size * size
        self.rank = group.rank() - first
        if size == group.size():
            self.group = group
        else:
            members = dist.get_process_group_ranks(group)[first : first + size]
            backend = dist.get_backend_config(group)
            made: Any = dist.new_group(members, backend=backend, use_local_synchronization=True)
            self.group: dist.ProcessGroup = made
        self._backends = backends_of(self.group)
        self._joined = size == 1

    def wire(self, device: torch.device) -> torch.device:
        """Where messages lie that carry tensors of ``device``: there, or in host memory.
        ValueError: the group has no backend for either."""
        if device.type == "cpu" or self._backends.get(device.type, "gloo") == "gloo":
            if "gloo" not in self._backends.values() and self.size > 1:
                raise ValueError(
                    f"tensors are on {device}, but the group's backends are {self._backends}: move "
                    f"them, or make the buffer on a group with gloo"
                )
            return torch.device("cpu")
        return device

    # Agreement

    def refuse(self) -> None:
        """Tell ranks in the call, now or within 10 seconds, that this one does not come."""
        work = self._gather([1, *[0] * len(_FIELDS)])[1]
        until = time.monotonic() + REFUSAL_WAIT
        while work is not None and not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)

    def agree(self, call: str, wire: torch.device, sizes: Sequence[int], mapping: Any) -> None:
        """Make sure that all ranks are in the same ``call`` (of :data:`_CALLS`) before anything
        moves. ``sizes``: bytes per expert of each tensor; then ``num_local_experts``. ``mapping``:
        rows of experts, one row per rank.

        Raises:
            PeerError: a rank refuses. Mismatch: ranks disagree; says on what.
        """
        flat = [expert for row in mapping for expert in row]
        columns = len(mapping[0])
        mine = [_CALLS.index(call), int(wire.type != "cpu"), len(sizes) - 1]
        mine += [_digest(sizes[:-1]), sizes[-1], columns, _digest(flat)]
        everybody, work = self._gather([0, *mine])
        if work is not None:
            work.wait()
        headers: list[list[int]] = [each.tolist() for each in everybody]  # pyright: ignore[reportUnknownVariableType]
        for peer, header in enumerate(headers):
            if header[0]:
                raise PeerError(f"rank {peer} refused its side of {call}(): its error says why")
        for at, name in enumerate(_FIELDS, 1):
            for peer, header in enumerate(headers):
                if header[at] != headers[0][at]:
                    values = f": {headers[0][at]} and {header[at]}" if at in (3, 5, 6) else ""
                    raise Mismatch(
                        f"ranks disagree on {name} in {call}(): rank 0 and rank {peer} of this "
                        f"host differ{values}"
                    )

    def _gather(self, header: list[int]) -> tuple[list[Tensor], Any]:
        """``header`` of every rank, good after the work returned (None: at once)."""
        gloo = "gloo" in self._backends.values()
        device = "cpu" if gloo or self.size == 1 else torch.device("cuda")
        mine = torch.tensor(header, device=device)
        if self.size == 1:
            return [mine], None
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        work: Any = dist.all_gather(everybody, mine, self.group, async_op=True)  # pyright: ignore[reportUnknownVariableType]
        return everybody, work  # pyright: ignore[reportUnknownVariableType]

    # Messages

    def exchange(self, send: list[Message], recv: list[Message], wire: torch.device) -> None:
        """Send and receive. Messages between two ranks meet in the order of the lists; those of
        this rank to itself are copied."""
        kept = ([part for peer, part in each if peer == self.rank] for each in (send, recv))
        for part, room in zip(*kept, strict=True):
            room.copy_(part)
        send, recv = ([each for each in many if each[0] != self.rank] for many in (send, recv))
        if wire.type != "cpu" and not self._joined:  # a backend may connect all ranks or none
            dist.all_reduce(torch.zeros(1, device=wire), group=self.group)
            self._joined = True
        staged = [(peer, part.to(wire)) for peer, part in send]
        come = [(peer, torch.empty_like(part, device=wire)) for peer, part in recv]
        rooms = recv if not recv or recv[0][1].device == wire else come
        operations = [
            dist.P2POp(kind, part, group=self.group, group_peer=peer)
            for kind, messages in ((dist.isend, staged), (dist.irecv, rooms))
            for peer, part in messages
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if rooms is come:
            for (_, part), (_, arrived) in zip(recv, come, strict=True):
                part.copy_(arrived)
