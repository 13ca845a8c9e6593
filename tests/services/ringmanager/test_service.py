"""The ring manager as its callers meet it: gRPC in front, Redis behind."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest
import redis

from dualmap.core.membership import RingParameters
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_ring import parameters_to_message
from dualmap.rpc.status import problem_of
from dualmap.store.connection import connect
from dualmap.store.ring_store import RingStore
from dualmap.v1 import ring_pb2, ring_pb2_grpc, types_pb2
from services.ringmanager.app import App
from services.ringmanager.settings import HeatSettings, LeaseSettings, RingSettings
from tests.services.ringmanager.rig import (
    POOL,
    TIMEOUT_S,
    Renewals,
    get_ring,
    join_request,
    ring_manager,
    settings,
    states,
    store_state,
    until,
    wait_ring,
)

ACTIVE = types_pb2.INSTANCE_STATE_ACTIVE
DIGEST = RingParameters().digest()
LONG = LeaseSettings(lease_s=60, turn_s=0.02)


async def test_the_empty_ring_tells_pool_and_parameters(redis_url: str) -> None:
    """Whoever asks before the first instance joins learns what it must agree with."""
    async with ring_manager(settings(redis_url)) as (_, stub):
        found = await get_ring(stub)

    assert found.ring.pool == POOL
    assert found.ring.parameters == parameters_to_message(RingParameters())


async def test_the_grace_period_runs_down_for_each_who_asks_and_ends(redis_url: str) -> None:
    """One ring asked for twice tells less grace the second time, and none once it is over."""
    short = settings(redis_url, lease=LONG, ring=RingSettings(grace_s=1.0))
    async with ring_manager(short) as (app, stub):
        await until(lambda: app.is_leader)
        for name in ("a/0", "b/0"):
            await store_state(redis_url, name)
            await stub.Join(join_request(name), timeout=TIMEOUT_S)
            await wait_ring(stub, lambda answer, name=name: states(answer).get(name) == "ACTIVE")  # type: ignore[misc]
        first = await wait_ring(stub, lambda answer: answer.ring.HasField("previous"))
        await wait_ring(
            stub,
            lambda answer: (
                answer.ring_epoch == first.ring_epoch
                and answer.ring.previous.grace_left_ms < first.ring.previous.grace_left_ms
            ),
        )

        await wait_ring(stub, lambda answer: not answer.ring.HasField("previous"))


async def test_an_instance_joins_warms_up_and_is_published(redis_url: str) -> None:
    """WARMING until its first full state is stored, then on the ring that every process reads from Redis."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)

        joined = await stub.Join(join_request("a/0", 7), timeout=TIMEOUT_S)

        assert joined.state == types_pb2.INSTANCE_STATE_WARMING
        assert joined.lease_ms == 60_000
        assert joined.ring_epoch == joined.ring.epoch > time.time() * 1_000 - 60_000
        assert joined.ring.parameters == parameters_to_message(RingParameters())
        await store_state(redis_url, "a/0", 6)
        await store_state(redis_url, "a/0", 7)
        found = await wait_ring(stub, lambda answer: states(answer) == {"a/0": "ACTIVE"})
        assert found.leader
        assert found.ring_epoch > joined.ring_epoch
        client = connect(redis_url)
        stored = await RingStore(client, POOL).load()
        await client.aclose()
        assert stored is not None
        assert stored.epoch == found.ring_epoch


