"""The pool's ring managers as an agent sees them: a list of addresses, one after the other until one answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from dualmap.core.errors import Unavailable
from dualmap.rpc.ring_calls import RingCallError, RingCalls
from dualmap.runtime.logs import get_log

RETRY_MS = 500

T = TypeVar("T")
_log = get_log("ring_managers")


class RingManagers:
    """Calls go to the one that answered last; a failure goes on to the next."""

    def __init__(self, calls: Sequence[RingCalls], failed: Callable[[], None]) -> None:
        self._calls = tuple(calls)
        self._failed = failed
        self._first = 0

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def preferred(self) -> RingCalls:
        """The one that answered last."""
        return self._calls[self._first]

    def advance(self, from_: RingCalls) -> None:
        """``from_`` failed: prefer the next one."""
        if self._calls[self._first] is from_:
            self._first = (self._first + 1) % len(self._calls)

    async def call(self, what: Callable[[RingCalls], Awaitable[T]]) -> T:
        """Try each once, the preferred first. Raises Unavailable when none did it, RingCallError for a refusal."""
        refusal: RingCallError | None = None
        for _ in self._calls:
            manager = self.preferred
            try:
                return await what(manager)
            except RingCallError as error:
                self._failed()
                _log.debug("ring_call_failed", problem=str(error))
                # A domain refusal of a leader is the answer; a standby's is a reason to ask the next.
                if error.problem.reason not in _TRY_NEXT:
                    refusal = error
                self.advance(manager)
        if refusal is not None:
            raise refusal
        raise Unavailable("no ring manager of the list", RETRY_MS)


_TRY_NEXT = frozenset({"", "NOT_LEADER", "UNAVAILABLE"})
"""Reasons of those that cannot answer; the empty one is gRPC's own failure."""
