"""Active/standby on a lease with a fencing epoch: at most one leader acts, judged by its own monotonic clock.

A leader steps down before its lease can end for others, whether or not the lease store answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dualmap.runtime.clock import Clock, SystemClock
from dualmap.runtime.logs import get_log

T = TypeVar("T")

_log = get_log("leadership")


class LeaseStore(Protocol):
    """Leases that end by themselves; every call may raise when the store does not answer."""

    async def acquire(self, name: str, owner: str, ttl_ms: int) -> int | None:
        """Take a free lease: its fencing epoch, higher than any before; None while another holds it."""
        ...

    async def renew(self, name: str, owner: str, epoch: int, ttl_ms: int) -> bool:
        """Prolong a lease; False when it is no longer this owner's at this epoch."""
        ...

    async def release(self, name: str, owner: str, epoch: int) -> None:
        """Give a lease back at once; nothing when it is no longer this owner's."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Which lease, for whom, how long (milliseconds).

    ``margin_ms`` before the end the leader steps down: it covers the difference of two clocks' rates and a call
    already on its way. Four renewals fit into the default lease, so one lost answer costs nothing.
    """

    name: str
    owner: str
    ttl_ms: int = 3000
    renew_ms: int = 600
    margin_ms: int = 500

    def __post_init__(self) -> None:
        if not 0 < self.renew_ms < self.ttl_ms - self.margin_ms or self.margin_ms < 0:
            raise ValueError(f"renew_ms must lie between 0 and ttl_ms - margin_ms: {self}")


@dataclass(frozen=True, slots=True)
class LeaderCallbacks:
    """What to do on gaining (with the fencing epoch) and on losing the lead; both short, as renewals wait for them.

    ``store_failed`` is told of each call that the store did not answer.
    """

    gained: Callable[[int], Awaitable[None]]
    lost: Callable[[], Awaitable[None]]
    store_failed: Callable[[], None] | None = None


class Leadership:
    """One candidate. Read `epoch` right before each act of a leader, and send it along as the fence."""

    def __init__(
        self, store: LeaseStore, terms: LeaseTerms, callbacks: LeaderCallbacks, clock: Clock | None = None
    ) -> None:
        self.store_failures = 0
        self._store_failing = False
        self.terms = terms
        self._store = store
        self._callbacks = callbacks
        self._clock = clock or SystemClock()
        self._epoch: int | None = None
        self._until_s = 0.0

    @property
    def epoch(self) -> int | None:
        """The fencing epoch while this process may act as leader, else None; also when its loop hangs."""
        return self._epoch if self._clock.now_s() < self._until_s else None

    @property
    def is_leader(self) -> bool:
        """Whether this process may act as leader now."""
        return self.epoch is not None

    async def run(self, stop: asyncio.Event) -> None:
        """Try to lead, renew, step down, until ``stop``; then give the lease back."""
        try:
            while not stop.is_set():
                await self._step()
                await self._clock.wait(stop, self._pause_s())
        finally:
            epoch = self._epoch
            await self._step_down("stopped")
            if epoch is not None:
                await self._ask("release", self._store.release(self.terms.name, self.terms.owner, epoch))

    async def _step(self) -> None:
        if self._epoch is not None and not self.is_leader:
            await self._step_down("lease ended")
        asked_s = self._clock.now_s()
        terms = self.terms
        if self._epoch is None:
            epoch = await self._ask("acquire", self._store.acquire(terms.name, terms.owner, terms.ttl_ms))
            if epoch is not None:
                await self._step_up(epoch, asked_s)
            return
        kept = await self._ask("renew", self._store.renew(terms.name, terms.owner, self._epoch, terms.ttl_ms))
        if kept:
            self._prolong(asked_s)
        elif kept is False:
            await self._step_down("lease lost")

    def _prolong(self, asked_s: float) -> None:
        # From the moment of asking: the store counts from a later one.
        self._until_s = asked_s + (self.terms.ttl_ms - self.terms.margin_ms) / 1000

    def _pause_s(self) -> float:
        pause_s = self.terms.renew_ms / 1000
        if self._epoch is None:
            return pause_s
        return max(0.0, min(pause_s, self._until_s - self._clock.now_s()))

    async def _step_up(self, epoch: int, asked_s: float) -> None:
        self._epoch = epoch
        self._prolong(asked_s)
        _log.info("leadership_gained", lease=self.terms.name, fencing_epoch=epoch)
        try:
            await self._callbacks.gained(epoch)
        except Exception as error:
            _log.exception("leadership_start_failed", lease=self.terms.name, error=type(error).__name__)
            await self._step_down("could not start leading")
            await self._ask("release", self._store.release(self.terms.name, self.terms.owner, epoch))

    async def _step_down(self, cause: str) -> None:
        if self._epoch is None:
            return
        epoch, self._epoch = self._epoch, None
        self._until_s = 0.0
        _log.warning("leadership_lost", lease=self.terms.name, fencing_epoch=epoch, cause=cause)
        try:
            await self._callbacks.lost()
        except Exception as error:
            _log.exception("leadership_end_failed", lease=self.terms.name, error=type(error).__name__)

    async def _ask(self, what: str, answer: Awaitable[T]) -> T | None:
        """The store's answer; None when there was none within a renewal's time: counted, the first of a row logged."""
        try:
            async with asyncio.timeout(self.terms.renew_ms / 1000):
                given = await answer
        except Exception as error:
            self.store_failures += 1
            if self._callbacks.store_failed is not None:
                self._callbacks.store_failed()
            if not self._store_failing:
                self._store_failing = True
                _log.warning("lease_store_failed", lease=self.terms.name, call=what, error=type(error).__name__)
            return None
        if self._store_failing:
            self._store_failing = False
            _log.info("lease_store_back", lease=self.terms.name, failures=self.store_failures)
        return given