async def test_joining_twice_in_one_life_changes_nothing(redis_url: str) -> None:
    """A retried Join costs no epoch."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)
        first = await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)

        assert await stub.Join(join_request("a/0"), timeout=TIMEOUT_S) == first


@pytest.mark.parametrize(
    ("request_", "code", "word"),
    [
        (join_request("a/0", 1), grpc.StatusCode.FAILED_PRECONDITION, "older life"),
        (join_request("", 1), grpc.StatusCode.INVALID_ARGUMENT, "address.instance_id"),
        (join_request("b/0", 0), grpc.StatusCode.INVALID_ARGUMENT, "agent_epoch"),
        (join_request("b/0", weight=17), grpc.StatusCode.INVALID_ARGUMENT, "weight"),
        (join_request("b/0", weight=float("nan")), grpc.StatusCode.INVALID_ARGUMENT, "weight"),
        (join_request("b/0", role="chef"), grpc.StatusCode.INVALID_ARGUMENT, "role"),
        (join_request("b/0", highest_epoch_seen=1 << 63), grpc.StatusCode.INVALID_ARGUMENT, "highest_epoch_seen"),
        (join_request("b/0", parameters_digest=99), grpc.StatusCode.FAILED_PRECONDITION, "parameters_digest"),
        (
            join_request("b/0", parameters=parameters_to_message(RingParameters(start_depth=2))),
            grpc.StatusCode.FAILED_PRECONDITION,
            "start_depth",
        ),
        (ring_pb2.JoinRequest(pool="elsewhere"), grpc.StatusCode.NOT_FOUND, "elsewhere"),
    ],
)
async def test_a_wrong_join_is_refused_by_name(
    redis_url: str, request_: ring_pb2.JoinRequest, code: grpc.StatusCode, word: str
) -> None:
    """Each refusal names what is wrong, and nothing is joined."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)
        await stub.Join(join_request("a/0", 2), timeout=TIMEOUT_S)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Join(request_, timeout=TIMEOUT_S)

        assert refused.value.code() is code
        assert word in str(refused.value.details())
        assert set(states(await get_ring(stub))) == {"a/0"}


async def test_a_silent_instance_expires_and_a_suspect_one_returns(redis_url: str) -> None:
    """Leases and suspicion come from Renew alone."""
    async with ring_manager(settings(redis_url)) as (app, stub):
        await until(lambda: app.is_leader)
        renewals = Renewals(stub, {"a/0", "b/0"})
        for name in ("a/0", "b/0"):
            await stub.Join(join_request(name), timeout=TIMEOUT_S)
            await store_state(redis_url, name)
        async with renewals.running():
            await wait_ring(stub, lambda answer: states(answer) == {"a/0": "ACTIVE", "b/0": "ACTIVE"})
            renewals.suspect.add("a/0")
            await wait_ring(stub, lambda answer: states(answer)["a/0"] == "SUSPECT")
            renewals.suspect.clear()
            await wait_ring(stub, lambda answer: states(answer)["a/0"] == "ACTIVE")

            renewals.names.discard("b/0")

            found = await wait_ring(stub, lambda answer: states(answer) == {"a/0": "ACTIVE"})
            assert [member.address.instance_id for member in found.ring.previous.members] == ["a/0", "b/0"]
            assert 0 < found.ring.previous.grace_left_ms <= 60_000
            renewed = await stub.Renew(
                ring_pb2.RenewRequest(instances=[ring_pb2.RenewInstance(instance_id="b/0")], agent_epoch=1),
                timeout=TIMEOUT_S,
            )
            assert list(renewed.states) == [types_pb2.INSTANCE_STATE_LEFT]


