"""A whole agent before a fake engine, as settings alone make it: by gRPC, by the official OpenAI client, by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError

from dualmap.core.engine_model import EngineOptions
from dualmap.core.membership import RingParameters
from dualmap.engines.fake_server import FakeServer
from dualmap.rpc.convert_agent import submission_of
from services.instanceagent.settings import EngineSettings
from tests.services.instanceagent.cluster import OK, Following, cluster, submission
from tests.services.instanceagent.engine_listener import FAST, fake
from tests.waiting import until

ENGINE = EngineOptions(cost=FAST, decode_tokens_per_s=2_000.0, stream_step_s=0.005)


def engine_settings(server: FakeServer) -> dict[str, Any]:
    """What an operator writes for this engine."""
    written: dict[str, Any] = {"kind": server.wire.dialect, "url": server.url, "poll_ms": 50, "start_timeout_s": 5}
    publisher = server.ranks[0].publisher
    if publisher is not None and server.wire.dialect == "vllm":
        written["kv_endpoint"] = f"tcp://127.0.0.1:{publisher.port}"
        written["replay_endpoint"] = f"tcp://127.0.0.1:{publisher.replay_port}"
    return written


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_request_by_grpc_is_served_by_the_engine_and_cached_in_the_agents_state(dialect: str) -> None:
    """Submit to done; the state that the collector polls holds the blocks; the second request hits them."""
    server = fake(dialect, engine=ENGINE)
    async with server, cluster("a", engine=engine_settings(server)) as built:
        instance = built.instance("a")
        hits = []
        for number in range(2):
            following = Following(built.stub("a").Submit(submission(f"r{number}", count=600, max_output_tokens=3)))
            assert await following.end() == OK
            done = following.events[-1].done
            assert done.output_tokens == 3
            hits.append(done.hit_tokens)
            await until(lambda: instance.miss_of(request_chain(built, 600))[1] == 512)

        # The second is what the engine reports of itself, in blocks of its own.
        assert hits == [0, 592]
        assert not instance.load().modelled
        await until(lambda: 0 < instance.load().kv_use < 1)


def request_chain(built: Any, count: int) -> Any:
    return submission_of(submission("x", count=count), built.agents["a"].agent.defaults).chain


async def test_the_official_client_chats_with_an_engine_through_an_agent() -> None:
    """Tokens from the engine's own /tokenize: the chat's blocks are those that the engine then announces."""
    server = fake("vllm", engine=ENGINE)
    async with server, cluster("a", engine=engine_settings(server)) as built:
        port = built.agents["a"].http
        assert port is not None
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{port.port}/v1", api_key="x", max_retries=0) as client:
            for stream in (False, True):
                answer: Any = await client.chat.completions.create(
                    model="default",
                    messages=[{"role": "user", "content": "tell me of rings " * 200}],
                    max_tokens=3,
                    stream=stream,
                )
                if stream:
                    text = "".join([part.choices[0].delta.content or "" async for part in answer if part.choices])
                else:
                    text = answer.choices[0].message.content
                assert text == " w1 w2 w3"
        await until(lambda: len(built.instance("a").state.kv) > 5)
        assert built.instance("a").counters.finished == 2


async def test_an_agent_of_two_ranks_keeps_them_apart() -> None:
    """Each instance is one cache: id/rank goes to its rank and hears its events."""
    server = fake("vllm", engine=ENGINE, ranks=2)
    async with server, cluster("a", agent={"instances": 2}, engine=engine_settings(server)) as built:
        following = Following(built.stub("a").Submit(submission("r", count=600, instance_id="a/1")))
        assert await following.end() == OK

        await until(lambda: built.instance("a", 1).miss_of(request_chain(built, 600))[1] == 512)
        assert built.instance("a", 0).miss_of(request_chain(built, 600))[1] == 0


async def test_a_ring_with_another_block_size_gets_an_index_of_that_size() -> None:
    """The engine's events are replayed into the new blocks; what it holds is not lost."""
    server = fake("vllm", engine=ENGINE)
    async with server, cluster("a", engine=engine_settings(server)) as built:
        following = Following(built.stub("a").Submit(submission("r", count=600)))
        assert await following.end() == OK
        agent = built.agents["a"].agent
        assert agent.ring is not None

        agent.adopt(replace(agent.ring, parameters=RingParameters(block_tokens=64)))

        await until(lambda: built.instance("a").miss_of(request_chain(built, 600))[1] == 576)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "vllm"},
        {"tiers": ("host",)},
        {"tiers": ("device", "tape")},
        {"kind": "vllm", "url": "127.0.0.1:8000"},
        {"kind": "vllm", "url": "http://me:secret@127.0.0.1:8000"},
        {"kind": "vllm", "url": "http://127.0.0.1:8000", "kv_endpoint": "127.0.0.1:5557"},
        {"kind": "vllm", "url": "http://127.0.0.1:8000", "replay_endpoint": "tcp://127.0.0.1:5558"},
    ],
)
def test_engine_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    """At start, not at the first request; and no credential stands in a URL that is printed."""
    with pytest.raises(ValidationError):
        EngineSettings.model_validate(wrong)
