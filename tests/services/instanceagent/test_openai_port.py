"""The OpenAI port as its clients see it: answers, headers, errors."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from dualmap.v1 import router_pb2
from tests.services.instanceagent.cluster import submission, submit, until
from tests.services.instanceagent.openai_cluster import chat, openai_cluster


async def test_a_chat_is_streamed_and_its_headers_are_true() -> None:
    """Who served it, why there, what was cached, under which id: known before the first token, and right."""
    async with openai_cluster("a") as built:
        client = built.client("a")
        for expected_hits in (False, True):
            raw = await client.chat.completions.with_raw_response.create(
                model="default", messages=chat(), max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in raw.parse()]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            usage = chunks[-1].usage
            assert text.split() == ["w1", "w2", "w3", "w4", "w5"]
            assert usage is not None
            assert usage.completion_tokens == 5
            assert raw.headers["content-type"].startswith("text/event-stream")
            assert raw.headers["x-dualmap-instance"] == "a/0"
            assert raw.headers["x-dualmap-reason"] == "CACHE_HIT"
            assert raw.headers["x-dualmap-request-id"]
            hits = int(raw.headers["x-dualmap-hit-tokens"])
            assert (hits > 0) is expected_hits
            assert usage.prompt_tokens_details is not None
            assert usage.prompt_tokens_details.cached_tokens == hits


async def test_an_answer_that_is_not_streamed_is_whole() -> None:
    """Chat, text and token ids; one body with its usage."""
    async with openai_cluster("a") as built:
        client = built.client("a")
        answer = await client.chat.completions.create(model="default", messages=chat(), max_completion_tokens=3)
        assert answer.choices[0].message.content == " w1 w2 w3"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        for prompt in ("to be or not to be", [5, 6, 7], [[5, 6, 7]]):
            text = await client.completions.create(model="default", prompt=prompt, max_tokens=2)
            assert text.choices[0].text == " w1 w2"


async def test_models_and_health_are_told() -> None:
    """The pool's models; 200 while an instance takes work, 503 once none does."""
    async with openai_cluster("a") as built, aiohttp.ClientSession() as http:
        listed = await built.client("a").models.list()
        assert [model.id for model in listed.data] == ["default"]
        assert (await built.client("a").models.retrieve("default")).id == "default"
        with pytest.raises(openai.NotFoundError):
            await built.client("a").models.retrieve("other")
        async with http.get(f"{built.url('a')}/health") as healthy:
            assert healthy.status == 200
        built.built.instance("a").draining = True
        async with http.get(f"{built.url('a')}/health") as draining:
            assert draining.status == 503


BAD: list[tuple[bytes, dict[str, str], int, str | None]] = [
    (b"{", {}, 400, "body"),
    (b"[]", {}, 400, "body"),
    (b"\xff\xfe", {}, 400, "body"),
    (b"{}", {}, 400, "messages"),
    (b'{"messages": []}', {}, 400, "messages"),
    (b'{"messages": [{}]}', {}, 400, "messages"),
    (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', {}, 400, "max_tokens"),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": 7}', {}, 400, "model"),
    (b'{"messages": [{"role": "user", "content": "x"}], "model": "other"}', {}, 404, None),
    (b'{"messages": [{"role": "user", "content": "x"}]}', {"x-dualmap-ticket": "%%%"}, 400, "x-dualmap-ticket"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', {"x-dualmap-ticket": "/////w=="}, 400, "ticket"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', {"x-dualmap-ticket": "CAE="}, 400, None),
    (b'{"messages": [{"role": "user", "content": "x"}]}', {"x-dualmap-priority": "high"}, 400, "x-dualmap-priority"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', {"x-dualmap-age-ms": "100000000"}, 400, "age_ms"),
    (
        b'{"messages": [{"role": "user", "content": "x"}]}',
        {"x-dualmap-ttft-slo-ms": "-1"},
        400,
        "x-dualmap-ttft-slo-ms",
    ),
    (b"{" + b'"a": {' * 3_000 + b"}" * 3_001, {}, 400, "body"),
]


async def test_mistakes_are_told_as_openai_tells_them() -> None:
    """Status, type and the field at fault; nothing is queued, and the port goes on."""
    async with openai_cluster("a") as built, aiohttp.ClientSession() as http:
        for body, headers, status, param in BAD:
            url = f"{built.url('a')}/v1/chat/completions"
            async with http.post(url, data=body, headers=headers) as response:
                error = (await response.json())["error"]
                assert response.status == status, (body[:80], headers, error)
                assert error["type"] == "invalid_request_error"
                assert param is None or error["param"] == param, (body[:80], headers, error)
        async with http.get(f"{built.url('a')}/v1/chat/completions") as response:
            assert response.status == 405
            assert "error" in await response.json()
        async with http.get(f"{built.url('a')}/nothing") as response:
            assert response.status == 404
            assert "error" in await response.json()
        for prompt in (["one", "two"], [[1], [2]], [-1], [1 << 40], ["one"], []):
            async with http.post(f"{built.url('a')}/v1/completions", json={"prompt": prompt}) as response:
                assert response.status == (200 if prompt == ["one"] else 400)
        assert not built.built.instance("a").held.waiting
        await built.client("a").chat.completions.create(model="default", messages=chat())


async def test_a_body_too_large_or_too_slow_is_refused() -> None:
    """413 and 408, without reading on or waiting for ever."""
    limits = {"max_body_bytes": 100_000, "body_timeout_s": 0.1}
    async with openai_cluster("a", http=limits) as built, aiohttp.ClientSession() as http:
        url = f"{built.url('a')}/v1/completions"
        async with http.post(url, data=b"x" * 200_000) as response:
            assert response.status == 413
            assert "larger" in (await response.json())["error"]["message"]
        refused = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.wait_for(refused.wait(), 5)

        async with http.post(url, data=slow()) as response:
            refused.set()
            assert response.status == 408


async def test_a_full_agent_says_when_to_come_again() -> None:
    """429 before any header of success, Retry-After in seconds and in milliseconds."""
    limits = {"max_waiting_requests": 1, "max_sequences": 1, "suspect_after_ms": 60_000}
    async with openai_cluster("a", agent=limits) as built:
        built.built.pause("a")
        stub = built.built.stub("a")
        running = submit(stub, submission("running", seed=1))
        await until(lambda: "started" in running.kinds, "the engine is full")
        submit(stub, submission("waiting", seed=2))
        await until(lambda: len(built.built.instance("a").held.waiting) == 1, "the queue is full")
        with pytest.raises(openai.RateLimitError) as refused:
            await built.client("a").chat.completions.create(model="default", messages=chat(), stream=True)
        headers = refused.value.response.headers
        assert int(headers["Retry-After"]) >= 1
        assert 40 <= int(headers["retry-after-ms"]) <= 12_000
        assert headers["x-dualmap-reason"] == "OVERLOADED"
        assert refused.value.code == "rate_limit_exceeded"


async def test_too_many_requests_at_once_are_refused_before_they_are_read() -> None:
    """The port's own bound: the one too many is told at once, the others go on."""
    async with openai_cluster("a", http={"max_requests": 1}) as built:
        built.built.pause("a")
        client = built.client("a")
        first = asyncio.ensure_future(client.chat.completions.create(model="default", messages=chat()))
        await until(lambda: bool(built.built.instance("a").held.jobs), "the first is in")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="default", messages=chat())
        built.built.resume("a")
        assert (await first).choices