async def test_drain_undrain_and_leave_tell_what_moves(redis_url: str) -> None:
    """A drain says what share of pairs its leave will move, and the leave moves that share."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)
        names = ["a/0", "b/0", "c/0", "d/0"]
        for name in names:
            await stub.Join(join_request(name), timeout=TIMEOUT_S)
            await store_state(redis_url, name)
        await wait_ring(stub, lambda answer: set(states(answer).values()) == {"ACTIVE"} and len(states(answer)) == 4)

        drained = await stub.Drain(ring_pb2.DrainRequest(pool=POOL, instance_id="a/0"), timeout=TIMEOUT_S)
        undrained = await stub.Undrain(ring_pb2.UndrainRequest(pool=POOL, instance_id="a/0"), timeout=TIMEOUT_S)
        old = await stub.Leave(ring_pb2.LeaveRequest(instance_id="a/0", agent_epoch=1), timeout=TIMEOUT_S)
        again = await stub.Leave(ring_pb2.LeaveRequest(instance_id="a/0", agent_epoch=1), timeout=TIMEOUT_S)

        assert drained.state == types_pb2.INSTANCE_STATE_DRAINING
        assert undrained.state == ACTIVE
        assert 0.35 < drained.moved_share < 0.65
        assert old.moved_share == drained.moved_share
        assert again.moved_share == 0
        found = await wait_ring(stub, lambda answer: answer.last_moved_share == old.moved_share)
        assert set(states(found)) == {"b/0", "c/0", "d/0"}


async def test_a_watch_tells_the_ring_each_change_and_signs_of_life(redis_url: str) -> None:
    """First the whole ring, then each change, then at least a heartbeat; and it ends with the process."""
    app = App(settings(redis_url, lease=LONG))
    async with app:
        # A channel that outlives the process, as an agent's does.
        channel = aio_channel(f"127.0.0.1:{app.port}")
        stub = ring_pb2_grpc.RingManagerStub(channel)
        await until(lambda: app.is_leader)
        await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)
        call = stub.WatchRing(ring_pb2.WatchRingRequest(pool=POOL))

        async with asyncio.timeout(10):
            first = await call.read()
            await stub.Join(join_request("b/0"), timeout=TIMEOUT_S)
            second = await call.read()
            third = await call.read()

        assert isinstance(first, ring_pb2.WatchRingResponse)
        assert isinstance(second, ring_pb2.WatchRingResponse)
        assert isinstance(third, ring_pb2.WatchRingResponse)
        assert [len(first.ring.members), len(second.ring.members)] == [1, 2]
        assert first.ring_epoch < second.ring_epoch == third.ring_epoch
        assert not third.HasField("ring")
    async with asyncio.timeout(5):
        while await call.read() is not grpc.aio.EOF:
            continue
    assert await call.code() is grpc.StatusCode.OK
    await channel.close()


async def test_watches_never_use_up_what_joins_and_renewals_need(redis_url: str) -> None:
    """More watches than calls are allowed at once: all are told, an instance joins, and one too many is refused."""
    few = settings(redis_url, lease=LONG, ring=RingSettings(heartbeat_s=5, max_watches=40))
    few = few.model_copy(update={"server": few.server.model_copy(update={"max_concurrent_rpcs": 4})})
    async with ring_manager(few) as (app, stub), asyncio.timeout(20):
        await until(lambda: app.is_leader)
        watches = [stub.WatchRing(ring_pb2.WatchRingRequest(pool=POOL)) for _ in range(40)]
        for watch in watches:
            await watch.read()

        joined = await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)
        refused = stub.WatchRing(ring_pb2.WatchRingRequest(pool=POOL))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await anext(aiter(refused))

        assert problem_of(error.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            told = await watch.read()
            assert isinstance(told, ring_pb2.WatchRingResponse)
            assert told.ring_epoch == joined.ring_epoch
            watch.cancel()


async def test_a_standby_reads_refuses_and_takes_over(redis_url: str) -> None:
    """Standbys follow and answer reads; when the leader goes they lead, with the same members and a higher epoch."""
    async with ring_manager(settings(redis_url)) as (second, standby):
        await until(lambda: second.is_leader)
        async with ring_manager(settings(redis_url)) as (first, other):
            await standby.Join(join_request("a/0"), timeout=TIMEOUT_S)
            found = await wait_ring(other, lambda answer: set(states(answer)) == {"a/0"})
            assert not found.leader
            assert not first.is_leader
            for call in (
                other.Join(join_request("b/0"), timeout=TIMEOUT_S),
                other.Renew(ring_pb2.RenewRequest(agent_epoch=1), timeout=TIMEOUT_S),
                other.Drain(ring_pb2.DrainRequest(instance_id="a/0"), timeout=TIMEOUT_S),
                other.Leave(ring_pb2.LeaveRequest(instance_id="a/0"), timeout=TIMEOUT_S),
                other.ReportHeat(ring_pb2.ReportHeatRequest(parameters_digest=DIGEST), timeout=TIMEOUT_S),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert problem_of(refused.value).reason == "NOT_LEADER"
            before = found.ring_epoch
    async with ring_manager(settings(redis_url)) as (third, stub):
        await until(lambda: third.is_leader)
        joined = await stub.Join(join_request("b/0"), timeout=TIMEOUT_S)
        assert joined.ring_epoch > before
        assert {member.address.instance_id for member in joined.ring.members} >= {"a/0", "b/0"}


async def test_an_emptied_redis_gets_its_ring_back(redis_url: str) -> None:
    """The leader remembers: the same members at a higher epoch, and nobody has to join again."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)
        await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)
        before = (await get_ring(stub)).ring_epoch

        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
            client.script_flush()

        found = await wait_ring(stub, lambda answer: answer.ring_epoch > before)
        assert set(states(found)) == {"a/0"}
        reader = connect(redis_url)
        stored = await RingStore(reader, POOL).load()
        await reader.aclose()
        assert stored is not None
        assert stored.epoch >= found.ring_epoch


