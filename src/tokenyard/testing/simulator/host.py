"""Host code of the ranks: threads (torch keeps state per thread), of which one runs at a time, and
only when the scheduler says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Ended(BaseException):
    """Raised in host code whose simulation is over. No error: it passes ``except Exception``."""


class Host:
    """One rank's host code as a coroutine, which waits until ``ready()`` (None: it can go on) or
    the ``deadline`` (simulated ns; None: for ever); ``polls``: for anything to happen, by its own
    loop."""

    def __init__(self, rank: int, body: Callable[[], Any], speed: float) -> None:
        self.rank, self.speed = rank, speed
        self.ready: Callable[[], bool] | None = None
        self.waits_for = ""
        self.deadline: int | None = None
        self.polls = False
        self.checked = -1  # version of the world at which ``ready()`` was last found false
        self.over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._body = body
        self._ending = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"host of rank {rank}", daemon=True)
        self._thread.start()  # it waits for its first :meth:`resume`

    def resume(self) -> None:
        """From the scheduler: let it run until it waits or ends."""
        self._go.release()
        self._back.acquire()

    def pause(
        self,
        waits_for: str,
        ready: Callable[[], bool] | None = None,
        deadline: int | None = None,
        polls: bool = False,
    ) -> None:
        """From the host code: let others run until ``ready()`` or the deadline."""
        self.ready, self.waits_for, self.deadline, self.polls = ready, waits_for, deadline, polls
        self.checked = -1
        if not self._ending:
            self._back.release()
            self._go.acquire()
        if self._ending:
            raise Ended
        self.ready, self.deadline, self.polls = None, None, False

    def end(self) -> None:
        """From the scheduler: unwind it if it has not ended."""
        if self._thread.is_alive():
            self._ending = True
            self.resume()
            self._thread.join()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._ending:
                self.result = self._body()
        except Ended:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self._back.release()