async def test_a_request_with_a_ticket_is_taken_as_routed() -> None:
    """No router is asked, the booking is covered, the reason is the ticket's; the same attempt never runs twice."""
    async with openai_cluster("a", "b") as built:
        routed = router_pb2.RouteRequest(request_id="r1", attempt=3)
        ticket = built.router.response(routed, "b/0", None).ticket
        ticket.sequence = 1
        headers = {
            "x-dualmap-ticket": base64.b64encode(ticket.SerializeToString()).decode(),
            "x-dualmap-request-id": "r1",
        }
        client = built.client("b")
        raw = await client.chat.completions.with_raw_response.create(
            model="default", messages=chat(), extra_headers=headers
        )
        assert raw.headers["x-dualmap-instance"] == "b/0"
        assert raw.headers["x-dualmap-request-id"] == "r1"
        assert raw.headers["x-dualmap-reason"] == "CACHE_HIT"
        assert not built.router.asked
        instance = built.built.instance("b")
        assert [(seen.router_id, seen.watermark) for seen in instance.load().tickets] == [(7, 1)]
        with pytest.raises(openai.ConflictError):
            await client.chat.completions.create(model="default", messages=chat(), extra_headers=headers)
        again = await client.chat.completions.with_raw_response.create(
            model="default", messages=chat(), extra_headers={**headers, "x-dualmap-attempt": "4"}
        )
        assert again.headers["x-dualmap-instance"] == "b/0"


async def test_credentials_go_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    """Neither to the engine, nor to another agent, nor into a log; no more does the prompt."""
    with caplog.at_level(logging.DEBUG):
        async with openai_cluster("a", "b", place=lambda _: ("b/0", None)) as built:
            built.built.pause("b")
            client = built.client("a")
            extra = {"x-request-id": "x1", "cookie": "a-cookie", "x-api-key": "another-secret"}
            call = client.chat.completions.with_raw_response.create(
                model="default", messages=chat(seed=77_123), extra_headers=extra
            )
            task = asyncio.ensure_future(call)
            there = built.built.instance("b").held
            await until(lambda: bool(there.jobs), "it is in b's engine")
            request = next(iter(there.jobs.values()))
            assert dict(request.submission.openai.headers) == {"x-request-id": "x1"}
            built.built.resume("b")
            await task
    for secret in ("a-secret", "a-cookie", "another-secret", "w77123"):
        assert secret not in caplog.text


async def test_a_prompt_without_tokenizer_is_hashed_over_bytes_and_counted() -> None:
    """Never in silence: the same chat grown by a turn still hits what it shares."""
    async with openai_cluster("a") as built:
        port = built.built.agents["a"].http
        assert port is not None
        object.__setattr__(port._parts.door._parts.prompts, "_engine", None)
        client = built.client("a")
        grown = [*chat(words=1_000), {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
        await client.chat.completions.create(model="default", messages=chat(words=1_000))
        raw = await client.chat.completions.with_raw_response.create(model="default", messages=grown)
        assert int(raw.headers["x-dualmap-hit-tokens"]) >= 512
        assert built.counted("a", "byte_hashed_prompts") == {"no_tokenizer": 2}
        assert [request.prompt.WhichOneof("form") for request in built.router.asked] == ["text", "text"]
