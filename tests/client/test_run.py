"""Running a request: at its instance, else at the backup, else by a new route; never twice once a token is out."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from time import monotonic

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualmap.client import (
    CallFailed,
    ClientOptions,
    Done,
    DualMapClient,
    FirstToken,
    OpenAiBody,
    Prompt,
    Pulse,
    Queued,
    Request,
    Started,
    Tokens,
)
from dualmap.core.errors import AbortedAttempt, InvalidRequest, Overloaded, Superseded, Unavailable, UnknownInstance
from tests.client.fakes import (
    FakeAgent,
    FakeRouter,
    answers_well,
    ends_early,
    fails_with,
    falls_silent,
    first_token,
    queued,
    serving,
)

REQUEST = Request("r", Prompt.of_tokens(range(300)))
QUICK = ClientOptions(silence_s=0.3)


async def test_all_events_of_a_request_come_as_values() -> None:
    """Route, submit with the ticket as it is, events to the end."""
    agent = FakeAgent("a/0", answers_well)
    router = FakeRouter((agent, None))
    request = Request(
        "r",
        Prompt.of_hashes([1, 2], 300),
        lora="l",
        max_output_tokens=7,
        ttft_slo_ms=900,
        priority=1,
        openai=OpenAiBody("/v1/completions", b"{}", {"x": "y"}),
    )
    async with serving(agent, router), DualMapClient([router.address]) as client:
        events = [event async for event in client.run(request, timeout_s=10)]

    assert [type(event) for event in events] == [Queued, Started, FirstToken, Pulse, Tokens, Done]
    (submitted,) = agent.submitted
    assert (submitted.request_id, submitted.attempt, submitted.instance_id) == ("r", 1, "a/0")
    assert submitted.ticket.sequence == 1
    assert submitted.prompt.block_hashes.prompt_tokens == 300
    assert (submitted.lora, submitted.max_output_tokens, submitted.ttft_slo_ms, submitted.priority) == ("l", 7, 900, 1)
    assert (submitted.openai.path, dict(submitted.openai.headers)) == ("/v1/completions", {"x": "y"})


async def test_a_completion_gathers_the_data() -> None:
    """`complete` waits for the end and gives all of it in order."""
    agent = FakeAgent("a/0", answers_well)
    router = FakeRouter((agent, None))
    async with serving(agent, router), DualMapClient([router.address]) as client:
        completion = await client.complete(REQUEST, timeout_s=10)

    assert completion.data == b"ab"
    assert completion.done.finish_reason == "stop"
    assert completion.first_token is not None
    assert completion.first_token.hit_tokens == 256
    assert (completion.attempt, completion.route.reason) == (1, "CACHE_HIT")


@pytest.mark.parametrize("script", [fails_with(Unavailable("engine", 50)), ends_early, falls_silent])
async def test_a_failure_before_the_first_token_goes_to_the_backup(script: object) -> None:
    """Same ticket, attempt + 1, whether the agent refused, broke off or fell silent."""
    bad, good = FakeAgent("bad/0", script), FakeAgent("good/0", answers_well)  # type: ignore[arg-type]
    router = FakeRouter((bad, good))
    async with serving(bad, good, router), DualMapClient([router.address], QUICK) as client:
        completion = await client.complete(REQUEST, timeout_s=10)

    assert completion.attempt == 2
    (first,), (second,) = bad.submitted, good.submitted
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.ticket == second.ticket
    assert len(router.asked) == 1


async def test_a_dead_agent_is_passed_over() -> None:
    """Nobody listening there is a failure like any other."""
    dead, good = FakeAgent("dead/0", answers_well), FakeAgent("good/0", answers_well)
    dead.address = "127.0.0.1:1"
    router = FakeRouter((dead, good))
    async with serving(good, router), DualMapClient([router.address]) as client:
        assert (await client.complete(REQUEST, timeout_s=10)).attempt == 2


@pytest.mark.parametrize("script", [fails_with(Unavailable("engine", 50), queued(), first_token())])
async def test_after_the_first_token_nothing_is_run_again(script: object) -> None:
    """A token that reached the client is never followed by those of another run."""
    bad, good = FakeAgent("bad/0", script), FakeAgent("good/0", answers_well)  # type: ignore[arg-type]
    router = FakeRouter((bad, good))
    async with serving(bad, good, router), DualMapClient([router.address]) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(REQUEST, timeout_s=10)

    assert failed.value.code == "UNAVAILABLE"
    assert good.submitted == []


async def test_when_both_fail_a_new_route_with_a_higher_attempt_is_asked() -> None:
    """Attempts 1 and 2 were used; the next route is 3, and avoids who failed."""
    bad = [FakeAgent(f"bad{n}/0", fails_with(Unavailable("engine", 20))) for n in range(2)]
    good = FakeAgent("good/0", answers_well)
    router = FakeRouter((bad[0], bad[1]), (good, None))
    async with serving(*bad, good, router), DualMapClient([router.address]) as client:
        completion = await client.complete(REQUEST, timeout_s=10)

    assert completion.attempt == 3
    assert [asked.attempt for asked in router.asked] == [1, 3]
    assert list(router.asked[1].exclude_instance_ids) == ["bad0/0", "bad1/0"]
    assert good.submitted[0].attempt == 3


async def test_full_agents_are_given_the_time_they_asked_for() -> None:
    """RESOURCE_EXHAUSTED at both: the new route comes after the advised delay, and may use them again."""
    full = FakeAgent("full/0", fails_with(Overloaded(200, "queue")))
    good = FakeAgent("good/0", answers_well)
    router = FakeRouter((full, None), (good, None))
    async with serving(full, good, router), DualMapClient([router.address]) as client:
        began_s = monotonic()
        await client.complete(REQUEST, timeout_s=10)

    assert monotonic() - began_s >= 0.2
    assert list(router.asked[1].exclude_instance_ids) == []


async def test_a_later_attempt_says_how_long_ago_the_request_was_asked_for() -> None:
    """Its deadline counts from the first attempt: waiting in vain takes no time from others."""
    full = FakeAgent("full/0", fails_with(Overloaded(200, "queue")))
    good = FakeAgent("good/0", answers_well)
    router = FakeRouter((full, None), (good, None))
    async with serving(full, good, router), DualMapClient([router.address]) as client:
        await client.complete(Request("r", REQUEST.prompt, age_ms=1_000), timeout_s=10)

    assert 1_000 <= full.submitted[0].age_ms < 1_200 <= good.submitted[0].age_ms


async def test_advice_beyond_the_deadline_is_not_waited_for() -> None:
    """The caller hears at once that the time will not do."""
    full = FakeAgent("full/0", fails_with(Overloaded(9_000, "queue")))
    router = FakeRouter((full, None))
    async with serving(full, router), DualMapClient([router.address]) as client:
        began_s = monotonic()
        with pytest.raises(CallFailed) as failed:
            await client.complete(REQUEST, timeout_s=2)

    assert monotonic() - began_s < 1.5
    assert (failed.value.code, failed.value.retry_after_ms) == ("RESOURCE_EXHAUSTED", 9_000)


@pytest.mark.parametrize("error", [InvalidRequest("prompt", "is bad"), Superseded("r", 1)])
async def test_what_no_other_instance_can_make_good_is_told_at_once(error: InvalidRequest | Superseded) -> None:
    """A wrong request and a superseded one are not retried."""
    bad, other = FakeAgent("bad/0", fails_with(error)), FakeAgent("other/0", answers_well)
    router = FakeRouter((bad, other))
    async with serving(bad, other, router), DualMapClient([router.address]) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(REQUEST, timeout_s=10)

    assert failed.value.reason == error.reason
    assert other.submitted == []


async def test_an_instance_that_its_agent_lost_is_passed_over() -> None:
    """An agent restarted with other instances says NOT_FOUND; the backup takes the request."""
    lost, good = FakeAgent("lost/0", fails_with(UnknownInstance("lost/0"))), FakeAgent("good/0", answers_well)
    router = FakeRouter((lost, good))
    async with serving(lost, good, router), DualMapClient([router.address]) as client:
        assert (await client.complete(REQUEST, timeout_s=10)).attempt == 2


async def test_routes_of_one_request_are_bounded() -> None:
    """A pool in which everything fails ends in the last failure, not in a loop."""
    bad = FakeAgent("bad/0", fails_with(Unavailable("engine", 1)))
    router = FakeRouter((bad, None))
    async with serving(bad, router), DualMapClient([router.address], ClientOptions(routes=3)) as client:
        with pytest.raises(CallFailed):
            await client.complete(REQUEST, timeout_s=10)

    assert [asked.attempt for asked in router.asked] == [1, 2, 3]


async def test_an_aborted_route_is_repeated_as_the_next_attempt() -> None:
    """ABORTED says how to go on: attempt + 1."""
    good = FakeAgent("good/0", answers_well)
    router = FakeRouter(AbortedAttempt("r", 1, "went away"), (good, None))
    async with serving(good, router), DualMapClient([router.address]) as client:
        assert (await client.complete(REQUEST, timeout_s=10)).attempt == 2


async def test_a_request_ends_with_its_callers_time() -> None:
    """DEADLINE_EXCEEDED, though the agent still shows signs of life; the agent hears of it."""
    agent = FakeAgent("a/0", falls_silent)
    router = FakeRouter((agent, None))
    async with serving(agent, router), DualMapClient([router.address]) as client:
        with pytest.raises(CallFailed) as failed:
            await client.complete(REQUEST, timeout_s=0.4)
        await asyncio.wait_for(agent.cancelled.wait(), 5)

    assert failed.value.code == "DEADLINE_EXCEEDED"


async def test_a_client_that_leaves_cancels_its_request() -> None:
    """Closing the iterator ends the Submit stream, so that the agent can drop the work."""
    agent = FakeAgent("a/0", falls_silent)
    router = FakeRouter((agent, None))
    async with serving(agent, router), DualMapClient([router.address]) as client:
        async with aclosing(client.run(REQUEST, timeout_s=10)) as events:
            assert isinstance(await anext(events), Queued)
        await asyncio.wait_for(agent.cancelled.wait(), 5)


async def test_route_and_submit_can_be_done_apart() -> None:
    """The parts are there for callers with a mind of their own: instance, then backup."""
    first, second = FakeAgent("a/0", ends_early), FakeAgent("b/0", answers_well)
    router = FakeRouter((first, second))
    async with serving(first, second, router), DualMapClient([router.address]) as client:
        route = await client.route(REQUEST, timeout_s=5)
        with pytest.raises(CallFailed):
            [event async for event in client.submit(route, REQUEST, timeout_s=5)]
        events = [event async for event in client.submit(route, REQUEST, timeout_s=5, backup=True)]

    assert isinstance(events[-1], Done)
    assert second.submitted[0].attempt == 2
    assert route.ticket_header


async def test_the_context_goes_from_client_to_route_and_from_the_ticket_to_submit() -> None:
    """One trace: the client's span is Route's parent, the ticket's context is Submit's."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    agent = FakeAgent("a/0", answers_well)
    router = FakeRouter((agent, None))
    router.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(agent, router), DualMapClient([router.address], tracer=provider.get_tracer("t")) as client:
        await client.complete(REQUEST, timeout_s=10)
        router.traceparent = ""
        await client.complete(REQUEST, timeout_s=10)

    traced, untraced = exporter.get_finished_spans()
    assert traced.context is not None
    assert untraced.context is not None
    assert router.metadata[0]["traceparent"].split("-")[2] == f"{traced.context.span_id:016x}"
    assert agent.metadata[0]["traceparent"] == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert agent.metadata[1]["traceparent"].split("-")[2] == f"{untraced.context.span_id:016x}"
    assert dict(traced.attributes or {})["gen_ai.usage.input_tokens"] == 0
