"""Promises of the periodic loop."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from dualmap.runtime.clock import SystemClock
from dualmap.runtime.periodic import Periodic, PeriodicMetrics, Schedule
from tests.fake_clock import FakeClock


async def test_it_turns_every_period_and_stops() -> None:
    """At once, then at each period."""
    clock, stop, turns = FakeClock(), asyncio.Event(), []

    async def turn() -> None:
        turns.append(clock.now_s())

    loop = Periodic("x", turn, Schedule(0.25), PeriodicMetrics(CollectorRegistry()), clock)
    task = asyncio.create_task(loop.run(stop))
    await clock.advance(1.0)
    stop.set()
    await asyncio.wait_for(task, 5)

    assert turns == [100.0, 100.25, 100.5, 100.75, 101.0]


async def test_a_failure_is_counted_and_survived() -> None:
    """One bad turn never ends a loop."""
    clock, stop, registry = FakeClock(), asyncio.Event(), CollectorRegistry()

    async def turn() -> None:
        raise ValueError("broken")

    loop = Periodic("x", turn, Schedule(1.0), PeriodicMetrics(registry), clock)
    task = asyncio.create_task(loop.run(stop))
    await clock.advance(2.0)
    stop.set()
    await asyncio.wait_for(task, 5)

    assert loop.failures == 3
    assert registry.get_sample_value("dualmap_loop_failures_total", {"loop": "x"}) == 3
    assert registry.get_sample_value("dualmap_loop_turns_total", {"loop": "x"}) == 3


async def test_lateness_is_measured_and_missed_turns_are_skipped() -> None:
    """A process that hung for 10 s does not turn 40 times to make up for it."""
    clock, stop, seen = FakeClock(), asyncio.Event(), []

    async def turn() -> None:
        seen.append((clock.now_s(), loop.lateness_s))

    loop = Periodic("x", turn, Schedule(0.25), PeriodicMetrics(CollectorRegistry()), clock)
    task = asyncio.create_task(loop.run(stop))
    await clock.settle()
    clock.jump(10.25)
    await clock.advance(0.25)
    stop.set()
    await asyncio.wait_for(task, 5)

    assert seen == [(100.0, 0.0), (110.25, 10.0), (110.5, 0.0)]


async def test_a_hanging_turn_is_cancelled_at_stop() -> None:
    """After its grace."""
    stop, began, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def turn() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    schedule = Schedule(0.25, stop_grace_s=0.01)
    loop = Periodic("x", turn, schedule, PeriodicMetrics(CollectorRegistry()))
    task = asyncio.create_task(loop.run(stop))
    await began.wait()
    stop.set()
    await asyncio.wait_for(task, 5)

    assert cancelled.is_set()
    assert loop.failures == 0


async def test_cancelling_the_loop_ends_its_turn() -> None:
    """No turn outlives its loop."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def turn() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop = Periodic("x", turn, Schedule(0.25), PeriodicMetrics(CollectorRegistry()))
    task = asyncio.create_task(loop.run(asyncio.Event()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert ended.is_set()


@pytest.mark.parametrize(("period_s", "jitter"), [(0.0, 0.0), (-1.0, 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_an_impossible_schedule_is_refused(period_s: float, jitter: float) -> None:
    """At construction."""
    with pytest.raises(ValueError, match="schedule"):
        Schedule(period_s, jitter)


async def test_the_system_clock_ends_a_wait_with_the_event() -> None:
    """A stop is not delayed by a long period."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)

    assert await asyncio.wait_for(SystemClock().wait(event, 60), 5)
    assert not await SystemClock().wait(asyncio.Event(), 0.001)
