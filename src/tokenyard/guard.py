"""One engine behind its call queue, and what ends it: closing, a lost peer, Ctrl-C, a fork."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from tokenyard import forks, transforms
from tokenyard.call_queue import CallQueue
from tokenyard.config import Config
from tokenyard.engines.base import Engine, LowLatency
from tokenyard.engines.failures import GRACE, IN_ORDER
from tokenyard.errors import NotSupported, PeerTimeout, afresh, is_from_outside
from tokenyard.handle import Spec
from tokenyard.header import DISPATCH, OPS
from tokenyard.memory.aside import Aside
from tokenyard.memory.store import clock_of, leave

Result = TypeVar("Result")


class Guard:
    """Makes calls of one object on its engine (``low``: if it is one for decoding). ``gone``: why
    no more can be made; empty while they can. ``failure``: the error that ended all ranks' calls.
    ``part`` of the store: goes once all ranks have closed (None: it stays).
    """

    part: dist.Store | None = None

    def __init__(self, config: Config, engine: Engine, device: torch.device | None) -> None:
        self.config, self.engine = config, engine
        self.queue = CallQueue(threaded=engine.waits_on_host, device=device)
        self.low = engine.decoder
        self.gone, self.closed, self.inherited = "", False, False
        self.failure: RuntimeError | None = None
        self._doing: tuple[str, int | None] = "a call", None
        forks.watch(self)

    def check_open(self) -> None:
        """Raise if this object was closed, interrupted, or lost a peer."""
        if self.gone:
            remedy = "make a new one (and close it behind the last backward)"
            if isinstance(self.failure, PeerTimeout) and not self.closed:
                remedy += ", or recover() with the ranks that are left"
            raise RuntimeError(f"this ExpertParallel {self.gone}: {remedy}")

    def failed(self) -> RuntimeError | None:
        """What has ended all ranks' calls, here or elsewhere, once those under way are over."""
        self.queue.run(lambda: None)
        if self.failure is None:
            with suppress(PeerTimeout):  # it is kept
                report = self.make("recover()", self.engine.failure)
                if report is not None:
                    self.fail(report.to(self.config.rank, "recover()"))
        return self.failure

    def fail(self, error: RuntimeError) -> None:
        """End the calls of this rank for what others did."""
        self.failure = afresh(error)
        self.gone = f"lost a peer ({error})"

    def refuse(self, op: int, exact: bool, error: ValueError | NotSupported) -> Exception:
        """Tell the other ranks of an error in this rank's arguments; returns the error to raise."""
        try:
            with transforms.outside_functorch():
                refusing = f"{OPS[op]}, which it refused,"
                told = self.make(refusing, self.engine.refuse, op, exact, str(error))
            if told:
                return error
        except PeerTimeout:
            return error
        return type(error)(
            f"{error} (other ranks cannot be told: those in this call wait until their own timeout)"
        )

    def tell_unmade(self, op: str, spec: Spec, error: Exception) -> None:
        """In the turn of a call that is not made, as its ``after`` raised: tell the other ranks."""
        if self.failure is None:
            exact = op != OPS[DISPATCH] or spec.exact
            why = f"what it was to wait for (after=) raised {type(error).__name__}: {error}"
            refuse = partial(self.engine.refuse, OPS.index(op), exact, why)
            with suppress(PeerTimeout), transforms.outside_functorch():
                self.watched(refuse, f"{op}, which it refused,")()

    def check(self) -> None:
        """Wait for all calls so far; raise what went wrong, or that this object is closed."""
        if self.closed:  # one that lost a peer says which below
            self.check_open()
        self.make("check(), after call", self.engine.check)

    def close(self, gone: str = "is closed", why: str = IN_ORDER) -> None:
        """Finish what was started and let go of the engine. ``gone``: why, for later calls;
        ``why``: for other ranks."""
        if not self.closed:
            over, self.gone, self.closed = self.failure is not None, gone, True
            try:
                self.wait(partial(self.queue.close, wait=not over))
            finally:
                self.engine.close(why)
            if self.part is not None and not clock_of(self.part)[2]:
                aside = Aside()
                begun = aside.start(partial(leave, self.part, self.config.world_size))
                aside.close()  # it ends behind the call
                begun.wait(GRACE)

    def disown(self, why: str) -> None:
        """In a forked child (``forks.py``)."""
        forks.keep_for_ever(self.engine)
        self.queue.disown()
        self.gone, self.closed, self.inherited = why, True, True
        self.queue = cast("CallQueue", forks.Disowned(why))

    def need_low(self, lack: str) -> LowLatency:
        """The engine for decoding. NotSupported: it is another, which has this ``lack``."""
        if self.low is None:
            raise NotSupported(f"engine {self.engine.name!r} {lack}; engine 'low_latency' can")
        return self.low

    def make(self, op: str, call: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Make a call in its turn and return its result. ``op``: what it is called in errors."""
        queue = self.queue
        if queue.is_busy:
            later = self.watched(partial(call, *args, **options), op)
            return self.wait(partial(queue.run, later))
        if self.failure is not None:
            raise afresh(self.failure)
        self._doing = op, self.engine.calls_begun
        try:
            with queue:  # not by run(): a frame less
                return call(*args, **options)
        except BaseException as error:
            self._notice(error)
            raise

    def watched(self, call: Callable[[], Result], op: str) -> Callable[[], Result]:
        """``call``, unless a peer was lost before its turn; notices one that is lost in it."""

        def watched() -> Result:
            if self.failure is not None:
                raise afresh(self.failure)
            self._doing = op, self.engine.calls_begun
            try:
                return call()
            except BaseException as error:
                self._notice(error)
                raise

        return watched

    def wait(self, wait: Callable[[], Result]) -> Result:
        """What ``wait()`` returns, of a call on another thread; Ctrl-C may end it."""
        try:
            return wait()
        except BaseException as error:
            self._notice_interrupt(error)
            raise

    def _notice(self, error: BaseException) -> None:
        """What an error in a call means for the object: a lost peer ends it."""
        if isinstance(error, Exception) and self.failure is not None:  # its waiter was interrupted
            raise afresh(self.failure) from None
        if isinstance(error, PeerTimeout):
            gone = self.gone
            self.fail(error)
            self.gone = gone or self.gone
        self._notice_interrupt(error)

    def _notice_interrupt(self, error: BaseException) -> None:
        """Ctrl-C ends the object, as this rank has left a call that others are in."""
        alone = self.config.world_size == 1 and self.engine.waits_on_host
        if is_from_outside(error) and not alone and self.failure is None:
            op, number = self._doing
            call = op if number is None else f"{op} #{number}"
            where = f"was interrupted in {call} ({type(error).__name__})"
            self.gone = f"{where}, so no rank can use it any more"
            self.failure = RuntimeError(f"this ExpertParallel {self.gone}: make a new one")
            self.engine.interrupt(f"rank {self.config.rank} {where}")
