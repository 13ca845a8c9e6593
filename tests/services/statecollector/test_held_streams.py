"""Polls share one stream an instance: opened once, again after a break, not at all where the agent knows none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dualmap.rpc.convert_state import StateQuery
from dualmap.rpc.state_calls import StateCallError, StateCalls
from tests.services.statecollector.fake_agent import FakeAgent, FakeRank

WHOLE = StateQuery("a/0", full=True)
TIMEOUT_S = 2.0


@asynccontextmanager
async def _agent(*, streams: bool = True) -> AsyncIterator[tuple[FakeAgent, FakeRank, StateCalls]]:
    rank = FakeRank("a/0")
    rank.store(1, 2)
    agent = FakeAgent(rank, streams=streams)
    await agent.start()
    async with StateCalls(held=True) as calls:
        yield agent, rank, calls
    await agent.stop()


async def test_polls_of_an_instance_share_one_stream() -> None:
    """A hundred polls are one call."""
    async with _agent() as (agent, rank, calls):
        updates = [await calls.get_state(agent.address, WHOLE, TIMEOUT_S) for _ in range(100)]

    assert agent.opened_streams == 1
    assert len(rank.polls) == 100
    assert updates[-1].kv_digest == rank.index.digest


async def test_an_agent_of_an_older_version_is_polled_by_unary_calls() -> None:
    """It is asked for a stream once, and never again."""
    async with _agent(streams=False) as (agent, rank, calls):
        updates = [await calls.get_state(agent.address, WHOLE, TIMEOUT_S) for _ in range(3)]

    assert updates[-1].version == rank.version
    assert len(rank.polls) == 3


async def test_a_late_answer_is_not_taken_for_the_next_polls() -> None:
    """A poll that ran out of time ends its stream; the next one has its own."""
    async with _agent() as (agent, rank, calls):
        await calls.get_state(agent.address, WHOLE, TIMEOUT_S)
        rank.delay_s = 0.3
        with pytest.raises(StateCallError) as late:
            await calls.get_state(agent.address, WHOLE, 0.05)
        rank.delay_s = 0.0
        rank.store(3)

        update = await calls.get_state(agent.address, WHOLE, TIMEOUT_S)

    assert late.value.kind == "DEADLINE_EXCEEDED"
    assert update.version == rank.version
    assert agent.opened_streams == 2


async def test_a_stream_broken_between_polls_costs_at_most_one_poll() -> None:
    """The agent ends and is back at its address: the break is found by the next poll at the latest."""
    async with _agent() as (agent, rank, calls):
        await calls.get_state(agent.address, WHOLE, TIMEOUT_S)
        await agent.stop()
        await agent.start(agent.address)
        # The broken stream is known as soon as its end has been read.
        answers: list[int] = []
        failures = 0
        while not answers and failures < 3:
            try:
                answers.append((await calls.get_state(agent.address, WHOLE, TIMEOUT_S)).version)
            except StateCallError:
                failures += 1

    assert failures <= 1
    assert answers == [rank.version]
