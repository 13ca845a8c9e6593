"""Membership: joined, renewed, joined again, drained, left; the last ring stays while nobody answers."""

from __future__ import annotations

import asyncio

import grpc

from dualmap.core.membership import InstanceState, RingParameters
from services.instanceagent.app import App
from tests.services.instanceagent.cluster import cluster, migrate, settings, submission, submit, until
from tests.services.instanceagent.fake_ring import FakeRing


async def test_an_agent_told_left_joins_again() -> None:
    """LEFT in an answer to Renew is followed by a Join of the same life."""
    async with cluster("a") as built:
        built.ring.members.clear()
        await until(lambda: "a/0" in built.ring.members, "joined again")
        assert built.ring.members["a/0"].agent_epoch == built.agents["a"].agent.facts.agent_epoch


async def test_an_instance_that_may_not_join_costs_the_others_no_lease() -> None:
    """One rank of an agent is refused again and again: the other is renewed all the same."""
    ring = FakeRing()
    ring.refused = frozenset({"a/1"})
    await ring.start()
    app = await App(settings(ring.address, "a", {"instances": 2})).__aenter__()
    try:
        await until(lambda: len(ring.renewed) >= 3, "renewed three times")
        assert {item.instance_id for renewal in ring.renewed for item in renewal.instances} == {"a/0"}
        assert set(ring.members) == {"a/0"}
    finally:
        await app.__aexit__(None, None, None)
        await ring.stop()


async def test_the_next_ring_manager_is_tried_and_the_last_ring_kept() -> None:
    """The first of the list is dead: the second serves; when it dies too, hand-over still finds its target."""
    ring = FakeRing()
    await ring.start()
    app = await App(settings(f"127.0.0.1:1,{ring.address}", "a")).__aenter__()
    try:
        await until(lambda: app.agent.ring is not None and "a/0" in ring.members, "joined")
        await ring.stop()
        await until(lambda: app.membership._managers.preferred is not None, "still there")
        assert app.agent.ring is not None
        assert app.agent.ring.members[0].instance_id == "a/0"
        await ring.start()
        renewed = len(ring.renewed)
        await until(lambda: len(ring.renewed) > renewed, "renewed after the ring manager's return")
    finally:
        await app.__aexit__(None, None, None)
        await ring.stop()


async def test_a_drained_instance_hands_its_queue_over_and_leaves() -> None:
    """DRAINING seen in the ring: what waits goes to another candidate, what runs ends here, then Leave."""
    async with cluster("a", "b", agent={"max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        built.pause("a")
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9))
        await until(lambda: "started" in running.kinds, "one runs")
        waiting = [submit(stub, submission(f"r{i}", seed=i)) for i in range(5)]
        await until(lambda: len(built.instance("a").held.waiting) == 5, "five wait")

        built.ring.set("a/0", state=InstanceState.DRAINING)
        for following in waiting:
            assert await following.end() is grpc.StatusCode.OK
            assert following.first("done").instance_id == "b/0"
        assert built.ring.left == []
        refused = submit(stub, submission("late"))
        assert await refused.end() is grpc.StatusCode.UNAVAILABLE

        built.resume("a")
        assert await running.end() is grpc.StatusCode.OK
        await until(lambda: built.ring.left == ["a/0"], "left once empty")
        await asyncio.sleep(0.5)
        assert "a/0" not in built.ring.members


async def test_an_undrained_instance_admits_again() -> None:
    """Back to ACTIVE before it left: as if nothing had been."""
    async with cluster("a", agent={"max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        built.pause("a")
        stub = built.stub("a")
        running = submit(stub, submission("running"))
        await until(lambda: "started" in running.kinds, "one runs")
        built.ring.set("a/0", state=InstanceState.DRAINING)
        await until(lambda: built.instance("a").draining, "draining")
        built.ring.set("a/0", state=InstanceState.ACTIVE)
        await until(lambda: not built.instance("a").draining, "not any more")
        built.resume("a")
        assert await submit(stub, submission("r1")).end() is grpc.StatusCode.OK


async def test_a_stop_announces_hands_over_finishes_and_leaves() -> None:
    """SIGTERM's path: Drain at the ring manager, the queue elsewhere, the running to their end, Leave."""
    async with cluster("a", "b", agent={"max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        built.pause("a")
        stub = built.stub("a")
        running = submit(stub, submission("running", seed=9))
        await until(lambda: "started" in running.kinds, "one runs")
        waiting = submit(stub, submission("waits"))
        await until(lambda: bool(built.instance("a").held.waiting), "one waits")

        stopping = asyncio.ensure_future(built.agents["a"].drain())
        assert await waiting.end() is grpc.StatusCode.OK
        assert waiting.first("done").instance_id == "b/0"
        assert built.ring.drained == ["a/0"]
        built.resume("a")
        assert await running.end() is grpc.StatusCode.OK
        await stopping
        assert built.ring.left == ["a/0"]


async def test_a_drain_of_a_taken_in_request_goes_back_through_its_origin() -> None:
    """B drains what came by Accept: RETURNED, and the origin runs it."""
    async with cluster("a", "b", agent={"max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        built.pause("a", "b")
        for name in ("a", "b"):
            blocker = submit(built.stub(name), submission(f"blocker-{name}", seed=9))
            await until(lambda blocker=blocker: "started" in blocker.kinds, "full")  # type: ignore[misc]
        following = submit(built.stub("a"), submission("r1"))
        await until(lambda: ("r1", 1) in built.instance("a").held.waiting, "waits")
        assert await migrate(built.stub("a"), "a/0", "b/0", "r1") == ["MOVED"]
        built.ring.set("b/0", state=InstanceState.DRAINING)
        await until(lambda: ("r1", 1) in built.instance("a").held.waiting, "back at its origin")
        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK
        assert following.first("done").instance_id == "a/0"


async def test_new_ring_parameters_begin_a_new_life_of_the_index() -> None:
    """Hashes of another block size mean nothing: a new incarnation, empty."""
    async with cluster("a") as built:
        assert await submit(built.stub("a"), submission("r1")).end() is grpc.StatusCode.OK
        state = built.instance("a").state
        before = state.incarnation
        assert len(state.kv) == 2
        built.ring.parameters = RingParameters(block_tokens=64)
        built.ring.set("a/0")
        await until(lambda: state.incarnation > before, "a new life")
        assert len(state.kv) == 0
        assert await submit(built.stub("a"), submission("r2")).end() is grpc.StatusCode.OK
        assert len(state.kv) == 4


async def test_a_watch_that_is_stuck_is_opened_anew() -> None:
    """Renew speaks of a newer ring than the watch brought: another watch brings it, well before the silence is over."""
    async with cluster("a") as built:
        built.ring.stuck_watches = True
        for weight in (2.0, 3.0):
            built.ring.set("b/0", grpc_address="127.0.0.1:1", weight=weight)
        epoch = built.ring.epoch
        await until(lambda: built.agents["a"].agent.ring.epoch >= epoch, "the newer ring")  # type: ignore[union-attr]
