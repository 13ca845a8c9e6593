"""The fake engines behave towards unmodified clients as engines do, and the command says where they serve."""

from __future__ import annotations

import asyncio
import json
import signal
import sys

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.types.chat import ChatCompletionMessageParam

from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import PrefillCost
from dualmap.engines.event_wire import EventWire, Stored, parse_version
from dualmap.engines.fake_server import FakeOptions, FakeServer
from dualmap.engines.fake_sglang import FakeSglang
from dualmap.engines.fake_vllm import FakeVllm
from dualmap.engines.text_tokens import render_chat, tokenize
from tests.waiting import until

FAST = EngineOptions(cost=PrefillCost(0.002, 1e-6), decode_tokens_per_s=2_000.0, stream_step_s=0.005)
SLOW = EngineOptions(cost=PrefillCost(0.002, 1e-6), decode_tokens_per_s=10.0, stream_step_s=0.01)


def both(engine: EngineOptions = FAST, **values: bool) -> list[FakeServer]:
    return [
        FakeVllm(FakeOptions("vllm", engine=engine, **values)),  # type: ignore[arg-type]
        FakeSglang(FakeOptions("sglang", engine=engine, **values)),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("at", [0, 1])
async def test_the_official_client_chats_and_completes(at: int) -> None:
    """Streaming or not, with usage that tells the cached tokens."""
    async with both()[at] as server, AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "tell me of rings " * 30}]
        whole = await client.chat.completions.create(model="default", messages=messages, max_tokens=3)
        parts = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="default",
                messages=messages,
                max_tokens=3,
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        completion = await client.completions.create(model="default", prompt=tokenize("one two"), max_tokens=2)
        models = [model.id async for model in client.models.list()]
        with pytest.raises(NotFoundError):
            await client.completions.create(model="nobody", prompt="x")

    assert whole.choices[0].message.content == " w1 w2 w3"
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == " w1 w2 w3"
    usage = parts[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 100
    assert completion.choices[0].text == " w1 w2"
    assert models == ["default"]


@pytest.mark.parametrize("at", [0, 1])
async def test_a_client_that_goes_away_frees_the_engine(at: int) -> None:
    """Closing the stream cancels, streaming or not."""
    async with both(SLOW)[at] as server, aiohttp.ClientSession() as session:
        for stream in (True, False):
            body = {"model": "default", "prompt": "hello", "max_tokens": 10_000, "stream": stream}
            call = asyncio.create_task(session.post(f"{server.url}/v1/completions", json=body))
            await until(lambda: bool(server.ranks[0].jobs))
            if stream:
                (await call).close()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

            await until(lambda: not server.ranks[0].jobs, timeout_s=1.0)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b'{"model":"default"}', b'{"model":"default","prompt":[]}', b'{"prompt":"x","max_tokens":0}'],
)
async def test_a_bad_body_is_a_400(at: int, body: bytes) -> None:
    """In OpenAI's format; nothing enters the engine."""
    async with both()[at] as server, aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/v1/completions", data=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "BadRequestError"
        assert not server.ranks[0].jobs


async def test_faults_are_served_only_where_asked_for() -> None:
    """A fake engine in a demo cannot be broken over its port."""
    plain, admin = both()[0], both(admin=True)[0]
    async with plain, admin, aiohttp.ClientSession() as session:
        async with session.post(f"{plain.url}/admin/pause") as answer:
            assert answer.status == 404
        async with session.post(f"{admin.url}/admin/restart") as answer:
            assert answer.status == 200
        async with session.post(f"{admin.url}/admin/nonsense") as answer:
            assert answer.status == 404


def test_equal_beginnings_have_equal_tokens() -> None:
    """So that shared prompts share blocks, in chats too."""
    first = tokenize(render_chat([{"role": "system", "content": "be brief " * 50}, {"role": "user", "content": "a"}]))
    second = tokenize(render_chat([{"role": "system", "content": "be brief " * 50}, {"role": "user", "content": "b"}]))

    assert first[:100] == second[:100]
    assert first != second
    assert all(0 < token < 1 << 17 for token in first)


@pytest.mark.parametrize(("dialect", "text"), [("vllm", "latest"), ("vllm", "1")])
def test_a_version_that_is_none_is_refused(dialect: str, text: str) -> None:
    """The encoding depends on it."""
    with pytest.raises(ValueError, match="no version"):
        parse_version(text)


def test_hashes_are_signed_in_sglang_and_may_be_bytes_in_vllm() -> None:
    """As each engine writes them."""
    stored = Stored((0xFFFF_FFFF_FFFF_FFFE,), None, (1,) * 16, 16)

    assert b"\xfe" in EventWire("sglang", (0, 5, 9)).batch(1.0, [stored], 0)
    assert bytes(24) + b"\xff" * 7 + b"\xfe" in EventWire("vllm", (0, 25), bytes_hashes=True).batch(1.0, [stored], 0)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_the_command_serves_until_it_is_told_to_stop(dialect: str) -> None:
    """One JSON line on stdout says where; SIGTERM ends it with code 0."""
    options = ("--dialect", dialect, "--port", "0", "--kv-events-port", "0", "--replay-port", "0")
    code = "import typer; from dualmap.cli.engine import engine; typer.run(engine)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = json.loads(await process.stdout.readline())
        assert (line["event"], line["dialect"]) == ("serving", dialect)
        assert line["kv_events_port"]
        url = f"http://127.0.0.1:{line['port']}/health"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
