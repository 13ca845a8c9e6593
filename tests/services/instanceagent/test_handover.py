"""Hand-over: nothing lost, nothing twice, whichever step breaks."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from dualmap.core.membership import InstanceState
from dualmap.v1 import agent_pb2, types_pb2
from tests.services.instanceagent.cluster import (
    Cluster,
    Following,
    accept_request,
    accepted,
    cluster,
    migrate,
    scripted,
    submission,
    submit,
    told,
    until,
)

Answers = AsyncIterator[agent_pb2.AcceptResponse]
FIRST = agent_pb2.FirstToken(instance_id="b/0", ttft_ms=5, prompt_tokens=256)


async def _waiting(built: Cluster, name: str, request_id: str, **changes: Any) -> Following:
    """A request that waits at the instance, behind a paused engine that is full."""
    built.pause(name)
    stub = built.stub(name)
    instance = built.instance(name)
    if not instance.held.jobs:
        blocker = submit(stub, submission(f"blocker-{name}", seed=999))
        await until(lambda: "started" in blocker.kinds, "the engine is full")
    following = submit(stub, submission(request_id, **changes))
    await until(lambda: (request_id, changes.get("attempt", 1)) in instance.held.waiting, "it waits")
    return following


def _one_at_a_time(**more: Any) -> dict[str, Any]:
    return {"max_sequences": 1, "suspect_after_ms": 60_000, **more}


async def test_a_moved_request_is_served_elsewhere_and_its_client_notices_nothing() -> None:
    """MOVED; the events of the other instance arrive on the first stream; both ways."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        moved = await _waiting(built, "a", "r1")
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["MOVED"]
        assert await moved.end() is grpc.StatusCode.OK
        assert moved.kinds[:3] == ["queued", "started", "first_token"]
        assert moved.first("done").instance_id == "b/0"
        assert moved.first("done").handovers == 1

        other_way = await _waiting(built, "b", "r2", seed=2)
        built.resume("a")
        assert await migrate(built.stub("b"), "b/0", "a/0", "r2") == ["MOVED"]
        assert await other_way.end() is grpc.StatusCode.OK
        assert other_way.first("done").instance_id == "a/0"
        assert (built.instance("a").counters.moved_out, built.instance("a").counters.moved_in) == (1, 1)


async def test_outcomes_are_told_item_by_item() -> None:
    """MOVED, NOT_WAITING, UNKNOWN, REFUSED in one batch, in the order asked."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        moved = await _waiting(built, "a", "r1")
        stays = await _waiting(built, "a", "r2", seed=2)
        stub = built.stub("a")
        listed = await stub.ListQueue(agent_pb2.ListQueueRequest(instance_id="a/0"), timeout=5)
        assert [item.request_id for item in listed.items] == ["r1", "r2"]
        items = [
            agent_pb2.MigrateItem(request_id=name, attempt=1, target_instance_id=target)
            for name, target in (("r1", "b/0"), ("blocker-a", "b/0"), ("none", "b/0"), ("r2", "nowhere/0"))
        ]
        answer = await stub.Migrate(
            agent_pb2.MigrateRequest(instance_id="a/0", list_token=listed.list_token, items=items), timeout=5
        )
        assert [result.outcome for result in answer.results] == [1, 2, 3, 4]
        built.resume("a")
        assert await moved.end() is grpc.StatusCode.OK
        assert await stays.end() is grpc.StatusCode.OK


async def test_a_stale_plan_and_a_past_leader_move_nothing() -> None:
    """Another life's token, an old one, none: STALE_PLAN; a lower fencing epoch: FAILED_PRECONDITION."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        following = await _waiting(built, "a", "r1")
        stub = built.stub("a")
        instance, agent_epoch = built.instance("a"), built.agents["a"].agent.facts.agent_epoch
        old = struct.pack("<Qd", agent_epoch, instance.now_ms - 2_001)
        other_life = struct.pack("<Qd", agent_epoch - 1, instance.now_ms)
        for token in (b"", b"x" * 16, old, other_life):
            assert await migrate(stub, "a/0", "b/0", "r1", list_token=token) == ["STALE_PLAN"]
        assert await migrate(stub, "a/0", "b/0", "none", fencing_epoch=5) == ["UNKNOWN"]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await migrate(stub, "a/0", "b/0", "r1", fencing_epoch=4)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK
        assert built.instance("a").counters.moved_out == 0


