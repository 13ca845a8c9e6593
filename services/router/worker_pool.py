"""Threads for calls: few that work, and two beside them that answer at once when too many calls wait.

Shedding needs its own threads: a call that waits behind those it should be shed for is not shed but delayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_SHEDDING_THREADS = 2


class WorkerPool(ThreadPoolExecutor):
    """A pool whose calls learn from ``shedding`` that ``limit`` were in hand when they came."""

    def __init__(self, threads: int, limit: int) -> None:
        super().__init__(threads, thread_name_prefix="route")
        self.threads = threads
        self.shed = 0
        """Calls that were told to give up."""
        self._longest_queue = max(1, limit - threads)
        self._here = threading.local()
        self._shedders = ThreadPoolExecutor(
            _SHEDDING_THREADS, thread_name_prefix="shed", initializer=self._mark_shedding
        )

    @property
    def shedding(self) -> bool:
        """Whether the calling thread's call came over the limit."""
        return getattr(self._here, "shedding", False)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return self._work_queue.qsize()

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call in a working thread, or at once in a shedding one when too many wait."""
        if self._work_queue.qsize() >= self._longest_queue:
            self.shed += 1
            return self._shedders.submit(call, *args, **kwargs)
        return super().submit(call, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop both kinds of threads."""
        self._shedders.shutdown(wait, cancel_futures=cancel_futures)
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _mark_shedding(self) -> None:
        self._here.shedding = True
