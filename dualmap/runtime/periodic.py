"""A coroutine run every period: failures are counted and survived, lateness is measured, a stop is prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from dualmap.runtime.clock import Clock, SystemClock
from dualmap.runtime.logs import get_log

_log = get_log("periodic")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every ``period_s``, each turn moved by up to ``jitter`` of the period either way."""

    period_s: float
    jitter: float = 0.0
    stop_grace_s: float = 1.0

    def __post_init__(self) -> None:
        if self.period_s <= 0 or not 0 <= self.jitter < 1 or self.stop_grace_s < 0:
            raise ValueError(f"no such schedule: {self}")


class PeriodicMetrics:
    """Turns, failures, lateness of every loop of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.turns = Counter("dualmap_loop_turns", "Turns of a loop.", ["loop"], registry=registry)
        self.failures = Counter("dualmap_loop_failures", "Turns that raised.", ["loop"], registry=registry)
        self.lateness = Histogram(
            "dualmap_loop_lateness_seconds",
            "How long after its due time a turn began.",
            ["loop"],
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0),
            registry=registry,
        )


class Periodic:
    """One loop. ``lateness_s`` is how late the present turn began: lease judges ask for it."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], Awaitable[None]],
        schedule: Schedule,
        metrics: PeriodicMetrics,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.lateness_s = 0.0
        self.failures = 0
        self._turn = turn
        self._schedule = schedule
        self._clock = clock or SystemClock()
        self._turns_total = metrics.turns.labels(loop=name)
        self._failures_total = metrics.failures.labels(loop=name)
        self._lateness = metrics.lateness.labels(loop=name)

    async def run(self, stop: asyncio.Event) -> None:
        """Turn at once, then every period until ``stop``; turns missed are skipped, not made up for."""
        due_s = self._clock.now_s()
        while not await self._clock.wait(stop, due_s - self._clock.now_s()):
            began_s = self._clock.now_s()
            self.lateness_s = max(0.0, began_s - due_s)
            self._lateness.observe(self.lateness_s)
            await self._run_turn(stop)
            period_s, now_s = self._period_s(), self._clock.now_s()
            due_s = due_s + period_s if due_s + period_s > now_s else now_s + period_s

    def _period_s(self) -> float:
        return self._schedule.period_s * (1 + self._schedule.jitter * random.uniform(-1, 1))

    async def _run_turn(self, stop: asyncio.Event) -> None:
        turn = asyncio.ensure_future(self._turn())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({turn, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                await asyncio.wait({turn}, timeout=self._schedule.stop_grace_s)
        finally:
            stopped.cancel()
            turn.cancel()
            await asyncio.wait({turn, stopped})
        self._turns_total.inc()
        error = None if turn.cancelled() else turn.exception()
        if error is not None:
            self._count(error)

    def _count(self, error: BaseException) -> None:
        if not isinstance(error, Exception):
            raise error
        self.failures += 1
        self._failures_total.inc()
        _log.error("loop_turn_failed", loop=self.name, error=type(error).__name__, exc_info=error)
