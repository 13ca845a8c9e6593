"""The rebalancer end to end: what it lists, what it asks to be moved, and what it leaves alone."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from dualmap.core.membership import InstanceState
from dualmap.v1 import rebalancer_pb2
from services.rebalancer.settings import RoundSettings
from tests.services.rebalancer.rig import (
    BUSY,
    CALM,
    POOL,
    TIMEOUT_S,
    TOKEN,
    cluster,
    item,
    load,
    rebalancer,
    status,
    wait_status,
)

MOVED = rebalancer_pb2.MOVE_OUTCOME_MOVED


async def test_what_would_miss_here_and_meet_there_is_moved(redis_url: str) -> None:
    """One batch, with the list's token and the fencing epoch; calm instances are never asked what waits."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool, rebalancer(redis_url) as (app, stub):
        source = pool.agents["a/0"]
        source.rest_s = 5.0
        source.items = [item("r1", ("a/0", "b/0"))]

        found = await wait_status(stub, lambda answer: answer.moved == 1)

        assert app.is_leader
        assert found.leader
        assert found.fencing_epoch > 0
        assert [(m.request_id, m.target_instance_id, m.cause, m.outcome) for m in found.last_moves] == [
            ("r1", "b/0", "overload", MOVED)
        ]
        assert found.last_moves[0].gain_ms > 1_000
        batch = source.batches[0]
        assert (batch.list_token, batch.fencing_epoch) == (TOKEN, found.fencing_epoch)
        assert pool.agents["b/0"].lists == 0


async def test_what_meets_its_deadline_stays(redis_url: str) -> None:
    """A busy queue alone is no reason to move anybody."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool, rebalancer(redis_url) as (_, stub):
        pool.agents["a/0"].items = [item("r1", ("a/0", "b/0"), deadline_ms=60_000)]

        await wait_status(stub, lambda answer: pool.agents["a/0"].lists >= 3)

        assert (await status(stub)).planned == 0


@pytest.mark.parametrize("how", ["stalled", "suspect", "ring"])
async def test_a_wedged_instance_is_emptied(redis_url: str, how: str) -> None:
    """Staged work without progress, or the word SUSPECT: what waits there goes, whatever its deadline."""
    wedged = load(CALM, waiting_requests=1, stalled_ms=900.0 if how == "stalled" else 0.0, suspect=how == "suspect")
    async with cluster(redis_url, {"a/0": wedged, "b/0": CALM}) as pool, rebalancer(redis_url) as (_, stub):
        source = pool.agents["a/0"]
        if how == "ring":
            pool.states["a/0"] = InstanceState.SUSPECT
            await pool.publish()
        source.stalled_ms = 900.0 if how == "stalled" else 0.0
        source.items = [item("r1", ("a/0", "b/0"), deadline_ms=20_000)]

        found = await wait_status(stub, lambda answer: answer.moved == 1)

        assert found.last_moves[0].cause == ("stalled" if how == "stalled" else "suspect")


async def test_a_source_that_fails_stops_nobody_else(redis_url: str) -> None:
    """A queue that is not told in time costs its own moves only, and is counted."""
    rounds = RoundSettings(period_ms=20, list_timeout_ms=50)
    async with (
        cluster(redis_url, {"a/0": BUSY, "b/0": CALM, "c/0": BUSY}) as pool,
        rebalancer(redis_url, rounds) as (_, stub),
    ):
        pool.agents["c/0"].hangs = True
        pool.agents["a/0"].rest_s = 5.0
        pool.agents["a/0"].items = [item("r1", ("a/0", "b/0"))]

        found = await wait_status(stub, lambda answer: answer.moved == 1 and answer.failed_rounds > 1)

        assert found.rounds > found.failed_rounds - 1


async def test_a_batch_that_is_not_answered_is_counted_and_not_sent_again_at_once(redis_url: str) -> None:
    """Unanswered may have moved: nobody is asked for twice within the settling time."""
    rounds = RoundSettings(period_ms=20, migrate_timeout_ms=50, settle_ms=60_000)
    async with (
        cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool,
        rebalancer(redis_url, rounds) as (_, stub),
    ):
        source = pool.agents["a/0"]
        source.migrate_hangs = True
        source.rest_s = 5.0
        source.items = [item("r1", ("a/0", "b/0"))]

        found = await wait_status(stub, lambda answer: answer.failed_rounds == 1)
        listed = source.lists
        await wait_status(stub, lambda answer: source.lists > listed + 3)

        assert found.moved == 0
        assert len(source.batches) == 1


async def test_nobody_is_moved_twice_within_the_settling_time(redis_url: str) -> None:
    """Told by the agent that holds it, or known from the own last rounds."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool, rebalancer(redis_url) as (_, stub):
        source = pool.agents["a/0"]
        source.rest_s = 5.0
        source.keeps = True
        source.items = [item("r0", ("a/0", "b/0"), moved_ago_ms=10), item("r1", ("a/0", "b/0"))]

        await wait_status(stub, lambda answer: answer.moved == 1)
        listed = source.lists
        await wait_status(stub, lambda answer: source.lists > listed + 3)

        assert [[move.request_id for move in batch.items] for batch in source.batches] == [["r1"]]


