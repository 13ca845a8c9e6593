"""Threads for calls: few that work, and two beside them that answer at once what has to give up.

Calls are taken in order while few wait. When many wait the newest goes first, so that what is served is served soon,
and the oldest give up. Shedding needs its own threads: else a call waits behind those it should be shed for.
It is leaner than the library's pool, whose futures, locks and thread counting cost as much as a quarter of a route.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, cast

from dualmap.runtime.logs import get_log

_SHEDDING_THREADS = 2

_IN_ORDER = 64
"""Calls that may wait and still be taken in order: a burst of this size is worked off in some 20 ms."""

_log = get_log("router")


class _Call:
    """A call handed over, and as much of a future as gRPC asks for: who wants to hear of its end."""

    __slots__ = ("_args", "_ended", "_listeners", "_run", "came_s")

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._run = run
        self._args = args
        self.came_s = monotonic()
        self._ended = False
        self._listeners: list[Callable[[Any], object]] = []

    def __call__(self) -> None:
        try:
            self._run(*self._args)
        finally:
            self._ended = True
            self._tell()

    def add_done_callback(self, listener: Callable[[Any], object]) -> None:
        """Call the listener once the call has ended, at once if it has."""
        self._listeners.append(listener)
        if self._ended:
            self._tell()

    def _tell(self) -> None:
        # Two threads may meet here; each listener is popped by one of them.
        while self._listeners:
            try:
                listener = self._listeners.pop()
            except IndexError:
                return
            listener(self)


class WorkerPool(Executor):
    """A pool whose calls learn from ``shedding`` that they have to give up.

    That are those over ``limit`` in hand when they came, and those that waited longer than ``max_wait_s``.
    """

    def __init__(self, threads: int, limit: int, max_wait_s: float = 0.05) -> None:
        self.threads = threads
        self.shed = 0
        """Calls that were told to give up."""
        self.broken = 0
        """Calls that raised into the thread."""
        self._longest_queue = max(1, limit - threads)
        self._max_wait_s = max_wait_s
        self._here = threading.local()
        self._calls: deque[_Call] = deque()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One for each call that was queued; False ends a thread."""
        self._excess: SimpleQueue[_Call | None] = SimpleQueue()
        self._workers = [_started(f"route-{number}", self._work) for number in range(threads)]
        self._shedders = [_started(f"shed-{number}", self._give_up) for number in range(_SHEDDING_THREADS)]

    @property
    def shedding(self) -> bool:
        """Whether the calling thread's call has to give up."""
        return getattr(self._here, "shedding", False)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return len(self._calls)

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call in a working thread, or at once in a shedding one when too many wait.

        What comes back only tells of the end: results and errors are the call's own affair, as they are gRPC's.
        """
        handed = _Call(partial(call, **kwargs) if kwargs else call, args)
        calls = self._calls
        if calls:
            if len(calls) >= self._longest_queue:
                self._shed(handed)
                return cast("Future[Any]", handed)
            self._shed_overdue(handed.came_s)
        calls.append(handed)
        self._turns.put(True)
        return cast("Future[Any]", handed)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End both kinds of threads after the calls that wait, or before them."""
        if cancel_futures:
            self._calls.clear()
        for _ in self._workers:
            self._turns.put(False)
        for _ in self._shedders:
            self._excess.put(None)
        for thread in (*self._workers, *self._shedders):
            if wait:
                thread.join()

    def _shed(self, call: _Call) -> None:
        self.shed += 1
        self._excess.put(call)

    def _shed_overdue(self, now_s: float) -> None:
        """At most two a call that comes: the queue shrinks, and no call pays for all of it."""
        for _ in range(2):
            try:
                call = self._calls.popleft()
            except IndexError:
                return
            if now_s - call.came_s <= self._max_wait_s:
                self._calls.appendleft(call)
                return
            self._shed(call)

    def _work(self) -> None:
        calls = self._calls
        while self._turns.get():
            try:
                call = calls.pop() if len(calls) > _IN_ORDER else calls.popleft()
            except IndexError:
                continue  # its call was shed
            self._run(call)
            # The call must not live on while the thread waits for the next.
            del call

    def _give_up(self) -> None:
        self._here.shedding = True
        while (call := self._excess.get()) is not None:
            self._run(call)
            del call

    def _run(self, call: _Call) -> None:
        try:
            call()
        except Exception:
            # gRPC answers what a handler raises; what comes here must not cost the thread.
            self.broken += 1
            _log.exception("call_broken", broken=self.broken)


def _started(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
