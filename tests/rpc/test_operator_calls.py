"""An operator's calls before the real services: what they know arrives whole, and failures say who and why."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from dualmap.core.choose import Reason
from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import InstanceState
from dualmap.core.rebalance import Cause
from dualmap.rpc.convert_operator import explanation_of, rebalancer_status_of
from dualmap.rpc.operator_calls import (
    CollectorOperatorCalls,
    RebalancerOperatorCalls,
    RingOperatorCalls,
    RouterOperatorCalls,
)
from dualmap.rpc.request_events import MoveOutcome
from dualmap.rpc.route_calls import CallFailed
from dualmap.rpc.route_values import Prompt, Request
from dualmap.v1 import rebalancer_pb2, ring_pb2, ring_pb2_grpc, router_pb2, types_pb2
from tests.services.rebalancer.rig import BUSY, CALM, cluster, item, rebalancer, wait_status
from tests.services.ringmanager import rig
from tests.services.router.harness import AGENT_EPOCH, ROUTER_ID, chain_of_blocks, pool_of, request, running_router
from tests.services.statecollector.conftest import Cluster
from tests.services.statecollector.conftest import cluster as collector_cluster
from tests.services.statecollector.fake_agent import FakeRank

LIMIT_S = 5.0

polled_pool = collector_cluster
"""The fixture under a name of its own."""


async def test_a_router_explains_and_shows_its_view() -> None:
    """Explain, what-if and GetView as values: the numbers the router decided with."""
    with running_router(pool_of(3)) as router:
        answer = router.route(request("r", chain_of_blocks(1, 10)))
        async with RouterOperatorCalls(f"127.0.0.1:{router.server.port}") as calls:
            recent = await calls.explain("r", LIMIT_S)
            what_if = await calls.what_if(Request("", Prompt.of_hashes(chain_of_blocks(2, 4), 600)), LIMIT_S)
            view = await calls.view(LIMIT_S)
            with pytest.raises(CallFailed) as unknown:
                await calls.explain("never", LIMIT_S)

    assert (recent.request_id, recent.reason, recent.router_id) == ("r", Reason.LESS_LOADED.name, ROUTER_ID)
    assert (recent.chosen, recent.key) == (answer.instance.instance_id, answer.ticket.key)
    assert [one.role for one in recent.candidates] == ["pair_1", "pair_2"]
    assert recent.candidates[0].miss_tokens == 1_280
    assert (what_if.prompt_tokens, what_if.decided_ago_ms) == (600, 0)
    assert [one.agent_epoch for one in view.instances] == [AGENT_EPOCH] * 3
    assert sum(one.bookings for one in view.instances) == 1
    assert (unknown.value.code, unknown.value.reason) == ("NOT_FOUND", "NOT_FOUND")


async def test_a_ring_manager_tells_its_ring_and_drains(redis_url: str) -> None:
    """The leader's ring, a drain and its undoing; an instance that is none is named."""
    async with rig.ring_manager(rig.settings(redis_url)) as (app, stub):
        await rig.store_state(redis_url, "a/0")
        await rig.until(lambda: app.is_leader)
        for name in ("a/0", "b/0"):
            await stub.Join(rig.join_request(name), timeout=rig.TIMEOUT_S)
        async with RingOperatorCalls(f"127.0.0.1:{app.port}") as calls:
            facts = await calls.ring(LIMIT_S)
            drained = await calls.drain("a/0", LIMIT_S)
            back = await calls.undrain("a/0", LIMIT_S)
            with pytest.raises(CallFailed) as unknown:
                await calls.drain("c/0", LIMIT_S)

    assert facts.leader
    assert {member.instance_id for member in facts.ring.members} == {"a/0", "b/0"}
    assert drained.state is InstanceState.DRAINING
    assert back.state in (InstanceState.ACTIVE, InstanceState.WARMING)
    assert back.ring_epoch > drained.ring_epoch > facts.ring.epoch
    assert unknown.value.reason == "UNKNOWN_INSTANCE"