@pytest.mark.slow
async def test_nobody_is_removed_while_redis_and_agents_are_both_silent(redis_url: str) -> None:
    """Ten leases without Redis and without one renewal, then both return: all are still members."""
    lease = LeaseSettings(lease_s=0.6, turn_s=0.02)
    async with ring_manager(settings(redis_url, lease=lease)) as (app, stub):
        await until(lambda: app.is_leader)
        names = {"a/0", "b/0", "c/0"}
        for name in sorted(names):
            await stub.Join(join_request(name), timeout=TIMEOUT_S)
            await store_state(redis_url, name)
        async with Renewals(stub, names, every_s=0.05).running():
            before = await wait_ring(stub, lambda answer: list(states(answer).values()) == ["ACTIVE"] * 3)
        with redis.Redis.from_url(redis_url) as client:
            client.client_pause(6_000)

        await until(lambda: not app.is_leader)
        await until(lambda: app.is_leader)
        async with Renewals(stub, names, every_s=0.05).running():
            for _ in range(10):
                await asyncio.sleep(0.1)
                found = await get_ring(stub)
                assert states(found) == states(before)


async def test_a_ring_lost_by_all_is_rebuilt_before_it_is_shown(redis_url: str) -> None:
    """Redis and ring manager both lost it: no ring of the first to return empties the routers' views, epochs rise."""
    seen = int(time.time() * 1_000) + 3_600_000
    lease = LeaseSettings(lease_s=1.0, turn_s=0.02)
    async with ring_manager(settings(redis_url, lease=lease)) as (app, stub):
        await until(lambda: app.is_leader)
        renewed = await stub.Renew(
            ring_pb2.RenewRequest(
                instances=[ring_pb2.RenewInstance(instance_id="a/0")], agent_epoch=1, highest_epoch_seen=seen
            ),
            timeout=TIMEOUT_S,
        )
        assert list(renewed.states) == [types_pb2.INSTANCE_STATE_LEFT]

        answers = [
            await stub.Join(join_request(name, highest_epoch_seen=seen), timeout=TIMEOUT_S) for name in ("a/0", "b/0")
        ]
        asked = await stub.ReportHeat(
            ring_pb2.ReportHeatRequest(router_id=5, highest_epoch_seen=seen, parameters_digest=DIGEST),
            timeout=TIMEOUT_S,
        )
        assert asked.want_splits
        offered = await stub.ReportHeat(
            ring_pb2.ReportHeatRequest(
                router_id=5,
                highest_epoch_seen=seen,
                parameters_digest=DIGEST,
                splits=[ring_pb2.Split(prefix=77, depth=1, next_depth=3)],
                splits_epoch=seen,
            ),
            timeout=TIMEOUT_S,
        )

        assert [answer.state for answer in answers] == [ACTIVE, ACTIVE]
        assert not offered.want_splits
        assert (await get_ring(stub)).ring_epoch == 0
        async with Renewals(stub, {"a/0", "b/0"}).running():
            found = await wait_ring(stub, lambda answer: answer.ring_epoch > 0)
        assert found.ring_epoch == seen + 1
        assert states(found) == {"a/0": "ACTIVE", "b/0": "ACTIVE"}
        assert [(split.prefix, split.next_depth) for split in found.ring.splits] == [(77, 3)]