async def test_a_refusal_is_an_outcome_not_a_failure(redis_url: str) -> None:
    """The source's word per item is counted as it is."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool, rebalancer(redis_url) as (_, stub):
        source = pool.agents["a/0"]
        source.rest_s = 5.0
        source.outcome = rebalancer_pb2.MOVE_OUTCOME_REFUSED
        source.items = [item("r1", ("a/0", "b/0"))]

        found = await wait_status(stub, lambda answer: len(answer.last_moves) == 1)

        assert found.last_moves[0].outcome == rebalancer_pb2.MOVE_OUTCOME_REFUSED
        assert (found.moved, found.failed_rounds) == (0, 0)


async def test_a_dry_run_plans_and_sends_nothing(redis_url: str) -> None:
    """For trying it out beside live traffic."""
    rounds = RoundSettings(period_ms=20, dry_run=True)
    async with (
        cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool,
        rebalancer(redis_url, rounds) as (_, stub),
    ):
        source = pool.agents["a/0"]
        source.rest_s = 5.0
        source.items = [item("r1", ("a/0", "b/0"))]

        found = await wait_status(stub, lambda answer: answer.planned > 2)

        assert found.dry_run
        assert found.last_moves[0].outcome == rebalancer_pb2.MOVE_OUTCOME_UNSPECIFIED
        assert source.batches == []


async def test_only_the_leader_acts_and_a_standby_plans_when_asked(redis_url: str) -> None:
    """Two rebalancers never move the same request; PlanOnce moves none."""
    async with (
        cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool,
        rebalancer(redis_url) as (_, stub),
    ):
        await wait_status(stub, lambda answer: answer.leader and answer.ring_epoch > 0)
        async with rebalancer(redis_url) as (second, standby):
            await wait_status(standby, lambda answer: answer.ring_epoch > 0)
            source = pool.agents["a/0"]
            source.keeps = True
            source.rest_s = 5.0
            source.items = [item("r1", ("a/0", "b/0"))]

            plan = await standby.PlanOnce(rebalancer_pb2.PlanOnceRequest(pool=POOL), timeout=TIMEOUT_S)

            assert [move.request_id for move in plan.moves] == ["r1"]
            assert list(plan.listed_instance_ids) == ["a/0"]
            assert not second.is_leader
            assert (await status(standby)).rounds == 0
            await wait_status(stub, lambda answer: answer.moved == 1)
            assert {batch.fencing_epoch for batch in source.batches} == {(await status(stub)).fencing_epoch}


async def test_a_draining_instance_is_left_to_itself(redis_url: str) -> None:
    """It hands its queue over by itself; two movers would race."""
    async with cluster(redis_url, {"a/0": BUSY, "b/0": CALM}) as pool:
        pool.states["a/0"] = InstanceState.DRAINING
        await pool.publish()
        async with rebalancer(redis_url) as (_, stub):
            await wait_status(stub, lambda answer: answer.rounds > 5)
            assert pool.agents["a/0"].lists == 0


async def test_before_the_first_ring_a_plan_is_unavailable(redis_url: str) -> None:
    """There is nothing to plan with, and it says so."""
    async with rebalancer(redis_url) as (app, stub):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.PlanOnce(rebalancer_pb2.PlanOnceRequest(pool=POOL), timeout=TIMEOUT_S)
        with pytest.raises(grpc.aio.AioRpcError) as elsewhere:
            await stub.GetStatus(rebalancer_pb2.GetStatusRequest(pool="elsewhere"), timeout=TIMEOUT_S)

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert elsewhere.value.code() is grpc.StatusCode.NOT_FOUND
        async with asyncio.timeout(5):
            while not app.is_leader:
                await asyncio.sleep(0.01)
