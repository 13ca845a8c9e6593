"""The front door: any agent takes any request, and it runs where a router says, or as near as can be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dualmap.core.errors import NoInstance, Overloaded
from dualmap.core.membership import InstanceState, RingParameters
from dualmap.runtime.telemetry import Telemetry
from dualmap.v1 import agent_pb2
from tests.services.instanceagent.cluster import accepted, scripted, submission, submit, told, until
from tests.services.instanceagent.fake_ring import FakeRing
from tests.services.instanceagent.openai_cluster import TRACEPARENT, OpenAiCluster, chat, openai_cluster

Answers = AsyncIterator[agent_pb2.AcceptResponse]


async def _ask(client: openai.AsyncOpenAI, seed: int = 1, words: int = 300, **more: Any) -> tuple[str, Any]:
    """A streamed chat: its text, its headers."""
    raw = await client.chat.completions.with_raw_response.create(
        model="default", messages=chat(seed, words), max_tokens=4, stream=True, **more
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in raw.parse()])
    return text, raw.headers


def _fill(built: OpenAiCluster, *names: str) -> None:
    """These take nothing more."""
    for name in names:
        instance = built.built.instance(name)
        instance._options = replace(instance._options, max_waiting_requests=0)


async def test_a_request_runs_where_the_router_says_whichever_agent_it_comes_to() -> None:
    """Through a, b and c alike: served at b, hashed alike, the booking covered there, nothing kept at the others."""
    async with openai_cluster("a", "b", "c", place=lambda _: ("b/0", "c/0")) as built:
        for name in ("a", "b", "c"):
            text, headers = await _ask(built.client(name))
            assert text == " w1 w2 w3 w4"
            assert headers["x-dualmap-instance"] == "b/0"
            assert headers["x-dualmap-reason"] == "CACHE_HIT"
            assert (int(headers["x-dualmap-hit-tokens"]) > 0) is (name != "a")
        hashes = {tuple(request.prompt.block_hashes.hashes) for request in built.router.asked}
        assert len(hashes) == 1
        assert all(not request.HasField("prompt") or not request.prompt.token_ids for request in built.router.asked)
        assert [seen.watermark for seen in built.built.instance("b").load().tickets] == [3]
        assert [built.built.instance(name).counters.finished for name in "abc"] == [0, 3, 0]
        assert built.counted("a", "front_door_requests") == {"handed_over": 1}
        assert built.counted("b", "front_door_requests") == {"here": 1}
        assert all(built.built.instance(name).empty for name in "abc")


async def test_an_answer_that_is_not_streamed_passes_through_whole() -> None:
    """The relayed body is the one that the engine's agent made."""
    async with openai_cluster("a", "b", place=lambda _: ("b/0", None)) as built:
        raw = await built.client("a").chat.completions.with_raw_response.create(
            model="default", messages=chat(), max_tokens=3
        )
        assert raw.headers["x-dualmap-instance"] == "b/0"
        assert raw.parse().choices[0].message.content == " w1 w2 w3"


async def test_where_the_chosen_refuses_the_backup_serves() -> None:
    """One that is full refuses: c, with the reason of the route; the client notices nothing."""
    async with openai_cluster("a", "b", "c", place=lambda _: ("b/0", "c/0")) as built:
        _fill(built, "b")
        _, headers = await _ask(built.client("a"))
        assert headers["x-dualmap-instance"] == "c/0"
        assert built.counted("a", "front_door_requests") == {"backup": 1}


async def test_where_all_refuse_the_own_queue_serves() -> None:
    """Chosen and backup are full: a itself, DEGRADED and counted."""
    async with openai_cluster("a", "b", "c", place=lambda _: ("b/0", "c/0")) as built:
        _fill(built, "b", "c")
        _, headers = await _ask(built.client("a"))
        assert headers["x-dualmap-instance"] == "a/0"
        assert headers["x-dualmap-reason"] == "DEGRADED"
        assert built.counted("a", "front_door_requests") == {"own_queue": 1}


