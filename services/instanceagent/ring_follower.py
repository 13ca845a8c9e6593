"""Follows WatchRing over the ring managers in turn; the last ring stays while none answers. Epochs never fall here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import RingSnapshot
from dualmap.rpc.ring_calls import RingCallError
from dualmap.runtime.clock import Clock
from dualmap.runtime.health import Component
from dualmap.runtime.logs import get_log
from services.instanceagent.ring_managers import RingManagers

SILENCE_S = 12.0
"""A watch says something at least each 10 s."""

AGAIN_S = 0.25

_log = get_log("ring_follower")


class RingFollower:
    """Holds the newest ring; ``adopted`` is called with each newer one."""

    def __init__(
        self,
        managers: RingManagers,
        adopted: Callable[[RingSnapshot], None],
        component: Component,
        clock: Clock,
    ) -> None:
        self.ring: RingSnapshot | None = None
        self._managers = managers
        self._adopted = adopted
        self._component = component
        self._clock = clock
        self._behind = asyncio.Event()
        self._suspected_epoch = 0

    @property
    def epoch(self) -> int:
        """Epoch of the ring held; 0: none yet."""
        return self.ring.epoch if self.ring is not None else 0

    def adopt(self, ring: RingSnapshot) -> None:
        """Take a ring over, if it is newer than the one held."""
        if ring.epoch > self.epoch:
            self.ring = ring
            self._adopted(ring)
        self._component.ok()

    def heard_of(self, epoch: int) -> None:
        """A ring manager spoke of this epoch. Behind it at two such words running: the watch is stuck, open another."""
        if epoch <= self.epoch:
            self._suspected_epoch = 0
        elif self._suspected_epoch:
            self._behind.set()
        else:
            self._suspected_epoch = epoch

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop``."""
        while not stop.is_set():
            self._behind.clear()
            waits = [asyncio.ensure_future(wait) for wait in (self._watch(), stop.wait(), self._behind.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                ends = await asyncio.gather(*waits, return_exceptions=True)
            if isinstance(ends[0], Exception):
                raise ends[0]
            await self._clock.wait(stop, AGAIN_S)

    async def _watch(self) -> None:
        manager = self._managers.preferred
        try:
            async for ring in manager.watch(self.epoch, SILENCE_S):
                self.adopt(ring)
        except (RingCallError, InvalidRequest) as error:
            _log.debug("ring_watch_ended", problem=str(error))
            self._component.fail("no ring manager is followed; the last ring is kept")
            self._managers.advance(manager)
