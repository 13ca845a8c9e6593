"""All five programs as processes: a call by reflection, kills of the control plane, the death of an agent, a stall."""

from __future__ import annotations

import asyncio
import base64
import signal
import time
from collections import Counter
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.replay_report import Outcome
from dualmap.cli.replay_sender import DualMapSender, Pace, send_all
from dualmap.client import Address, CallFailed, Done, DualMapClient, FirstToken, Prompt, Request, Route
from dualmap.core.membership import Member
from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.synthetic import synthetic_trace
from tests.e2e.conftest import Start

pytestmark = pytest.mark.timeout(120)

SPEED = 5.0


def _route_by_reflection(address: str) -> dict[str, Any]:
    """Call Route knowing nothing but the address and the names; the answer as JSON-like values."""
    with grpc.insecure_channel(address) as channel:
        pool = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName("dualmap.v1.Router").FindMethodByName("Route")
        ask = message_factory.GetMessageClass(method.input_type)
        answer = message_factory.GetMessageClass(method.output_type)
        call: Any = channel.unary_unary("/dualmap.v1.Router/Route", lambda m: m.SerializeToString(), answer.FromString)
        token_ids = b"".join(i.to_bytes(4, "little") for i in range(1_000))
        request = json_format.ParseDict(
            {"requestId": "by-reflection", "prompt": {"tokenIds": base64.b64encode(token_ids).decode()}}, ask()
        )
        return json_format.MessageToDict(call(request, timeout=5))


async def test_a_route_call_by_reflection_names_a_pair_a_reason_a_ticket_and_the_epoch(start: Start) -> None:
    """A client that has only the address can route a prompt of token ids."""
    async with start(LocalOptions(instances=2, rebalance=False)) as cluster:
        said = await asyncio.to_thread(_route_by_reflection, cluster.router_addresses[0])

    named = {said["instance"]["instanceId"], said["backup"]["instanceId"]}
    assert named == {"agent-1/0", "agent-2/0"}
    assert said["reason"] == "REASON_LESS_LOADED"
    assert int(said["ringEpoch"]) > 0
    assert said["ticket"]["sequence"] == "1"
    assert said["ticket"]["promptTokens"] == 1_000


async def _load(cluster: LocalCluster, count: int, rate: float) -> list[Outcome]:
    requests = poisson_arrivals(synthetic_trace("skew", count, 1), rate, 1)
    async with DualMapClient(cluster.router_addresses) as client:
        pace = Pace(SPEED, 200.0, f"load-{time.time_ns():x}")
        return await send_all(requests, DualMapSender(client), pace, lambda _outcome: None)


async def test_killing_rebalancer_collector_and_ring_manager_costs_no_request(start: Start) -> None:
    """SIGKILL of each control-plane part in turn, under load: every request is served, none twice."""
    async with start(LocalOptions(instances=3, speed=SPEED)) as cluster:
        load = asyncio.create_task(_load(cluster, 150, rate=4.0))
        for name in ("rebalancer-1", "statecollector-1", "ringmanager-1"):
            await asyncio.sleep(1.0)
            cluster.services[name].send(signal.SIGKILL)
        outcomes = await load

    assert Counter(o.status for o in outcomes) == {"done": 150}
    assert all(o.first_token for o in outcomes)


async def test_killing_an_agent_loses_only_what_had_begun_there(start: Start) -> None:
    """Streams of a killed agent end UNAVAILABLE; what had no first token is served elsewhere."""
    async with start(LocalOptions(instances=3, speed=SPEED)) as cluster:
        load = asyncio.create_task(_load(cluster, 150, rate=4.0))
        await asyncio.sleep(3.0)
        cluster.services["agent-2"].send(signal.SIGKILL)
        skipped_after_s = await _seconds_until_skipped(cluster, "agent-2/0")
        outcomes = await load

    broken = [o for o in outcomes if o.status != "done"]
    assert all(o.first_token and o.error.startswith("UNAVAILABLE") for o in broken)
    assert len(broken) < 75
    # A broken poll is repeated after 100 ms; the second failure is written at once.
    assert skipped_after_s < 0.5


async def _seconds_until_skipped(cluster: LocalCluster, instance_id: str) -> float:
    """How long after now a router still named the instance, over many different keys."""
    killed_s = time.monotonic()
    last_named_s = killed_s
    async with DualMapClient(cluster.router_addresses) as client:
        number = 0
        while time.monotonic() < killed_s + 2.5:
            number += 1
            ids = range(number * 1_000, number * 1_000 + 300)
            route = await client.route(Request(f"probe-{number}", Prompt.of_tokens(ids)))
            if route.instance.instance_id == instance_id:
                last_named_s = time.monotonic()
            await client.release(route)
    return last_named_s - killed_s


def _unrouted(request_id: str, member: Member) -> Route:
    """A route without a ticket: the request goes where the test says."""
    address = Address(member.instance_id, member.grpc_address)
    return Route(request_id, 1, address, None, b"", "", 0.0, 0, 0, 0, -1.0)


async def _submit(client: DualMapClient, member: Member, number: int, tokens: int, seen: dict[int, list[str]]) -> None:
    request_id = f"stalled-{number}"
    ids = range(number << 20, (number << 20) + tokens)
    request = Request(request_id, Prompt.of_tokens(ids), max_output_tokens=2)
    try:
        async with aclosing(client.submit(_unrouted(request_id, member), request, 30.0)) as events:
            async for event in events:
                if isinstance(event, FirstToken | Done):
                    seen.setdefault(number, []).append(f"{type(event).__name__} {event.instance_id}")
    except CallFailed as error:
        seen.setdefault(number, []).append(error.code)


@pytest.mark.parametrize("rebalance", [True, False])
async def test_work_waiting_before_a_stalled_engine_is_moved_and_finishes_once(start: Start, rebalance: bool) -> None:
    """20 requests wait before a paused engine: the rebalancer moves all of them; without it none moves."""
    options = LocalOptions(instances=2, rebalance=rebalance, engine_faults=True)
    async with start(options) as cluster, DualMapClient(cluster.router_addresses) as client:
        members = {m.instance_id: m for m in (await cluster.ring()).members}
        cluster.services["agent-1"].send(signal.SIGUSR1)
        seen: dict[int, list[str]] = {}
        source = members["agent-1/0"]
        # The first fills the engine's budget, so that the rest wait in the agent's queue.
        staged = asyncio.create_task(_submit(client, source, 0, 10_000, seen))
        await asyncio.sleep(0.3)
        waiting = [asyncio.create_task(_submit(client, source, number, 600, seen)) for number in range(1, 21)]
        done, _ = await asyncio.wait(waiting, timeout=8.0 if rebalance else 4.0)
        while_paused = dict(seen)
        cluster.services["agent-1"].send(signal.SIGUSR2)
        await asyncio.gather(staged, *waiting)

    assert len(done) == (20 if rebalance else 0)
    if rebalance:
        assert while_paused == {n: ["FirstToken agent-2/0", "Done agent-2/0"] for n in range(1, 21)}
    assert all(len(events) == 2 for events in seen.values())
    assert len(seen) == 21