async def test_where_nobody_can_serve_the_client_is_told_when_to_come_again() -> None:
    """All are full: 429 with a delay, and nothing is left behind."""
    async with openai_cluster("a", "b", place=lambda _: ("b/0", "a/0")) as built:
        _fill(built, "a", "b")
        with pytest.raises(openai.RateLimitError) as refused:
            await _ask(built.client("a"))
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        assert all(built.built.instance(name).empty for name in "ab")


@pytest.mark.parametrize("case", ["dead", "silent", "none known", "knows no instance"])
async def test_no_router_costs_two_hundred_milliseconds_at_most(case: str) -> None:
    """Dead, silent, never configured, or without an instance: the own queue serves, DEGRADED and counted."""
    design = {"route_within_ms": 200}
    agent = {"routers": ""} if case == "none known" else {}
    async with openai_cluster("a", agent=agent, http=design, place=lambda _: NoInstance(500)) as built:
        if case == "dead":
            await built.router.stop()
        elif case == "silent":
            built.router.answers.clear()
        began_s = time.monotonic()
        _, headers = await _ask(built.client("a"))
        took_s = time.monotonic() - began_s
        assert headers["x-dualmap-instance"] == "a/0"
        assert headers["x-dualmap-reason"] == "DEGRADED"
        reason = "no_router_known" if case == "none known" else "no_router"
        assert built.counted("a", "front_door_requests") == {reason: 1}
        assert took_s < 1.0, "200 ms for the router, the rest for a slow machine"
        built.router.answers.set()


async def test_a_dead_router_is_passed_over_for_the_next() -> None:
    """The second of two answers within the same 200 ms; nothing is DEGRADED."""
    async with openai_cluster("a", "b", place=lambda _: ("b/0", None)) as second:
        routers = f"127.0.0.1:9,{second.router.address}"
        async with openai_cluster("c", agent={"routers": routers}) as third:
            third.router.ring = second.built.ring
            second.router.place = lambda _: ("c/0", None)
            second.router.ring = third.built.ring
            for _ in range(4):
                _, headers = await _ask(third.client("c"))
                assert headers["x-dualmap-reason"] == "CACHE_HIT"
            assert third.counted("c", "front_door_requests") == {"here": 4}


async def test_a_router_that_says_all_are_full_is_believed() -> None:
    """An early 429 with the router's own delay, not one more request in a full queue."""
    async with openai_cluster("a", place=lambda _: Overloaded(15_000, "every instance is full")) as built:
        with pytest.raises(openai.RateLimitError) as refused:
            await _ask(built.client("a"))
        assert refused.value.response.headers["retry-after-ms"] == "15000"
        assert refused.value.response.headers["Retry-After"] == "15"
        assert built.counted("a", "front_door_requests") == {"refused_by_router": 1}


async def test_hints_of_another_ring_are_left_alone() -> None:
    """The router went on to other ring parameters first: the own queue, counted, and no error."""
    async with openai_cluster("a", "b", place=lambda _: ("b/0", None)) as built:
        built.router.ring = FakeRing()
        built.router.ring.members = built.built.ring.members
        built.router.ring.parameters = RingParameters(block_tokens=64)
        _, headers = await _ask(built.client("a"))
        assert headers["x-dualmap-instance"] == "a/0"
        assert headers["x-dualmap-reason"] == "DEGRADED"
        assert built.counted("a", "front_door_requests") == {"other_parameters": 1}


async def test_an_adapter_is_a_model_of_its_own_to_the_client_and_a_lora_to_the_router() -> None:
    """Its name is listed with its base, its prompts share no hash with the base's."""
    async with openai_cluster("a", http={"loras": ["ad"]}) as built:
        client = built.client("a")
        assert [model.id for model in (await client.models.list()).data] == ["default", "ad"]
        for model in ("default", "ad"):
            await client.chat.completions.create(model=model, messages=chat())
        assert [(request.model, request.lora) for request in built.router.asked] == [("default", ""), ("default", "ad")]
        base, adapter = (set(request.prompt.block_hashes.hashes) for request in built.router.asked)
        assert base
        assert not base & adapter