def heat_report(samples: list[ring_pb2.HeatSample], digest: int = DIGEST) -> ring_pb2.ReportHeatRequest:
    return ring_pb2.ReportHeatRequest(
        pool=POOL, router_id=1, samples=samples, requests=len(samples), parameters_digest=digest
    )


async def test_a_hot_prefix_is_split_with_a_new_epoch(redis_url: str) -> None:
    """All requests share block 1 and part at block 2: one pair cannot serve them, so the key is lengthened."""
    heat = HeatSettings(plan_s=0.05)
    async with ring_manager(settings(redis_url, lease=LONG, heat=heat)) as (app, stub):
        await until(lambda: app.is_leader)
        for name in ("a/0", "b/0", "c/0", "d/0", "e/0", "f/0"):
            await stub.Join(join_request(name), timeout=TIMEOUT_S)
            await store_state(redis_url, name)
        ready = await wait_ring(stub, lambda answer: list(states(answer).values()) == ["ACTIVE"] * 6)

        samples = [ring_pb2.HeatSample(hashes=[1, 100 + number], first_depth=1) for number in range(60)]
        await stub.ReportHeat(heat_report(samples), timeout=TIMEOUT_S)

        found = await wait_ring(stub, lambda answer: len(answer.ring.splits) > 0)
        assert found.ring_epoch > ready.ring_epoch
        assert [(split.prefix, split.depth, split.next_depth) for split in found.ring.splits] == [(1, 1, 2)]
        assert found.ring.HasField("previous")


async def test_without_heat_the_start_depth_is_two_and_nothing_is_split(redis_url: str) -> None:
    """Where no tree runs a fixed depth must do, unless another is set."""
    heat = HeatSettings(enabled=False)
    async with ring_manager(settings(redis_url, lease=LONG, heat=heat)) as (app, stub):
        await until(lambda: app.is_leader)
        joined = await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)

        assert joined.ring.parameters.start_depth == 2
        digest = RingParameters(start_depth=2).digest()
        samples = [ring_pb2.HeatSample(hashes=[1, 100 + number], first_depth=1) for number in range(60)]
        answer = await stub.ReportHeat(heat_report(samples, digest), timeout=TIMEOUT_S)
        assert not answer.want_splits
        assert not (await get_ring(stub)).ring.splits
    set_ = settings(redis_url, heat=heat, ring=RingSettings(start_depth=1))
    assert set_.parameters.start_depth == 1


async def test_heat_of_other_hashes_is_refused(redis_url: str) -> None:
    """Chains made with other parameters would split prefixes that nobody has: never silence."""
    async with ring_manager(settings(redis_url, lease=LONG)) as (app, stub):
        await until(lambda: app.is_leader)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ReportHeat(heat_report([ring_pb2.HeatSample(hashes=[1], first_depth=1)], 5), timeout=TIMEOUT_S)

        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "parameters_digest" in str(refused.value.details())


async def test_without_redis_nothing_is_changed_and_all_is_answered(redis_url: str) -> None:
    """Redis away and the lead with it: UNAVAILABLE with a delay, and reads still answer."""
    async with ring_manager(settings(redis_url, leader_lease_s=0.5)) as (app, stub):
        await until(lambda: app.is_leader)
        before = (await get_ring(stub)).ring_epoch
        with redis.Redis.from_url(redis_url) as client:
            client.client_pause(2_500)
        await until(lambda: not app.is_leader)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Join(join_request("a/0"), timeout=TIMEOUT_S)

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await get_ring(stub)).ring_epoch == before
        assert app.health.alive


async def test_instances_that_join_together_share_epochs(redis_url: str) -> None:
    """40 joins at once: each is told a ring with itself, and far fewer than 40 rings go to every watcher."""
    async with ring_manager(settings(redis_url)) as (app, stub):
        await until(lambda: app.is_leader)
        names = [f"a-{number}/0" for number in range(40)]
        before = app.metrics.published._value.get()
        answers = await asyncio.gather(*(stub.Join(join_request(name), timeout=TIMEOUT_S) for name in names))
        published = app.metrics.published._value.get() - before

    for name, answer in zip(names, answers, strict=True):
        assert name in {member.address.instance_id for member in answer.ring.members}
    assert 1 <= published <= 10
