"""Routers in turn: the next when one fails, a wait as long as advised when all are full, within the deadline."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from time import monotonic

from dualmap.rpc.route_calls import CallFailed, Metadata, RouterCalls
from dualmap.rpc.route_values import Request, Route

_OTHER_MAY_DO = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED", "INTERNAL"})
"""Codes after which another router may answer; any other is about the request."""

_REST_S = 1.0
"""How long a router that did not answer is tried last."""

_WAIT_S = 0.1
"""Wait before the next round of routers where none gave advice."""


class Routers:
    """The routers of a pool; every call begins with the next of them, so that clients spread over all."""

    def __init__(self, addresses: Sequence[str], try_timeout_s: float, now_s: Callable[[], float] = monotonic) -> None:
        """Raises ValueError without any address."""
        if not addresses:
            raise ValueError("at least one router address is needed, as host:port")
        self._routers = [RouterCalls(address) for address in addresses]
        self._rest_until_s = [0.0] * len(self._routers)
        self._try_timeout_s = try_timeout_s
        self._now_s = now_s
        self._turn = random.randrange(len(self._routers))

    async def route(self, request: Request, deadline_s: float, metadata: Metadata = ()) -> Route:
        """Where the request goes; ``deadline_s`` is a moment of the monotonic clock.

        Raises CallFailed: at once for what no other router would answer otherwise, else when the deadline leaves no
        room for another try or for the wait that was advised.
        """
        while True:
            failures: list[CallFailed] = []
            for place in self._order():
                left_s = deadline_s - self._now_s()
                if failures and left_s <= 0:
                    break
                try:
                    return await self._try(place, request, max(0.001, left_s), metadata)
                except CallFailed as error:
                    if error.code not in _OTHER_MAY_DO:
                        raise
                    failures.append(error)
            advised = [error.retry_after_ms for error in failures if error.retry_after_ms]
            wait_s = min(advised) / 1000 if advised else _WAIT_S
            if self._now_s() + wait_s >= deadline_s:
                raise _most_telling(failures)
            await asyncio.sleep(wait_s)

    async def release(self, request_id: str, attempt: int) -> bool:
        """Give a booking back, at whichever router holds it; an unreachable one's expires by itself."""
        released = False
        for router in self._routers:
            try:
                released = await router.release(request_id, attempt, self._try_timeout_s) or released
            except CallFailed as error:
                if error.code not in _OTHER_MAY_DO:
                    raise
        return released

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(router.close() for router in self._routers))

    async def _try(self, place: int, request: Request, left_s: float, metadata: Metadata) -> Route:
        try:
            return await self._routers[place].route(request, min(self._try_timeout_s, left_s), metadata)
        except CallFailed as error:
            if not error.reason:
                # Not the router's own word: it did not answer.
                self._rest_until_s[place] = self._now_s() + _REST_S
            raise

    def _order(self) -> list[int]:
        count = len(self._routers)
        self._turn = (self._turn + 1) % count
        now_s = self._now_s()
        places = [(self._turn + step) % count for step in range(count)]
        return sorted(places, key=lambda place: self._rest_until_s[place] > now_s)


def _most_telling(failures: list[CallFailed]) -> CallFailed:
    """A refusal with a reason says more than a router that was not there."""
    return next((error for error in failures if error.reason), failures[-1])
