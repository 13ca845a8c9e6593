"""Submit: events in order, one run an attempt, bounds, cancels, tickets, state."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from dualmap.v1 import agent_pb2, state_pb2, types_pb2
from tests.services.instanceagent.cluster import Cluster, cluster, submission, submit, until


async def _state(built: Cluster, name: str, **fields: object) -> state_pb2.StateUpdate:
    answer = await built.stub(name).GetState(agent_pb2.GetStateRequest(**fields), timeout=5)  # type: ignore[arg-type]
    update: state_pb2.StateUpdate = answer.update
    return update


async def test_a_request_is_told_from_queue_to_end_with_its_hits() -> None:
    """QUEUED, STARTED, FIRST_TOKEN, TOKENS, DONE in order; a second one with the same prompt hits whole blocks."""
    async with cluster("a") as built:
        stub = built.stub("a")
        first = submit(stub, submission("r1"))

        assert await first.end() is grpc.StatusCode.OK
        assert first.kinds[:3] == ["queued", "started", "first_token"]
        assert first.kinds[-1] == "done"
        assert set(first.kinds[3:-1]) == {"tokens"}
        done = first.first("done")
        assert (done.instance_id, done.prompt_tokens, done.hit_tokens, done.output_tokens) == ("a/0", 256, 0, 4)
        assert 0 <= done.waited_ms <= done.ttft_ms <= done.total_ms

        second = submit(stub, submission("r2"))
        assert await second.end() is grpc.StatusCode.OK
        assert second.first("first_token").hit_tokens == 256


async def test_state_is_whole_first_then_changes_and_a_long_poll_answers_at_the_first_change() -> None:
    """GetState since a version carries what changed after it; an unknown base gets everything."""
    async with cluster("a") as built:
        stub = built.stub("a")
        before = await _state(built, "a")
        assert before.full
        poll = asyncio.ensure_future(
            _state(
                built,
                "a",
                incarnation=before.incarnation,
                agent_epoch=before.agent_epoch,
                since_version=before.version,
                wait_ms=1_000,
            )
        )
        run = submit(stub, submission("r1"))
        change = await poll
        assert not change.full
        assert change.since == before.version < change.version

        await run.end()
        after = await _state(
            built,
            "a",
            incarnation=before.incarnation,
            agent_epoch=before.agent_epoch,
            since_version=before.version,
        )
        assert len(after.changes.changes) == 2 * 9
        assert after.kv_blocks == 2
        assert after.load.finished == 1
        assert (await _state(built, "a", incarnation=1, since_version=after.version)).full


async def test_a_deadline_counts_from_when_the_caller_first_asked() -> None:
    """A later attempt brings its age: of 5 s it has 1 s left after 4 s, and what it waited here counts from now."""
    async with cluster("a") as built:
        stub = built.stub("a")
        built.pause("a")
        running = submit(stub, submission("staged"))
        await until(lambda: "started" in running.kinds, "the engine is busy")
        late = submit(stub, submission("late", seed=2, count=30_000, attempt=2, age_ms=4_000))
        await until(lambda: "queued" in late.kinds, "it waits")
        listed = await stub.ListQueue(agent_pb2.ListQueueRequest(instance_id="a/0"), timeout=5)

        assert [item.request_id for item in listed.items] == ["late"]
        assert 0 < listed.items[0].deadline_ms <= 1_000
        assert listed.items[0].age_ms < 4_000
        built.resume("a")
        assert await running.end() is grpc.StatusCode.OK
        assert await late.end() is grpc.StatusCode.OK


async def test_an_attempt_never_runs_twice() -> None:
    """Held or ended: ALREADY_EXISTS; a lower attempt after a higher: ABORTED."""
    async with cluster("a") as built:
        stub = built.stub("a")
        built.pause("a")
        held = submit(stub, submission("r1", attempt=2))
        await until(lambda: bool(held.messages), "it is held")

        assert await submit(stub, submission("r1", attempt=2)).end() is grpc.StatusCode.ALREADY_EXISTS
        assert await submit(stub, submission("r1", attempt=1)).end() is grpc.StatusCode.ABORTED

        built.resume("a")
        assert await held.end() is grpc.StatusCode.OK
        assert await submit(stub, submission("r1", attempt=2)).end() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_higher_attempt_takes_the_place_of_a_lower_one() -> None:
    """The lower attempt ends ABORTED and leaves the engine."""
    async with cluster("a") as built:
        stub = built.stub("a")
        built.pause("a")
        lower = submit(stub, submission("r1"))
        await until(lambda: "started" in lower.kinds, "it is staged")
        higher = submit(stub, submission("r1", attempt=2))

        assert await lower.end() is grpc.StatusCode.ABORTED
        built.resume("a")
        assert await higher.end() is grpc.StatusCode.OK
        assert built.instance("a").counters.finished == 1


async def test_a_client_that_goes_leaves_nothing_behind() -> None:
    """Cancelled while waiting or staged: gone from queue and engine, and its attempt is spent."""
    async with cluster("a", agent={"max_sequences": 1}) as built:
        stub = built.stub("a")
        built.pause("a")
        staged = submit(stub, submission("r1"))
        await until(lambda: "started" in staged.kinds, "one is staged")
        waiting = submit(stub, submission("r2", seed=2))
        await until(lambda: bool(built.instance("a").held.waiting), "one waits")

        staged.call.cancel()
        waiting.call.cancel()

        await until(lambda: built.instance("a").empty, "nothing is held")
        built.resume("a")
        assert await submit(stub, submission("r1")).end() is grpc.StatusCode.ALREADY_EXISTS


async def test_a_full_queue_refuses_with_a_delay_and_says_so_in_its_load() -> None:
    """RESOURCE_EXHAUSTED, nothing queued, admitting false."""
    async with cluster("a", agent={"max_waiting_requests": 2, "max_sequences": 1}) as built:
        stub = built.stub("a")
        built.pause("a")
        first = submit(stub, submission("r0"))
        await until(lambda: "started" in first.kinds, "one is staged")
        waiting = [submit(stub, submission(f"r{i}", seed=i)) for i in range(1, 3)]
        await until(lambda: len(built.instance("a").held.waiting) == 2, "two wait")

        refused = submit(stub, submission("r3", seed=3))
        assert await refused.end() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not (await _state(built, "a")).load.admitting

        built.resume("a")
        for following in [first, *waiting]:
            assert await following.end() is grpc.StatusCode.OK


async def test_who_waits_too_long_is_told() -> None:
    """After max_wait: RESOURCE_EXHAUSTED, not silence."""
    async with cluster("a", agent={"max_wait_ms": 5_000, "max_sequences": 1, "suspect_after_ms": 60_000}) as built:
        stub = built.stub("a")
        built.instance("a")._queue.bounds = type(built.instance("a")._queue.bounds)(1 << 62, 1 << 62, 300.0)
        built.pause("a")
        staged = submit(stub, submission("r1"))
        await until(lambda: "started" in staged.kinds, "one is staged")

        assert await submit(stub, submission("r2", seed=2)).end() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_silence_never_lasts_a_second() -> None:
    """Pulses come while a request only waits."""
    async with cluster("a") as built:
        built.pause("a")
        following = submit(built.stub("a"), submission("r1"))
        await until(lambda: [e.WhichOneof("event") for e in following.events].count("pulse") >= 2, "two pulses", 3.0)
        following.call.cancel()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (agent_pb2.SubmitRequest(prompt=types_pb2.Prompt(text="x")), "request_id"),
        (agent_pb2.SubmitRequest(request_id="r"), "prompt"),
        (agent_pb2.SubmitRequest(request_id="r", prompt=types_pb2.Prompt(token_ids=b"123")), "prompt.token_ids"),
        (submission("r", priority=3), "priority"),
        (submission("r", openai=agent_pb2.OpenAiBody(path="/x")), "openai.path"),
        (submission("r", ticket=types_pb2.Ticket(router_id=1, instance_id="a/0")), "ticket.sequence"),
    ],
)
async def test_a_malformed_request_names_its_field(request_: agent_pb2.SubmitRequest, field: str) -> None:
    """INVALID_ARGUMENT with the field first."""
    async with cluster("a") as built:
        following = submit(built.stub("a"), request_)
        assert await following.end() is grpc.StatusCode.INVALID_ARGUMENT
        assert following.details.startswith(f"{field}:")


async def test_two_prompts_in_one_message_are_refused_by_name() -> None:
    """A plain reader would keep the last in silence."""
    raw = submission("r").SerializeToString()
    raw += agent_pb2.SubmitRequest(prompt=types_pb2.Prompt(text="x")).SerializeToString()
    async with cluster("a") as built, grpc.aio.insecure_channel(f"127.0.0.1:{built.agents['a'].port}") as channel:
        submit_raw: Any = channel.unary_stream("/dualmap.v1.InstanceAgent/Submit")
        call = submit_raw(raw)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("prompt:")


async def test_an_unknown_model_is_not_found_and_the_known_ones_are_named() -> None:
    """NOT_FOUND."""
    async with cluster("a") as built:
        following = submit(built.stub("a"), submission("r", model="other"))
        assert await following.end() is grpc.StatusCode.NOT_FOUND
        assert "default" in following.details


async def test_tickets_count_for_the_instance_and_life_they_name_only() -> None:
    """A ticket of this life is covered; one of another life, or for another instance, is void; the request runs."""
    async with cluster("a") as built:
        stub = built.stub("a")
        epoch = built.agents["a"].agent.facts.agent_epoch
        tickets = [
            types_pb2.Ticket(router_id=7, instance_id="a/0", agent_epoch=epoch, sequence=1),
            types_pb2.Ticket(router_id=8, instance_id="a/0", agent_epoch=epoch - 1, sequence=1),
            types_pb2.Ticket(router_id=9, instance_id="b/0", agent_epoch=epoch, sequence=1),
        ]
        for number, ticket in enumerate(tickets):
            assert await submit(stub, submission(f"r{number}", ticket=ticket)).end() is grpc.StatusCode.OK
        seen = (await _state(built, "a")).load.tickets
        assert [(ticket.router_id, ticket.watermark) for ticket in seen] == [(7, 1)]


async def test_tickets_of_other_ring_parameters_are_refused_by_name() -> None:
    """FAILED_PRECONDITION naming the field: never a silent miss."""
    async with cluster("a") as built:
        ticket = types_pb2.Ticket(router_id=7, instance_id="a/0", agent_epoch=1, sequence=1, parameters_digest=5)
        following = submit(built.stub("a"), submission("r", ticket=ticket))
        assert await following.end() is grpc.StatusCode.FAILED_PRECONDITION
        assert "parameters_digest" in following.details


async def test_a_wedged_engine_makes_the_instance_suspect_and_it_returns_by_itself() -> None:
    """SUSPECT in load and Renew after the stated silence; over as soon as the engine moves."""
    async with cluster("a", agent={"suspect_after_ms": 600}) as built:
        stub = built.stub("a")
        built.pause("a")
        following = submit(stub, submission("r1"))
        await until(lambda: built.instance("a").suspect, "suspect")
        await until(lambda: any(r.instances[0].suspect for r in built.ring.renewed), "the ring manager hears of it")
        load = (await _state(built, "a")).load
        assert load.suspect
        assert load.stalled_ms > 500

        built.resume("a")
        assert await following.end() is grpc.StatusCode.OK
        await until(lambda: not built.instance("a").suspect, "suspect no more")


async def test_ranks_of_one_agent_are_apart() -> None:
    """Two instances: one must be named; each has its own cache."""
    async with cluster("a", agent={"instances": 2}) as built:
        stub = built.stub("a")
        unnamed = submit(stub, submission("r0"))
        assert await unnamed.end() is grpc.StatusCode.INVALID_ARGUMENT
        assert await submit(stub, submission("r1", instance_id="a/1")).end() is grpc.StatusCode.OK
        other = submit(stub, submission("r2", instance_id="a/0"))
        assert await other.end() is grpc.StatusCode.OK
        assert other.first("first_token").hit_tokens == 0


async def test_a_burst_is_queued_whole() -> None:
    """Two thousand in the same instant: each is served, none is dropped on the way in."""
    async with cluster("a", engine={"prefill_ms": 0.1, "prefill_us_per_token": 0.1, "output_tokens": 1}) as built:
        stub = built.stub("a")
        clients = [submit(stub, submission(f"r{i}", seed=i % 10)) for i in range(2_000)]
        for client in clients:
            assert await client.end(60) is grpc.StatusCode.OK
