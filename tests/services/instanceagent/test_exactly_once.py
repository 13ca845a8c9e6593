"""Each request ends exactly once or its client is told UNAVAILABLE; no client ever sees two first tokens.

Requests are moved to and fro all the while, their streams cut at every step, their agents killed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from dualmap.rpc.agent_calls import AcceptCall, AgentCalls, PeerLostError
from dualmap.rpc.request_events import AcceptOutcome, MoveOutcome
from dualmap.rpc.submission import Handover, Submission
from dualmap.v1 import agent_pb2
from tests.services.instanceagent.cluster import Cluster, Following, cluster, migrate, submission, submit
from tests.services.instanceagent.processes import AgentProcess, agent_processes

REQUESTS = 2_000
AT_ONCE = 160
STEPS = 7
"""A stream is cut before ACCEPTED, or after any of ACCEPTED, QUEUED, STARTED, FIRST_TOKEN, TOKENS: 0 to 5; 6: not."""

END = {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


class CutCall(AcceptCall):
    """An Accept stream that breaks after so many messages, whatever the target sent beyond."""

    def __init__(self, whole: AcceptCall, messages: int) -> None:
        self._whole = whole
        self._left = messages

    async def next(self, silence_s: float) -> AcceptOutcome:
        if not self._left:
            self._whole.cancel()
            raise PeerLostError("cut here")
        self._left -= 1
        return await self._whole.next(silence_s)

    def cancel(self) -> None:
        self._whole.cancel()


class CuttingCalls(AgentCalls):
    """Cuts the streams of one agent at each step in turn."""

    def __init__(self, whole: AgentCalls, chance: random.Random) -> None:
        self._whole = whole
        self._chance = chance
        self.cuts: Counter[int] = Counter()

    def accept(self, address: str, submission: Submission, handover: Handover) -> AcceptCall:
        whole = self._whole.accept(address, submission, handover)
        step = self._chance.randrange(STEPS)
        self.cuts[step] += 1
        return CutCall(whole, step) if step < STEPS - 1 else whole


def _first_tokens(following: Following) -> int:
    return following.kinds.count("first_token")


async def _moves(built: Cluster, source: str, target: str, stop: asyncio.Event) -> Counter[str]:
    """Move half of what waits, over and over."""
    outcomes: Counter[str] = Counter()
    stub = built.stub(source)
    while not stop.is_set():
        waiting = [request.request_id for request in built.instance(source).ordered()[::2]][:24]
        outcomes.update(await migrate(stub, f"{source}/0", f"{target}/0", *waiting))
        await asyncio.sleep(0.02)
    return outcomes


async def _crowd(stubs: Sequence[Any], chance: random.Random) -> list[Following]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Following:
        async with gate:
            request = submission(f"r{number}", seed=number % 97, count=256 + 128 * (number % 4))
            following = submit(chance.choice(stubs), request)
            await following.end(60)
            return following

    return list(await asyncio.gather(*(one(number) for number in range(REQUESTS))))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_streams_cut_at_every_step_lose_and_double_nothing(names: str) -> None:
    """2,000 requests moved both ways, and on; six of seven hand-overs break, at each step as often."""
    chance = random.Random(5)
    async with cluster(*names, agent={"feed_tokens": 512, "suspect_after_ms": 60_000}) as built:
        calls = []
        for name in names:
            handovers = built.agents[name].handovers
            calls.append(CuttingCalls(handovers._calls, chance))
            handovers._calls = calls[-1]
        stop = asyncio.Event()
        movers = [
            asyncio.ensure_future(_moves(built, source, target, stop))
            for source in names
            for target in names
            if source != target
        ]
        clients = await _crowd([built.stub(name) for name in names], chance)
        stop.set()
        outcomes: Counter[str] = sum(await asyncio.gather(*movers), Counter())

        assert {client.code for client in clients} <= END
        for client in clients:
            assert _first_tokens(client) <= 1
            if client.code is grpc.StatusCode.OK:
                assert _first_tokens(client) == client.kinds.count("done") == 1
                assert client.kinds[-1] == "done"
            else:
                # Told because it had begun: what had not was served by its origin.
                assert _first_tokens(client) == 1
                assert "done" not in client.kinds
        ended = Counter(client.code for client in clients)
        assert ended[grpc.StatusCode.OK] > REQUESTS * 0.8
        assert outcomes["MOVED"] > 50, outcomes
        cuts: Counter[int] = sum((call.cuts for call in calls), Counter())
        assert min(cuts[step] for step in range(STEPS)) > 10, cuts
        assert all(built.instance(name).empty for name in names)


class _Client:
    """One request over all its attempts: a new one after UNAVAILABLE, unless its first token is out."""

    def __init__(self, number: int) -> None:
        self.request_id = f"k{number}"
        self.seed = number % 97
        self.streams: list[Following] = []

    async def run(self, agents: Sequence[AgentProcess], chance: random.Random) -> None:
        for attempt in range(1, 13):
            agent = chance.choice([a for a in agents if a.alive])
            following = submit(agent.stub, submission(self.request_id, seed=self.seed, count=384, attempt=attempt))
            self.streams.append(following)
            await following.end(60)
            if following.code is grpc.StatusCode.OK or self.first_tokens:
                return
            await asyncio.sleep(0.05)

    @property
    def first_tokens(self) -> int:
        return sum(map(_first_tokens, self.streams))


async def _kill_in_turn(agents: Sequence[AgentProcess], over: asyncio.Event) -> int:
    """One after the other, while the rest serves; each comes back before the next goes. Gives how many went."""
    kills = 0
    while True:
        await asyncio.sleep(0.8)
        if over.is_set():
            return kills
        agent = agents[kills % len(agents)]
        await agent.kill()
        kills += 1
        await agent.start()


async def _move_between(agents: Sequence[AgentProcess], stop: asyncio.Event) -> int:
    """Move what waits from each to the next; an agent that is not there is left out."""
    moved = 0
    while not stop.is_set():
        for source, target in zip(agents, [*agents[1:], agents[0]], strict=True):
            if not source.alive:
                continue
            try:
                listed = await source.stub.ListQueue(
                    agent_pb2.ListQueueRequest(instance_id=source.instance_id), timeout=2
                )
                items = [
                    agent_pb2.MigrateItem(
                        request_id=item.request_id, attempt=item.attempt, target_instance_id=target.instance_id
                    )
                    for item in listed.items[::2]
                ]
                order = agent_pb2.MigrateRequest(
                    instance_id=source.instance_id, list_token=listed.list_token, items=items
                )
                answer = await source.stub.Migrate(order, timeout=5)
            except grpc.aio.AioRpcError:
                # It was killed meanwhile.
                continue
            moved += sum(result.outcome == MoveOutcome.MOVED for result in answer.results)
        await asyncio.sleep(0.03)
    return moved


@pytest.mark.timeout(240)
@pytest.mark.slow
async def test_agents_killed_as_target_and_as_origin_lose_and_double_nothing() -> None:
    """2,000 requests, three processes, SIGKILL to one after the other: each id ends once, no two first tokens."""
    chance = random.Random(6)
    environment = {
        "AGENT__FEED_TOKENS": "512",
        "AGENT__SUSPECT_AFTER_MS": "60000",
        "ENGINE__PREFILL_MS": "10",
        "ENGINE__PREFILL_US_PER_TOKEN": "10",
        "ENGINE__DECODE_TOKENS_PER_S": "1000",
        "ENGINE__OUTPUT_TOKENS": "4",
    }
    async with agent_processes("a", "b", "c", **environment) as named:
        agents = list(named.values())
        stop = asyncio.Event()
        mover = asyncio.ensure_future(_move_between(agents, stop))
        killer = asyncio.ensure_future(_kill_in_turn(agents, stop))
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> _Client:
            client = _Client(number)
            async with gate:
                await client.run(agents, chance)
            return client

        clients = await asyncio.gather(*(one(number) for number in range(REQUESTS)))
        stop.set()
        moved = await mover
        kills = await killer

        assert all(client.first_tokens <= 1 for client in clients)
        ends = Counter(client.streams[-1].code for client in clients)
        assert set(ends) <= END, ends
        assert ends[grpc.StatusCode.OK] > REQUESTS * 0.9, ends
        for client in clients:
            done = sum(stream.kinds.count("done") for stream in client.streams)
            # A connection may also break between the last event and the status: it has ended all the same.
            assert done == client.first_tokens if client.streams[-1].code is grpc.StatusCode.OK else done <= 1
            assert done or client.streams[-1].code is grpc.StatusCode.UNAVAILABLE
        assert kills >= 2
        assert moved > 50
        assert any(len(client.streams) > 1 for client in clients)
