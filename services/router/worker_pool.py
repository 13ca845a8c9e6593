"""Threads for calls: few that work, and two beside them that answer at once when too many calls wait.

Shedding needs its own threads: a call that waits behind those it should be shed for is not shed but delayed.
It is leaner than the library's pool, whose futures, locks and thread counting cost as much as a quarter of a route.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from dualmap.runtime.logs import get_log

_SHEDDING_THREADS = 2

_log = get_log("router")


class _Call:
    """A call handed over, and as much of a future as gRPC asks for: who wants to hear of its end."""

    __slots__ = ("_args", "_ended", "_listeners", "_run")

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._run = run
        self._args = args
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
    """A pool whose calls learn from ``shedding`` that ``limit`` were in hand when they came."""

    def __init__(self, threads: int, limit: int) -> None:
        self.threads = threads
        self.shed = 0
        """Calls that were told to give up."""
        self.broken = 0
        """Calls that raised into the thread."""
        self._longest_queue = max(1, limit - threads)
        self._here = threading.local()
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._excess: SimpleQueue[_Call | None] = SimpleQueue()
        self._workers = [self._start(f"route-{number}", self._calls, False) for number in range(threads)]
        self._shedders = [self._start(f"shed-{number}", self._excess, True) for number in range(_SHEDDING_THREADS)]

    @property
    def shedding(self) -> bool:
        """Whether the calling thread's call came over the limit."""
        return getattr(self._here, "shedding", False)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._calls.qsize()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call in a working thread, or at once in a shedding one when too many wait.

        What comes back only tells of the end: results and errors are the call's own affair, as they are gRPC's.
        """
        handed = _Call(partial(call, **kwargs) if kwargs else call, args)
        if self._calls.qsize() >= self._longest_queue:
            self.shed += 1
            self._excess.put(handed)
        else:
            self._calls.put(handed)
        return cast("Future[Any]", handed)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End both kinds of threads after the calls that wait, or before them."""
        for calls, threads in ((self._calls, self._workers), (self._excess, self._shedders)):
            while cancel_futures and not calls.empty():
                calls.get()
            for _ in threads:
                calls.put(None)
        for thread in (*self._workers, *self._shedders):
            if wait:
                thread.join()

    def _start(self, name: str, calls: SimpleQueue[_Call | None], shedding: bool) -> threading.Thread:
        thread = threading.Thread(target=self._work, args=(calls, shedding), name=name, daemon=True)
        thread.start()
        return thread

    def _work(self, calls: SimpleQueue[_Call | None], shedding: bool) -> None:
        self._here.shedding = shedding
        while (call := calls.get()) is not None:
            try:
                call()
            except Exception:
                # gRPC answers what a handler raises; what comes here must not cost the thread.
                self.broken += 1
                _log.exception("call_broken", broken=self.broken)
            # The call must not live on while the thread waits for the next.
            del call