async def test_a_target_that_does_not_accept_in_time_gets_nothing() -> None:
    """No ACCEPTED within 200 ms: FAILED, back in its old place, the target's call cancelled."""

    async def never(_request: agent_pb2.AcceptRequest, _context: Any) -> Answers:
        await asyncio.Event().wait()
        yield accepted()

    async with cluster("a", agent=_one_at_a_time()) as built, scripted(built.ring, "b/0", never) as other:
        first = await _waiting(built, "a", "r1")
        second = await _waiting(built, "a", "r2", seed=2)
        await _ring_known(built, "a")
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["FAILED"]
        await asyncio.wait_for(other.cancelled.wait(), 5)
        assert [request.request_id for request in built.instance("a").ordered()] == ["r1", "r2"]
        built.resume("a")
        assert await first.end() is grpc.StatusCode.OK
        assert await second.end() is grpc.StatusCode.OK


async def _ring_known(built: Cluster, name: str) -> None:
    await until(lambda: built.agents[name].agent.ring.epoch == built.ring.epoch, "the ring is known")  # type: ignore[union-attr]


async def test_a_target_lost_before_the_first_token_costs_nothing() -> None:
    """Stream broken after ACCEPTED: put back at the origin, served there, one first token."""

    async def breaks(_request: agent_pb2.AcceptRequest, context: Any) -> Answers:
        yield accepted()
        yield told(started=agent_pb2.Started(instance_id="b/0"))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with cluster("a", agent=_one_at_a_time()) as built, scripted(built.ring, "b/0", breaks):
        following = await _waiting(built, "a", "r1")
        await _ring_known(built, "a")
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["MOVED"]
        await until(lambda: built.instance("a").counters.put_back == 1, "put back")
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK
        assert following.kinds.count("first_token") == following.kinds.count("done") == 1
        assert following.first("done").instance_id == "a/0"


async def test_a_target_lost_after_the_first_token_ends_unavailable() -> None:
    """A first token was passed on: it must not come again, so the client is told and retries."""

    async def breaks(_request: agent_pb2.AcceptRequest, context: Any) -> Answers:
        yield accepted()
        yield told(first_token=FIRST)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with cluster("a", agent=_one_at_a_time()) as built, scripted(built.ring, "b/0", breaks):
        following = await _waiting(built, "a", "r1")
        await _ring_known(built, "a")
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        assert await following.end() is grpc.StatusCode.UNAVAILABLE
        assert following.kinds.count("first_token") == 1
        again = submit(built.stub("a"), submission("r1"))
        assert await again.end() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_silent_target_is_dead_after_three_seconds() -> None:
    """No event for 3 s: put back; not sooner."""

    async def silent(_request: agent_pb2.AcceptRequest, _context: Any) -> Answers:
        yield accepted()
        await asyncio.Event().wait()

    async with cluster("a", agent=_one_at_a_time()) as built, scripted(built.ring, "b/0", silent) as other:
        following = await _waiting(built, "a", "r1")
        await _ring_known(built, "a")
        began_s = asyncio.get_running_loop().time()
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        await until(lambda: built.instance("a").counters.put_back == 1, "put back")
        assert 2.9 < asyncio.get_running_loop().time() - began_s < 5
        await asyncio.wait_for(other.cancelled.wait(), 5)
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK


async def test_a_returned_request_goes_where_it_is_wanted() -> None:
    """At most one relay hop: RETURNED naming c, and the origin opens Accept at c."""
    async with cluster("a", "b", "c", agent=_one_at_a_time()) as built:
        await _waiting(built, "b", "at-b", seed=5)
        following = await _waiting(built, "a", "r1")
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["MOVED"]
        await until(lambda: ("r1", 1) in built.instance("b").held.waiting, "it waits at b")
        assert await migrate(built.stub("b"), "b/0", "c/0", "r1") == ["MOVED"]
        assert await following.end() is grpc.StatusCode.OK
        assert following.first("done").instance_id == "c/0"
        assert following.first("done").handovers == 2


