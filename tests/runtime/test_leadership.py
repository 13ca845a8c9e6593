"""Promises of active/standby leadership."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from dualmap.runtime.leadership import LeaderCallbacks, Leadership, LeaseTerms
from tests.fake_clock import FakeClock


class _Leases:
    """A lease store in memory, on the test's clock; can be made to fail or to hang."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.counter = 0
        self.held: tuple[str, int, float] | None = None
        self.failing = False
        self.hanging: asyncio.Event | None = None

    async def acquire(self, name: str, owner: str, ttl_ms: int) -> int | None:
        await self._answer()
        if self.held is not None and self.held[2] > self.clock.now_s():
            return None
        self.counter += 1
        self.held = (owner, self.counter, self.clock.now_s() + ttl_ms / 1000)
        return self.counter

    async def renew(self, name: str, owner: str, epoch: int, ttl_ms: int) -> bool:
        await self._answer()
        if self.held is None or self.held[:2] != (owner, epoch) or self.held[2] <= self.clock.now_s():
            return False
        self.held = (owner, epoch, self.clock.now_s() + ttl_ms / 1000)
        return True

    async def release(self, name: str, owner: str, epoch: int) -> None:
        await self._answer()
        if self.held is not None and self.held[:2] == (owner, epoch):
            self.held = None

    async def _answer(self) -> None:
        if self.failing:
            raise ConnectionError("no answer")
        if self.hanging is not None:
            await self.hanging.wait()


class _Candidate:
    """One process that wants to lead, with what happened to it."""

    def __init__(self, leases: _Leases, owner: str, clock: FakeClock) -> None:
        self.events: list[str] = []
        self.stop = asyncio.Event()
        self.broken = False
        self.leadership = Leadership(
            leases, LeaseTerms("ring", owner), LeaderCallbacks(self._gained, self._lost), clock
        )
        self.task = asyncio.create_task(self.leadership.run(self.stop))

    async def _gained(self, epoch: int) -> None:
        self.events.append(f"gained {epoch}")
        if self.broken:
            raise ValueError("cannot start")

    async def _lost(self) -> None:
        self.events.append("lost")

    async def end(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, 10)


async def test_one_leads_and_the_other_takes_over_when_it_stops() -> None:
    """A clean stop hands over at once, with a higher fencing epoch."""
    clock = FakeClock()
    leases = _Leases(clock)
    first = _Candidate(leases, "a", clock)
    await clock.settle()
    second = _Candidate(leases, "b", clock)
    await clock.advance(10.0)

    assert (first.leadership.epoch, second.leadership.epoch) == (1, None)

    await first.end()
    await clock.advance(0.7)

    assert first.events == ["gained 1", "lost"]
    assert second.leadership.epoch == 2
    await second.end()


async def test_the_leader_steps_down_before_its_lease_can_end() -> None:
    """The store gone: it stops leading by its own clock, and survives."""
    clock = FakeClock()
    leases = _Leases(clock)
    leader = _Candidate(leases, "a", clock)
    await clock.advance(0.1)
    leases.failing = True
    await clock.advance(2.3)

    assert leader.leadership.epoch == 1

    await clock.advance(0.15)

    assert leases.held is not None
    assert leases.held[2] > clock.now_s()
    assert not leader.leadership.is_leader
    assert leader.events == ["gained 1", "lost"]
    assert leader.leadership.store_failures > 0

    leases.failing = False
    await clock.advance(2.0)

    assert leader.leadership.epoch == 2
    await leader.end()


async def test_a_store_away_is_logged_once_and_counted_each_time() -> None:
    """Two lines for an outage of any length: when it began and when it ended."""
    clock = FakeClock()
    leases = _Leases(clock)
    counted: list[int] = []
    leases.failing = True
    stop = asyncio.Event()
    callbacks = LeaderCallbacks(_nothing_gained, _nothing_lost, lambda: counted.append(1))
    leadership = Leadership(leases, LeaseTerms("ring", "a"), callbacks, clock)
    with capture_logs() as logs:
        task = asyncio.create_task(leadership.run(stop))
        await clock.advance(10.0)
        leases.failing = False
        await clock.advance(1.0)
        stop.set()
        await asyncio.wait_for(task, 10)

    events = [line["event"] for line in logs]
    assert events.count("lease_store_failed") == 1
    assert events.count("lease_store_back") == 1
    assert len(counted) == leadership.store_failures > 10


async def _nothing_gained(_epoch: int) -> None: ...


async def _nothing_lost() -> None: ...


async def test_a_leader_that_hung_does_not_act() -> None:
    """Its loop had no chance to step down: asking for the epoch is enough."""
    clock = FakeClock()
    leases = _Leases(clock)
    leader = _Candidate(leases, "a", clock)
    await clock.advance(0.1)

    clock.jump(2.6)

    assert leader.leadership.epoch is None
    await clock.advance(0.0)
    await leader.end()


async def test_a_lease_taken_by_another_is_given_up_at_once() -> None:
    """Fencing epochs decide, not memories."""
    clock = FakeClock()
    leases = _Leases(clock)
    leader = _Candidate(leases, "a", clock)
    await clock.advance(0.1)
    leases.held = ("b", 7, clock.now_s() + 60)

    await clock.advance(0.7)

    assert leader.events == ["gained 1", "lost"]
    await leader.end()


async def test_a_store_that_hangs_does_not_keep_the_lead() -> None:
    """A renewal without an answer is bounded; epoch says None in time whatever the loop does."""
    clock = FakeClock()
    leases = _Leases(clock)
    leader = _Candidate(leases, "a", clock)
    await clock.advance(0.1)
    leases.hanging = asyncio.Event()
    await clock.advance(2.6)

    assert not leader.leadership.is_leader
    leases.hanging.set()
    leases.hanging = None
    await leader.end()


async def test_a_leader_that_cannot_start_gives_the_lease_back() -> None:
    """So that another may."""
    clock = FakeClock()
    leases = _Leases(clock)
    broken = _Candidate(leases, "a", clock)
    broken.broken = True
    await clock.advance(0.1)

    assert leases.held is None
    assert broken.events == ["gained 1", "lost"]
    assert not broken.leadership.is_leader
    await broken.end()


def test_terms_that_cannot_be_kept_are_refused() -> None:
    """A renewal must fit before the step-down."""
    with pytest.raises(ValueError, match="renew_ms"):
        LeaseTerms("x", "y", ttl_ms=1000, renew_ms=600, margin_ms=500)