async def test_the_time_before_the_queue_counts_against_the_deadline() -> None:
    """A router's 100 ms are part of the wait that the client sees."""
    async with openai_cluster("a") as built:
        built.built.pause("a")
        built.router.answers.clear()
        task = asyncio.ensure_future(_ask(built.client("a")))
        await until(lambda: bool(built.router.asked), "the router is asked")
        await asyncio.sleep(0.08)
        built.router.answers.set()
        held = built.built.instance("a").held
        await until(lambda: bool(held.jobs), "it is in the engine")
        request = next(iter(held.jobs.values()))
        now_ms = built.built.instance("a").now_ms
        assert request.since_submission_ms(now_ms) >= 80
        assert request.waiting.deadline_ms - request.waiting.submitted_ms == pytest.approx(5_000)
        built.built.resume("a")
        await task


def _work(instance: Any) -> int:
    model = instance.engine._engine.model
    return int(model.staged_requests) + int(model.running_requests)


async def _engine_is_freed(built: OpenAiCluster, task: asyncio.Task[Any], *names: str) -> float:
    """Cancel the client; seconds until no agent holds anything."""
    instances = [built.built.instance(name) for name in names]
    began_s = time.monotonic()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: all(i.empty and not _work(i) for i in instances), "all is freed", 5)
    return time.monotonic() - began_s


@pytest.mark.parametrize("phase", ["before the first token", "while it streams"])
@pytest.mark.parametrize("served_at", ["a", "b"])
async def test_a_client_that_goes_frees_the_engine_at_once(served_at: str, phase: str) -> None:
    """Its connection closed, the engine is free within 200 ms: served here or relayed, before or after a token."""
    slow = {"decode_tokens_per_s": 20.0}
    async with openai_cluster("a", "b", place=lambda _: (f"{served_at}/0", None), engine=slow) as built:
        held = built.built.instance(served_at).held
        if phase == "before the first token":
            built.built.pause(served_at)
        streaming = asyncio.Event()

        async def follow() -> None:
            client = built.client("a")
            stream = await client.chat.completions.create(
                model="default", messages=chat(), stream=True, max_tokens=1_000
            )
            async for _ in stream:
                streaming.set()

        took_s = []
        for _ in range(3):
            task = asyncio.ensure_future(follow())
            if phase == "before the first token":
                await until(lambda: bool(held.jobs), "the engine has it")
            else:
                await asyncio.wait_for(streaming.wait(), 10)
            took_s.append(await _engine_is_freed(built, task, "a", "b"))
            streaming.clear()
        assert min(took_s) < 0.2


async def test_a_target_that_dies_before_the_first_token_costs_nothing() -> None:
    """The origin has all of the request: it serves it itself."""

    async def breaks(_request: agent_pb2.AcceptRequest, context: Any) -> Answers:
        yield accepted()
        yield told(queued=agent_pb2.Queued(instance_id="s/0"))
        await context.abort(grpc.StatusCode.INTERNAL, "gone")

    async with (
        openai_cluster("a", place=lambda _: ("s/0", "a/0")) as built,
        scripted(built.built.ring, "s/0", breaks),
    ):
        await until(lambda: built.built.agents["a"].handovers._candidates.eligible("s/0"), "s is known")
        text, headers = await _ask(built.client("a"))
        assert text == " w1 w2 w3 w4"
        assert headers["x-dualmap-instance"] == "a/0"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_target_that_dies_after_the_first_token_is_told_and_never_said_twice(stream: bool) -> None:
    """A stream gets an error event; a body that ends early is a broken connection, never half an answer."""

    async def breaks(_request: agent_pb2.AcceptRequest, context: Any) -> Answers:
        yield accepted()
        yield told(first_token=agent_pb2.FirstToken(instance_id="s/0", prompt_tokens=300))
        data = b'data: {"choices": [{"index": 0, "delta": {"content": "one"}}]}\n\n' if stream else b'{"id": '
        yield told(http_chunk=agent_pb2.HttpChunk(status=200, data=data))
        await context.abort(grpc.StatusCode.INTERNAL, "gone")

    async with openai_cluster("a", place=lambda _: ("s/0", "a/0")) as built:
        async with scripted(built.built.ring, "s/0", breaks):
            await until(lambda: built.built.agents["a"].handovers._candidates.eligible("s/0"), "s is known")
            client = built.client("a")
            if stream:
                answer = await client.chat.completions.create(model="default", messages=chat(), stream=True)
                assert (await anext(answer)).choices[0].delta.content == "one"
                with pytest.raises(openai.APIError, match="does not answer"):
                    await anext(answer)
            else:
                with pytest.raises(openai.APIConnectionError):
                    await client.chat.completions.create(model="default", messages=chat())
        assert built.built.instance("a").counters.finished == 0


