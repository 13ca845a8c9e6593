"""The wall-clock engine: the model's events, in time, through pauses and cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dualmap.core.engine_model import Done, EngineEvent, EngineOptions, FirstToken, Tokens
from dualmap.core.state import PrefillCost
from dualmap.engines.simulated import PromptBlocks, SimulatedEngine
from dualmap.runtime.clock import SystemClock

OPTIONS = EngineOptions(cost=PrefillCost(0.005, 0.000_01), decode_tokens_per_s=1_000.0)
PROMPT = PromptBlocks((1, 2), 128, 300)


@asynccontextmanager
async def _engine() -> AsyncIterator[tuple[SimulatedEngine, list[EngineEvent]]]:
    heard: list[EngineEvent] = []
    engine = SimulatedEngine(OPTIONS, heard.extend, SystemClock())
    stop = asyncio.Event()
    task = asyncio.create_task(engine.run(stop))
    try:
        yield engine, heard
    finally:
        stop.set()
        await asyncio.wait_for(task, 5)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_job_runs_to_its_end_in_about_its_time() -> None:
    """First token not before the prefill's cost; as many tokens as asked for."""
    async with _engine() as (engine, heard):
        began_s = engine.now_s
        engine.stage("1", PROMPT, 5)
        await _until(lambda: any(isinstance(event, Done) for event in heard))
        assert engine.now_s - began_s >= 0.008
        assert sum(event.count for event in heard if isinstance(event, Tokens)) == 4
        first = next(event for event in heard if isinstance(event, FirstToken))
        assert first.hit_tokens == 0
        assert abs(first.prefill_s - 0.008) < 0.001


async def test_a_paused_engine_takes_jobs_and_gives_nothing_until_resumed() -> None:
    """Wedged: accepts, never answers; goes on by resume, or when the pause's seconds are over."""
    async with _engine() as (engine, heard):
        engine.pause()
        engine.stage("1", PROMPT, 1)
        await asyncio.sleep(0.05)
        assert not any(isinstance(event, FirstToken) for event in heard)
        engine.resume()
        await _until(lambda: any(isinstance(event, Done) for event in heard))
        heard.clear()
        engine.pause(0.05)
        began_s = engine.now_s
        engine.stage("2", PROMPT, 1)
        await _until(lambda: any(isinstance(event, Done) for event in heard))
        assert engine.now_s - began_s >= 0.05


async def test_nothing_is_heard_of_a_cancelled_job() -> None:
    """Cancelled while staged behind another: only the other's events follow."""
    async with _engine() as (engine, heard):
        engine.stage("1", PROMPT, 1)
        engine.stage("2", PROMPT, 1)
        assert engine.cancel("2")
        assert not engine.cancel("none")
        await _until(lambda: any(isinstance(event, Done) for event in heard))
        assert {event.request_id for event in heard if isinstance(event, FirstToken | Done)} == {"1"}
