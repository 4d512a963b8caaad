"""Going on with the ranks that are left: what of :class:`ExpertParallel` lasts across epochs."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tokenyard import ops
from tokenyard.admission import accept, check_name, invite
from tokenyard.arguments import LARGEST, check_device, check_timeout, check_whole, whole
from tokenyard.calls import Calls
from tokenyard.config import Config
from tokenyard.engines.base import Choice
from tokenyard.engines.select import enter, report_of
from tokenyard.errors import Mismatch, NotSupported, PeerError, PeerTimeout, RankExpelled, afresh
from tokenyard.memory.symmetric import MemoryGroup
from tokenyard.redirect import Redirect, check_replicas
from tokenyard.routing import host_ints
from tokenyard.stats import Stats
from tokenyard.survivors import Vote, settle, store_of
from tokenyard.topology import Topology
from tokenyard.validation import Validation

_log = logging.getLogger("tokenyard")
_Object = TypeVar("_Object", bound="Recoverable")


class Recoverable:
    """An object whose ranks may become fewer. Ranks and experts keep their numbers."""

    config: Config
    group: Any
    rank: int
    world_size: int
    topology: Topology | None = None
    epoch: int = 0
    _calls: Calls
    _validation: Validation
    _stats: Stats
    _choice: Choice
    _store: dist.Store | None
    _most_bytes: int
    _replicas: Tensor | None = None

    def __repr__(self) -> str:
        config, gone = self.config, self._calls.gone
        sizes = ("num_experts", "hidden", "num_topk", "max_tokens_per_rank")
        said = ", ".join(f"{name}={getattr(config, name)}" for name in sizes)
        place = f"rank {self.rank} of {self.world_size}, engine {self.engine!r}, {said}"
        return f"{type(self).__name__}({place}{f', {gone}' if gone else ''})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an ExpertParallel can be neither copied nor pickled, as it is a place among ranks: "
            "make another one on each of them"
        )

    def _begin(self, choice: Choice) -> None:
        """Make the engine of an epoch."""
        known = getattr(self, "_calls", None)
        earlier: frozenset[int] = frozenset()
        if known is not None:
            earlier = known.earlier | {known.number}
        redirect = Redirect(self.config, self._replicas) if self.config.absent else None
        with torch.inference_mode(False):  # it may outlive the block that it is made in
            engine = choice.make(self._stats)
            self._calls = Calls(self.config, engine, choice.device, earlier, redirect)
        self._choice, self.why, self.engine = choice, choice.why, engine.name
        self.device = choice.device
        self._validation = Validation(self._calls, choice.device, self._most_bytes)

    def recover(self, replicas: Any = None) -> list[int]:
        """Go on with the ranks that are left, after a call has ended in :class:`PeerTimeout` or
        :class:`PeerLost` (or Ctrl-C). Collective: every rank that lives calls it, whatever it was
        in, within the timeout of the first one. Ranks and experts keep their numbers; the call that
        failed can be made again. Results of earlier calls stay readable, but those in place end;
        their handles, and CUDA graphs, are of no more use. On a GPU it waits for the device.

        Args:
            replicas: ``[logical experts, copies]`` expert ids, -1 for none: experts of a row have
                the same weights. A pick of an expert that is gone goes to the next one of its row
                that is not. Without such a one it is dropped: ``CallOptions.lost_weights``. The
                same on all ranks. Default: the table given last, if any.

        Returns:
            The ranks that take part now.

        Raises:
            RuntimeError: nothing has failed; in a CUDA graph's capture; the object is closed.
            NotSupported: this engine cannot go on without a rank.
            ValueError: ``replicas`` is no such table (the others get ``PeerError``).
            Mismatch: ranks disagree on ``replicas``.
            RankExpelled: the others have gone on without this rank.
            StoreLost: the store in which ranks agree is gone with its process.
            PeerTimeout: one more rank was lost meanwhile.
        After the last four but ``RankExpelled`` and ``StoreLost`` call it again.
        """
        store, failure = self._check_recoverable()
        table, refusal = self._replicas, ""
        try:
            if replicas is not None:
                table = check_replicas(replicas, self.config.num_experts)
        except ValueError as error:
            refusal = str(error)
        self._calls.engine.drain()
        lost = failure.rank if isinstance(failure, PeerTimeout) else -1
        members = self._settle(store, Vote(lost, refusal, str(_rows_of(table) or "")))
        self._replicas = table
        self._renew(store)
        if self.config.rank == members[0]:
            _log.warning("recovered (epoch %d): ranks %s; %s", self.epoch, members, self.why)
        return members

    def _settle(self, store: dist.Store, vote: Vote) -> list[int]:
        """Agree on the ranks of the next epoch, and on how it begins."""
        config = self.config
        here = store_of(store, self.epoch)
        try:
            votes = settle(here, config.rank, config.members, config.timeout, vote)
        except RankExpelled as error:
            self._calls.fail(error)
            self._calls.gone = f"was left behind ({error})"
            raise
        self.epoch += 1
        absent = tuple(rank for rank in range(config.world_size) if rank not in votes)
        # Nodes of which ranks are missing are not followed any more.
        self.topology = None if absent else self.topology
        self.config = replace(config, absent=absent, topology=self.topology)
        _check_votes(votes, config.rank, vote)
        return list(votes)

    def _renew(self, store: dist.Store) -> None:
        """Connect the ranks of this epoch, and let go of the last one."""
        calls, again = self._calls, self._choice.again
        assert again is not None
        try:
            if calls.failure is None:  # admit(): let go of memory before more is made
                calls.engine.drain()
            self._begin(again(self.config, store_of(store, self.epoch)))
        except RuntimeError as error:
            calls.fail(error)
            raise
        calls.part = None  # this epoch needs it
        calls.close("has recovered since this call began")
        ops.retire(calls.number)

    def admit(self, rank: int, at: str) -> None:
        """Let a new process be ``rank``, which is gone: it calls :meth:`join` with the same words.
        Collective, between two calls; the members wait for it up to the timeout, so start it
        before. Its experts take picks again. It costs what :meth:`recover` does: new connections
        or, on GPUs, new memory, which all map; handles and graphs of before are of no more use.

        Args:
            at: under which they meet in the store; another one for each object.

        Raises:
            ValueError: ``rank`` is not gone, or ``at`` no name.
            Mismatch: the members disagree on them.
            PeerTimeout: it did not come. If no rank was lost beside, the object is as it was.
            NotSupported: this engine cannot, or the newcomer's GPU does not reach the others'.
        """
        self._calls.check_open()
        self._calls.check()
        store, config = self._check_engine(), self.config
        check_name(at)
        if whole(rank) not in config.absent:
            raise ValueError(
                f"rank ({rank!r}) must be one that is gone: {list(config.absent) or 'none is'}"
            )
        facts = {"epoch": self.epoch, "most_bytes": self._most_bytes, **self._choice.terms()}
        facts |= {"replicas": _rows_of(self._replicas)}
        seen = report_of(self.group, self.device, config.rank, facts)
        self._store = invite(store_of(store, self.epoch), config, rank, at, facts, seen)
        self.epoch += 1
        absent = tuple(each for each in config.absent if each != rank)
        self.config = replace(config, absent=absent)
        self._renew(self._store)

    @classmethod
    def join(
        cls: type[_Object],
        store: dist.Store | MemoryGroup,
        rank: int,
        at: str,
        *,
        device: torch.device | str | None = None,
        timeout: float = 30.0,
    ) -> _Object:
        """In a new process: become ``rank`` of an object whose members :meth:`admit` it.

        Args:
            store: theirs, such as ``TCPStore(host, port, is_master=False)``; of ranks in one
                process, this one's place among them.
            at: as there.
            device: where tensors live, as when an object is made.
            timeout: seconds to wait for an invitation.

        Raises:
            ValueError: bad arguments, or another rank is invited there.
            RuntimeError: another process has come first.
            PeerTimeout: no invitation, or a member did not come.
            NotSupported: this process's GPU does not reach the others'.
        """
        group = store if isinstance(store, MemoryGroup) else None
        store = group.open_store() if group is not None else store
        if not isinstance(store, dist.Store):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"store ({store!r}) must be a torch.distributed.Store")
        rank, at = check_whole("rank", rank, 0, LARGEST), check_name(at)
        where = None if device is None else check_device(device)
        self = cls.__new__(cls)
        seen = partial(report_of, group, where, rank)
        self._store, self.config, facts = accept(store, rank, at, check_timeout(timeout), seen)
        self.group, self.rank, self.world_size = group, rank, self.config.world_size
        self.epoch, self._most_bytes = facts["epoch"] + 1, facts["most_bytes"]
        if facts["replicas"] is not None:
            self._replicas = check_replicas(facts["replicas"], self.config.num_experts)
        self._stats = Stats.zeros(rank, self.world_size)
        self._begin(enter(group, where, facts, self.config, store_of(self._store, self.epoch)))
        return self

    def _check_engine(self) -> dist.Store:
        """The object's store, if its engine can go on with other ranks."""
        if self._store is None or self._choice.again is None:
            raise NotSupported(
                f"engine {self._calls.engine.name!r} cannot go on with other ranks here: make a "
                f"new ExpertParallel on a group of those that there are"
            )
        return self._store

    def _check_recoverable(self) -> tuple[dist.Store, RuntimeError]:
        """The object's store, and what has failed."""
        calls = self._calls
        if calls.closed:
            calls.check_open()
        if isinstance(calls.failure, RankExpelled):
            raise afresh(calls.failure)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("recover() asks the host, which a CUDA graph's capture cannot hold")
        store, failure = self._check_engine(), calls.failed()
        if failure is None:
            raise RuntimeError(
                "recover() was called, but no rank of this ExpertParallel has reported a failure: "
                "call it once a call has raised PeerTimeout or PeerLost"
            )
        return store, failure


def _rows_of(replicas: Tensor | None) -> Any:
    """A table as lists."""
    return None if replicas is None else [host_ints(row) for row in replicas.unbind()]


def _check_votes(votes: dict[int, Vote], rank: int, mine: Vote) -> None:
    """Raise unless all ranks of the next epoch can begin it."""
    if mine.refusal:
        raise ValueError(mine.refusal)
    for peer, vote in votes.items():
        if vote.refusal:
            raise PeerError(f"rank {peer} refused its side of recover(): {vote.refusal}")
    for peer, vote in votes.items():
        if vote.replicas != mine.replicas:
            raise Mismatch(
                f"ranks disagree on replicas: rank {rank} says {mine.replicas or None}, rank "
                f"{peer} says {vote.replicas or None}"
            )