async def test_a_draining_agent_still_opens_its_door() -> None:
    """What comes to it late goes where the router says: nothing is refused that another could serve."""
    async with openai_cluster("a", "b", place=lambda _: ("b/0", "a/0")) as built:
        built.built.pause("a")
        last = submit(built.built.stub("a"), submission("last", seed=9))
        await until(lambda: "started" in last.kinds, "a has something left to do")
        built.built.ring.set("a/0", state=InstanceState.DRAINING)
        await until(lambda: built.built.instance("a").draining, "a drains")
        _, headers = await _ask(built.client("a"))
        assert headers["x-dualmap-instance"] == "b/0"
        built.built.resume("a")
        await last.end()


async def test_a_handed_over_request_moves_on_and_its_connection_stays() -> None:
    """Placed at b, moved from there to c by the rebalancer's Migrate: one answer, over the connection to a."""
    one = {"max_sequences": 1, "suspect_after_ms": 60_000}
    async with openai_cluster("a", "b", "c", place=lambda _: ("b/0", "c/0"), agent=one) as built:
        built.built.pause("b")
        blocker = submit(built.built.stub("b"), submission("blocker", seed=9))
        await until(lambda: "started" in blocker.kinds, "b is busy")
        extra = {"x-dualmap-request-id": "mover"}
        task = asyncio.ensure_future(_ask(built.client("a"), extra_headers=extra))
        b = built.built.instance("b")
        await until(lambda: ("mover", 1) in b.held.waiting, "it waits at b")
        stub = built.built.stub("b")
        listed = await stub.ListQueue(agent_pb2.ListQueueRequest(instance_id="b/0"), timeout=5)
        move = agent_pb2.MigrateItem(request_id="mover", attempt=1, target_instance_id="c/0")
        await stub.Migrate(
            agent_pb2.MigrateRequest(instance_id="b/0", list_token=listed.list_token, items=[move]), timeout=5
        )
        text, headers = await task
        assert text == " w1 w2 w3 w4"
        assert headers["x-dualmap-instance"] == "c/0"
        built.built.resume("b")
        await blocker.end()


async def test_one_trace_from_the_clients_header_through_route_to_the_engine() -> None:
    """The router gets the client's context; all spans at both agents are in the ticket's trace."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with openai_cluster("a", "b", place=lambda _: ("b/0", None), telemetry=Telemetry(provider)) as built:
        built.router.traceparent = TRACEPARENT
        await _ask(built.client("a"), extra_headers={"traceparent": TRACEPARENT})
        spans = exporter.get_finished_spans()
        http = next(span for span in spans if span.name.startswith("POST "))
        assert http.context is not None
        assert built.router.metadata[0]["traceparent"].split("-")[2] == f"{http.context.span_id:016x}"
        assert f"{http.parent.span_id:016x}" == TRACEPARENT.split("-")[2] if http.parent else False
        assert {span.name for span in spans} >= {"hand over", "queue wait", "prefill", "decode"}
        trace_id = int(TRACEPARENT.split("-")[1], 16)
        assert {span.context.trace_id for span in spans if span.context is not None} == {trace_id}