async def test_a_collector_lists_its_instances(polled_pool: Cluster) -> None:
    """All of a pool, by id; another pool is not found."""
    ranks = [FakeRank(name) for name in ("a/0", "a/1")]
    await polled_pool.agent(*ranks)
    await polled_pool.publish()
    app = await polled_pool.collector()
    for rank in ranks:
        await polled_pool.until_stored(rank)
    async with CollectorOperatorCalls(f"127.0.0.1:{app.port}", "p") as calls:
        listed = await calls.instances(LIMIT_S)
    async with CollectorOperatorCalls(f"127.0.0.1:{app.port}", "q") as calls:
        with pytest.raises(CallFailed, match="pool 'q'"):
            await calls.instances(LIMIT_S)

    assert [facts.instance_id for facts in listed.instances] == ["a/0", "a/1"]
    assert all(facts.reachable for facts in listed.instances)


async def test_a_rebalancer_tells_its_last_moves(redis_url: str) -> None:
    """Counts, leadership, and the moves with their cause and outcome."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool, rebalancer(redis_url) as (app, stub):
        pool.agents["a/0"].rest_s = 5.0
        pool.agents["a/0"].items = [item("r1", ("a/0", "b/0"))]
        await wait_status(stub, lambda answer: answer.moved == 1)
        async with RebalancerOperatorCalls(f"127.0.0.1:{app.port}") as calls:
            status = await calls.status(LIMIT_S)

    assert (status.leader, status.moved) == (True, 1)
    (planned,) = status.last_moves
    assert (planned.move.request_id, planned.move.source, planned.move.target) == ("r1", "a/0", "b/0")
    assert (planned.move.cause, planned.outcome) == (Cause.OVERLOAD, MoveOutcome.MOVED)
    assert planned.move.gain_s > 1


class HalfRing(ring_pb2_grpc.RingManagerServicer):
    """Answers a ring without parameters, or hangs."""

    async def GetRing(
        self,
        request: ring_pb2.GetRingRequest,
        context: grpc.aio.ServicerContext[ring_pb2.GetRingRequest, ring_pb2.GetRingResponse],
    ) -> ring_pb2.GetRingResponse:
        if request.pool == "slow":
            await asyncio.Event().wait()
        return ring_pb2.GetRingResponse(ring=ring_pb2.Ring(epoch=1))


async def test_an_answer_that_cannot_be_is_a_failure_and_so_is_none() -> None:
    """What contradicts the contract names its field; a silent server costs the deadline and no more."""
    servicer = HalfRing()  # type: ignore[abstract]  # the rest is never called
    server = grpc.aio.server()
    ring_pb2_grpc.add_RingManagerServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with RingOperatorCalls(address) as calls:
            with pytest.raises(CallFailed, match=r"contradicts the contract: ring\.parameters") as odd:
                await calls.ring(LIMIT_S)
        async with RingOperatorCalls(address, "slow") as calls:
            with pytest.raises(CallFailed) as silent:
                await calls.ring(0.1)
    finally:
        await server.stop(None)

    assert (odd.value.code, silent.value.code) == ("DATA_LOSS", "DEADLINE_EXCEEDED")
    assert odd.value.target == f"ring manager {address}"


def test_what_this_version_does_not_know_is_shown_as_a_number_or_refused() -> None:
    """A newer reason is its number; a move's cause that the contract does not list is refused by field."""
    newer = router_pb2.ExplainResponse(reason=types_pb2.Reason.ValueType(77))
    odd = rebalancer_pb2.GetStatusResponse(last_moves=[rebalancer_pb2.PlannedMove(cause="whim")])

    assert explanation_of(newer).reason == "77"
    with pytest.raises(InvalidRequest, match=r"last_moves\[0\]"):
        rebalancer_status_of(odd)