async def test_a_returned_request_that_nobody_takes_waits_at_its_origin() -> None:
    """The wanted target refuses: the origin queues it itself; a hand-over number is never used twice."""

    async def returns(_request: agent_pb2.AcceptRequest, _context: Any) -> Answers:
        yield accepted()
        yield agent_pb2.AcceptResponse(
            returned=agent_pb2.Returned(wanted_instance_id="c/0", cause=agent_pb2.HANDOVER_CAUSE_MIGRATE)
        )

    async def refuses(_request: agent_pb2.AcceptRequest, context: Any) -> Answers:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield accepted()

    async with (
        cluster("a", agent=_one_at_a_time()) as built,
        scripted(built.ring, "b/0", returns),
        scripted(built.ring, "c/0", refuses) as refuser,
    ):
        following = await _waiting(built, "a", "r1")
        await _ring_known(built, "a")
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        await until(lambda: built.instance("a").counters.put_back == 1, "queued at its origin")
        assert [request.handover for request in refuser.accepted] == [2]
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK
        assert following.first("done").instance_id == "a/0"


async def test_a_higher_attempt_at_the_target_supersedes_and_is_not_put_back() -> None:
    """The client's retry reaches the target: the origin ends the lower attempt ABORTED and keeps nothing."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        await _waiting(built, "b", "at-b", seed=5)
        lower = await _waiting(built, "a", "r1")
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        await until(lambda: ("r1", 1) in built.instance("b").held.waiting, "it waits at b")
        higher = submit(built.stub("b"), submission("r1", attempt=2))
        assert await lower.end() is grpc.StatusCode.ABORTED
        assert not built.instance("a").held.away
        assert ("r1", 1) not in built.instance("a").held.waiting
        built.resume("b")
        assert await higher.end() is grpc.StatusCode.OK


async def test_a_client_that_goes_is_cancelled_everywhere() -> None:
    """The relayed request leaves the target too, and may come to the target again: it has not ended there."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        await _waiting(built, "b", "at-b", seed=5)
        following = await _waiting(built, "a", "r1")
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        await until(lambda: ("r1", 1) in built.instance("b").held.waiting, "it waits at b")
        following.call.cancel()
        await until(lambda: ("r1", 1) not in built.instance("b").held.waiting, "gone at b")
        await until(lambda: not built.instance("a").held.away, "gone at a")


async def test_an_origin_that_goes_is_noticed_and_may_come_again_with_a_higher_number() -> None:
    """A broken Accept drops the request; the same number is refused, a higher one taken."""
    async with cluster("a", agent=_one_at_a_time()) as built:
        await _waiting(built, "a", "w1", seed=3)
        stub = built.stub("a")
        first = Following(stub.Accept(accept_request(submission("r1"), "a/0", "x/0", handover=3)))
        await until(lambda: len(first.messages) >= 2, "accepted and queued")
        assert first.messages[0].HasField("accepted")
        first.call.cancel()
        await until(lambda: ("r1", 1) not in built.instance("a").held.waiting, "dropped")

        same = Following(stub.Accept(accept_request(submission("r1"), "a/0", "x/0", handover=3)))
        assert await same.end() is grpc.StatusCode.ALREADY_EXISTS
        higher = Following(stub.Accept(accept_request(submission("r1"), "a/0", "x/0", handover=4)))
        built.resume("a")
        assert await higher.end() is grpc.StatusCode.OK
        assert higher.kinds[-1] == "done"


