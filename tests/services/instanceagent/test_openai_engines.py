"""The official client, any agent, fake vLLM and SGLang servers behind: bytes as the engine made them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from dualmap.core.engine_model import EngineOptions
from dualmap.engines.fake_server import FakeServer
from dualmap.engines.text_tokens import render_chat, tokenize
from tests.services.instanceagent.cluster import until
from tests.services.instanceagent.engine_listener import FAST, fake
from tests.services.instanceagent.openai_cluster import OpenAiCluster, chat, openai_cluster
from tests.services.instanceagent.test_golden_agent_on_engine import engine_settings

ENGINE = EngineOptions(cost=FAST, decode_tokens_per_s=500.0, stream_step_s=0.005)
SLOW = EngineOptions(cost=FAST, decode_tokens_per_s=20.0, stream_step_s=0.05)


@asynccontextmanager
async def _pair(dialect: str, engine: EngineOptions = ENGINE) -> AsyncIterator[tuple[OpenAiCluster, FakeServer]]:
    """Agents a and b, an engine each that calls its model llama; everything is placed at b, whose engine is given."""
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(fake(dialect, engine=engine, model="llama")) for _ in "ab"]
        engines = dict(zip("ab", map(engine_settings, servers), strict=True))
        built = await stack.enter_async_context(
            openai_cluster("a", "b", place=lambda _: ("b/0", None), engines=engines)
        )
        yield built, servers[1]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_chat_is_streamed_through_any_agent_from_the_engine(dialect: str) -> None:
    """Through a and through b: the engine's own words, its tokens hashed, its hits told, its usage on demand."""
    async with _pair(dialect) as (built, server):
        token_ids = tokenize(render_chat(chat()))
        hits = []
        for name in ("a", "b"):
            raw = await built.client(name).chat.completions.with_raw_response.create(
                model="default", messages=chat(), max_tokens=6, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in raw.parse()]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " w1 w2 w3 w4 w5 w6"
            assert chunks[0].model == "llama"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.prompt_tokens == len(token_ids)
            assert raw.headers["x-dualmap-instance"] == "b/0"
            details = chunks[-1].usage.prompt_tokens_details
            hits.append(details.cached_tokens if details is not None else None)
        assert hits[0] == 0
        assert hits[1]
        plain = await built.client("a").chat.completions.create(model="default", messages=chat(), max_tokens=2)
        assert plain.choices[0].message.content == " w1 w2"
        assert plain.usage is not None
        unasked = await built.client("a").chat.completions.create(
            model="default", messages=chat(), max_tokens=2, stream=True
        )
        assert [chunk.usage for chunk in [c async for c in unasked]].count(None) >= 2
        assert {request.prompt.block_hashes.prompt_tokens for request in built.router.asked} == {len(token_ids)}
        assert not any(built.counted(name, "byte_hashed_prompts") for name in "ab")
        assert not server.ranks[0].jobs


@pytest.mark.parametrize("phase", ["before the first token", "while it streams"])
@pytest.mark.parametrize("name", ["a", "b"])
async def test_killing_the_client_frees_the_engine_within_200_ms(name: str, phase: str) -> None:
    """The connection to the engine closes with the client's, through one agent or two."""
    async with _pair("vllm", SLOW) as (built, server):
        rank = server.ranks[0]
        if phase == "before the first token":
            rank.engine.pause()
        streaming = asyncio.Event()

        async def follow() -> None:
            async with built.client(name) as client:
                stream = await client.chat.completions.create(
                    model="default", messages=chat(), stream=True, max_tokens=1_000
                )
                async for _ in stream:
                    streaming.set()

        took_s = []
        for _ in range(3):
            task = asyncio.ensure_future(follow())
            await until(lambda: bool(rank.jobs), "the engine has it")
            if phase != "before the first token":
                await asyncio.wait_for(streaming.wait(), 20)
            began_s = time.monotonic()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not rank.jobs, "the engine is free")
            took_s.append(time.monotonic() - began_s)
            streaming.clear()
        assert min(took_s) < 0.2
        await until(lambda: all(built.built.instance(n).empty for n in "ab"), "nobody holds anything")


async def test_what_the_engine_refuses_is_told_in_its_words() -> None:
    """Its status, its body; the request is over, the client may correct it, and it counts as served nowhere."""
    async with _pair("vllm") as (built, _server):
        with pytest.raises(openai.BadRequestError) as refused:
            await built.client("a").chat.completions.create(
                model="default", messages=chat(), max_tokens=1_000_000, stream=True
            )
        assert "exceed" in str(refused.value)
        assert refused.value.response.headers["x-dualmap-request-id"]
        await until(lambda: all(built.built.instance(n).empty for n in "ab"), "nobody holds anything")
        loads = [built.built.instance(name).load() for name in "ab"]
        assert [(load.finished, load.finished_in_slo, load.prompt_tokens) for load in loads] == [(0, 0, 0)] * 2


async def test_bytes_of_a_stream_are_the_engines_own() -> None:
    """Chunk by chunk as the engine's server wrote them: nothing is rewritten on the way, relayed or not."""
    async with _pair("vllm") as (built, server), aiohttp.ClientSession() as http:
        body: dict[str, Any] = {"model": "llama", "messages": chat(), "max_tokens": 5, "stream": True}
        async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
            direct = (await response.read()).split(b"\n\n")
        for name in ("a", "b"):
            sent = {**body, "model": "default"}
            async with http.post(f"{built.url(name)}/v1/chat/completions", json=sent) as response:
                through = (await response.read()).split(b"\n\n")
            assert [_timeless(event) for event in through] == [_timeless(event) for event in direct]


def _timeless(event: bytes) -> bytes:
    """An event without the answer's id and time, which differ from answer to answer."""
    return event[event.find(b'"model"') :]