async def test_a_refusing_target_is_told_apart_from_a_dead_one() -> None:
    """A draining instance refuses by name; a port nobody listens on fails; both leave the request in its place."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        following = await _waiting(built, "a", "r1")
        built.instance("b").draining = True
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["REFUSED"]
        built.ring.set("dead/0", grpc_address="127.0.0.1:1", state=InstanceState.ACTIVE)
        await _ring_known(built, "a")
        assert await migrate(built.stub("a"), "a/0", "dead/0", "r1") == ["FAILED"]
        built.ring.set("dead/0", state=InstanceState.SUSPECT)
        await _ring_known(built, "a")
        assert await migrate(built.stub("a"), "a/0", "dead/0", "r1") == ["REFUSED"]
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK


async def test_a_killed_target_loses_nothing_of_what_waited_there() -> None:
    """The target's process goes: what had no first token is served by its origin."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        await _waiting(built, "b", "at-b", seed=5)
        moved = [await _waiting(built, "a", f"r{i}", seed=i) for i in range(3)]
        outcomes = await migrate(built.stub("a"), "a/0", "b/0", *(f"r{i}" for i in range(3)))
        assert outcomes == ["MOVED"] * 3
        await built.agents.pop("b").__aexit__(None, None, None)
        built.resume("a")
        for following in moved:
            assert await following.end() is grpc.StatusCode.OK
            assert following.kinds.count("first_token") == following.kinds.count("done") == 1


async def test_hundreds_of_requests_moved_to_and_fro_each_end_exactly_once() -> None:
    """300 requests, two agents, random moves all the while: each client gets one first token and one end."""
    async with cluster("a", "b", agent={"feed_tokens": 512}) as built:
        stubs = {name: built.stub(name) for name in ("a", "b")}
        clients = [
            submit(stubs["ab"[i % 2]], submission(f"r{i}", seed=i % 40, count=256 + 128 * (i % 5))) for i in range(300)
        ]

        async def shuffle(source: str, target: str) -> None:
            while not all(client.task.done() for client in clients):
                waiting = [request.request_id for request in built.instance(source).ordered()[::2]][:20]
                await migrate(stubs[source], f"{source}/0", f"{target}/0", *waiting)
                await asyncio.sleep(0.01)

        await asyncio.wait_for(asyncio.gather(shuffle("a", "b"), shuffle("b", "a")), 60)
        for client in clients:
            assert client.code is grpc.StatusCode.OK
            assert client.kinds.count("first_token") == client.kinds.count("done") == 1
        counters = [built.instance(name).counters for name in ("a", "b")]
        assert sum(counter.moved_out for counter in counters) > 20
        assert all(built.instance(name).empty for name in ("a", "b"))


async def test_the_ticket_counts_at_the_instance_it_names_also_by_accept() -> None:
    """A ticket is covered whichever call brings it, and void at the target it does not name."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        epoch = built.agents["a"].agent.facts.agent_epoch
        ticket = types_pb2.Ticket(router_id=7, instance_id="a/0", agent_epoch=epoch, sequence=1)
        following = await _waiting(built, "a", "r1", ticket=ticket)
        await migrate(built.stub("a"), "a/0", "b/0", "r1")
        assert await following.end() is grpc.StatusCode.OK
        assert [t.watermark for t in built.instance("a").load().tickets] == [1]
        assert built.instance("b").load().tickets == ()


async def test_ranks_of_one_agent_hand_over_to_each_other() -> None:
    """The same mechanism, the same process: one run, one end."""
    async with cluster("a", agent=_one_at_a_time(instances=2)) as built:
        built.agents["a"].engines[0].pause()
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9, instance_id="a/0"))
        await until(lambda: "started" in running.kinds, "full")
        following = submit(stub, submission("r1", instance_id="a/0"))
        await until(lambda: bool(built.instance("a").held.waiting), "it waits")
        assert await migrate(stub, "a/0", "a/1", "r1") == ["MOVED"]
        assert await following.end() is grpc.StatusCode.OK
        assert following.first("done").instance_id == "a/1"
        assert built.instance("a", 1).counters.finished == 1


async def test_a_big_batch_is_moved_whole() -> None:
    """Two hundred at once: none fails for waiting behind the others."""
    async with cluster("a", "b", agent=_one_at_a_time()) as built:
        built.pause("a", "b")
        stub = built.stub("a")
        clients = [submit(stub, submission(f"r{i}", seed=i)) for i in range(201)]
        await until(lambda: len(built.instance("a").held.waiting) == 200, "200 wait")
        names = [request.request_id for request in built.instance("a").ordered()]
        assert await migrate(stub, "a/0", "b/0", *names) == ["MOVED"] * 200
        built.resume("a", "b")
        for client in clients:
            assert await client.end() is grpc.StatusCode.OK
