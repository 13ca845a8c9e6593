"""The real adapters against the fake engines: jobs, caches by events and by belief, parity, restarts, ranks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace

import aiohttp
import pytest
from structlog.testing import capture_logs

from dualmap.core.blocks import ChainKind
from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import PrefillCost, Tier
from dualmap.runtime.lifetime import StartError
from dualmap.v1 import types_pb2
from services.instanceagent.engine import Done, Failed, FirstToken, HttpChunk
from services.instanceagent.engine_http import EngineCallFailed
from tests.services.instanceagent.engine_listener import FAST, Adapter, adapting, fake, openai, submission, tokens
from tests.waiting import until

ENGINE = EngineOptions(cost=FAST, decode_tokens_per_s=2_000.0, stream_step_s=0.005)
SLOW = EngineOptions(cost=PrefillCost(0.005, 1e-6), decode_tokens_per_s=20.0, stream_step_s=0.01)
VERSIONS = [
    ("vllm", "0.9.3"), ("vllm", "0.11.1"), ("vllm", "0.24.0"), ("vllm", "0.32.0"),
    ("sglang", "0.4.9"), ("sglang", "0.5.18"), ("sglang", "0.5.23"),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "version"), VERSIONS)
async def test_a_job_runs_and_its_blocks_are_in_the_index(dialect: str, version: str) -> None:
    """Submit, first token, text, done; parity was shown at registration; the engine's own events fill the index."""
    async with fake(dialect, version, engine=ENGINE) as server, adapting(server) as adapter:
        assert (adapter.engine.parity_problem, adapter.engine.facts.modelled) == (None, False)
        assert adapter.engine.facts.kv_tokens == 1_200_000
        request = submission(tokens(1_000), max_output_tokens=5)

        number = await adapter.run(request)

        kinds = adapter.listener.kinds(number)
        assert (kinds[0], kinds[-1]) == ("FirstToken", "Done")
        assert adapter.listener.last(number) == Done(5, "length", 0)
        assert adapter.listener.text(number) == " w1 w2 w3 w4 w5"
        await until(lambda: adapter.listener.has(request))
        assert all(adapter.listener.held[block] is Tier.DEVICE for block in request.chain.hashes)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_eviction_to_the_host_and_out_of_it_is_followed(dialect: str) -> None:
    """Tiers of the index are those of the engine, and what it dropped is gone."""
    options = EngineOptions(
        cost=FAST, kv_tokens=2_048, host_tier_tokens=1_024, decode_tokens_per_s=2_000.0, stream_step_s=0.005
    )
    async with fake(dialect, engine=options) as server, adapting(server) as adapter:
        first, second = submission(tokens(1_024)), submission(tokens(2_048, 10_000))
        await adapter.run(first)
        await until(lambda: adapter.listener.has(first))
        await adapter.run(second)
        await until(lambda: adapter.listener.has(second))

        held = adapter.listener.held

        assert {held[block] for block in second.chain.hashes} == {Tier.DEVICE}
        assert {held[block] for block in first.chain.hashes if block in held} <= {Tier.HOST}
        assert sum(tier is Tier.HOST for tier in held.values()) <= 8


async def test_a_tier_without_credit_does_not_count_as_held() -> None:
    """Where loading from the host is no faster than computing, what is only there is a miss."""
    options = replace(ENGINE, kv_tokens=1_024, host_tier_tokens=4_096)
    async with fake("vllm", engine=options) as server, adapting(server, tiers=frozenset({Tier.DEVICE})) as adapter:
        first, second = submission(tokens(1_024)), submission(tokens(1_024, 10_000))
        await adapter.run(first)
        await until(lambda: adapter.listener.has(first))
        await adapter.run(second)
        await until(lambda: adapter.listener.has(second))

        assert not any(block in adapter.listener.held for block in first.chain.hashes)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
@pytest.mark.parametrize("replay", [0, None])
async def test_a_restarted_engine_leaves_no_phantom_blocks(dialect: str, replay: int | None) -> None:
    """With replay or without it, the old index is dropped and a new one grows."""
    async with fake(dialect, engine=ENGINE, replay_port=replay) as server, adapting(server) as adapter:
        old = submission(tokens(1_000))
        await adapter.run(old)
        await until(lambda: adapter.listener.has(old))

        await server.ranks[0].restart()
        await until(lambda: not adapter.listener.held)

        prompts = itertools.count(10_000, 1_000)

        async def grown() -> bool:
            # Without replay, what was said before the subscription stood again is never heard.
            await adapter.run(submission(tokens(1_000, next(prompts))))
            return bool(adapter.listener.held)

        await until(grown)
        assert not any(block in adapter.listener.held for block in old.chain.hashes)


@pytest.mark.parametrize(("dialect", "path"), [("vllm", "/reset_prefix_cache"), ("sglang", "/flush_cache")])
async def test_a_cleared_cache_is_a_new_life(dialect: str, path: str) -> None:
    """AllBlocksCleared drops the index."""
    async with fake(dialect, engine=ENGINE) as server, adapting(server) as adapter:
        request = submission(tokens(500))
        await adapter.run(request)
        await until(lambda: adapter.listener.has(request))
        lives = adapter.listener.lives

        async with aiohttp.ClientSession() as session, session.post(server.url + path) as answer:
            assert answer.status == 200

        await until(lambda: adapter.listener.lives == lives + 1 and not adapter.listener.held)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_an_engine_without_events_is_modelled_and_corrected_by_what_it_reports(dialect: str) -> None:
    """Filled at the first token; where the engine had less than believed, all that is as old is believed gone."""
    async with fake(dialect, engine=ENGINE, kv_events_port=None) as server, adapting(server) as adapter:
        assert adapter.engine.facts.modelled
        older, request = submission(tokens(1_000)), submission(tokens(1_000, 50_000))
        await adapter.run(older)
        await adapter.run(request)
        assert adapter.listener.has(older)
        assert adapter.listener.has(request)

        server.ranks[0].clear_cache()
        await adapter.run(request)

        assert adapter.listener.has(request)
        assert not any(block in adapter.listener.held for block in older.chain.hashes)


async def test_a_restart_of_a_modelled_engine_drops_the_belief() -> None:
    """Its process began anew, so its cache is empty."""
    async with fake("vllm", engine=ENGINE, kv_events_port=None) as server, adapting(server) as adapter:
        request = submission(tokens(500))
        await adapter.run(request)
        assert adapter.listener.has(request)

        await server.ranks[0].restart()

        await until(lambda: not adapter.listener.held)
        assert adapter.count("kv_resets", "restart") == 1


async def test_pages_too_small_to_follow_are_modelled() -> None:
    """One event a token is no way to know a cache."""
    async with fake("sglang", engine=ENGINE, block_tokens=1) as server, adapting(server) as adapter:
        request = submission(tokens(300))
        await adapter.run(request)

        assert adapter.engine.facts.modelled
        assert adapter.listener.has(request)


async def test_chains_that_are_not_of_tokens_are_a_belief_beside_the_events() -> None:
    """A text's and a caller's own chain never appear in events."""
    async with fake("vllm", engine=ENGINE) as server, adapting(server) as adapter:
        request = submission(prompt=types_pb2.Prompt(text="some words " * 200), max_output_tokens=2)
        assert request.chain.kind is ChainKind.BYTES

        await adapter.run(request)

        assert adapter.listener.has(request)
        assert not adapter.engine.facts.modelled


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_salted_requests_of_ours_are_indexed_under_their_own_root(dialect: str) -> None:
    """The same tokens, salted and not, are two chains; a stranger's salt is left out and counted."""
    async with fake(dialect, engine=ENGINE) as server, adapting(server) as adapter:
        salted, plain = submission(tokens(500), cache_salt="ours"), submission(tokens(500))
        await adapter.run(salted)
        await until(lambda: adapter.listener.has(salted))
        assert not adapter.listener.has(plain)

        body = {"model": "default", "prompt": tokens(500), "max_tokens": 1, "cache_salt": "a stranger's"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{server.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200

        await until(lambda: adapter.count("kv_dropped", "extra_keys_unmatched") > 0)
        assert not adapter.listener.has(plain)


async def test_an_adapter_of_weights_has_its_own_chain() -> None:
    """A LoRA's blocks are found under its name."""
    async with fake("vllm", engine=ENGINE, loras=("sql",)) as server, adapting(server) as adapter:
        request = submission(tokens(500), lora="sql")
        await adapter.run(request)

        await until(lambda: adapter.listener.has(request))
        assert not adapter.listener.has(submission(tokens(500)))


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_each_rank_gets_its_own_requests_and_its_own_events(dialect: str) -> None:
    """The rank is part of the identity: header or field, port, metrics label."""
    server = fake(dialect, engine=ENGINE, ranks=2)
    async with server, adapting(server, 0) as first, adapting(server, 1) as second:
        request = submission(tokens(500))
        await second.run(request)

        await until(lambda: second.listener.has(request))
        assert (first.engine.parity_problem, second.engine.parity_problem) == (None, None)
        assert not first.listener.has(request)
        assert server.ranks[1].counters.requests == 2


async def test_a_newer_vllm_names_its_event_sources_itself() -> None:
    """From 0.32 no endpoint need be configured."""
    server = fake("vllm", "0.32.0", engine=ENGINE)
    async with server, adapting(server, kv_endpoint="", replay_endpoint="") as adapter:
        assert adapter.engine.learnt.events is not None
        assert adapter.engine.parity_problem is None


async def test_events_that_do_not_come_are_not_trusted_and_the_failure_is_told() -> None:
    """A failed self-test is a reason, a metric, and an index that is modelled and says so; it is tried again."""
    async with fake("vllm", engine=ENGINE) as server:
        publisher = server.ranks[0].publisher
        assert publisher is not None
        publisher.drop_all = 1_000
        async with adapting(server, parity_timeout_s=0.3, parity_retry_s=0.1) as adapter:
            assert adapter.engine.parity_problem == "no_events"
            assert adapter.count("parity_failures", "no_events") == 1
            assert adapter.engine.facts.modelled
            request = submission(tokens(500))
            await adapter.run(request)
            assert adapter.listener.has(request)

            publisher.drop_all = 0

            await until(lambda: adapter.engine.parity_problem is None and not adapter.engine.facts.modelled)


async def test_an_engine_that_caches_other_tokens_fails_parity() -> None:
    """Blocks that appear and are not those of the prompt are a mismatch: the index would be useless, in silence."""
    async with fake("vllm", engine=ENGINE) as server:
        blocks = server.ranks[0].blocks
        chain = blocks.chain

        def shifted(token_ids: Sequence[int], lora_name: str = "", cache_salt: str = "") -> tuple[int, ...]:
            return chain([token + 1 for token in token_ids], lora_name, cache_salt)

        blocks.chain = shifted  # type: ignore[method-assign]
        async with adapting(server, parity_timeout_s=0.3) as adapter:
            assert adapter.engine.parity_problem == "mismatch"
            assert adapter.count("parity_failures", "mismatch") == 1
            assert adapter.engine.facts.modelled


async def test_a_cancelled_job_frees_the_engine_and_is_heard_of_no_more() -> None:
    """Closing the stream is how an engine is told."""
    async with fake("vllm", engine=SLOW) as server, adapting(server) as adapter:
        number = adapter.stage(submission(tokens(500), max_output_tokens=10_000))
        await until(lambda: "FirstToken" in adapter.listener.kinds(number))
        assert server.ranks[0].jobs

        adapter.engine.cancel(number)
        heard = len(adapter.listener.kinds(number))

        await until(lambda: not server.ranks[0].jobs, timeout_s=0.2)
        assert len(adapter.listener.kinds(number)) == heard
        adapter.engine.cancel(number)
        adapter.engine.cancel(12_345)


async def test_a_job_cut_before_its_first_token_may_run_again_and_one_cut_later_may_not() -> None:
    """A first token that was out can never be taken back."""
    async with fake("vllm", engine=SLOW) as server, adapting(server) as adapter:
        late = adapter.stage(submission(tokens(300), max_output_tokens=10_000))
        await until(lambda: "FirstToken" in adapter.listener.kinds(late))
        server.ranks[0].engine.pause()
        early = adapter.stage(submission(tokens(300, 9_000)))
        await until(lambda: len(server.ranks[0].jobs) == 2)

        await server.ranks[0].restart()

        await until(lambda: adapter.listener.ended(late) and adapter.listener.ended(early))
        first, second = adapter.listener.last(late), adapter.listener.last(early)
        assert isinstance(first, Failed)
        assert isinstance(second, Failed)
        assert (first.retryable, second.retryable) == (False, True)


async def test_an_engine_that_is_away_is_a_problem_until_it_is_back() -> None:
    """Nothing is sent to where nobody is; the adapter comes back by itself."""
    server = fake("vllm", engine=ENGINE)
    async with server:
        port = server.port
        adapter = Adapter(server)
        await adapter.engine.start(adapter.listener)
    number = await adapter.run(submission(tokens(300)))
    failed = adapter.listener.last(number)
    assert isinstance(failed, Failed)
    assert failed.retryable
    assert adapter.engine.problem is not None

    async with fake("vllm", engine=ENGINE, port=port):
        await until(lambda: adapter.engine.problem is None)
        await adapter.engine.stop()


async def test_an_engine_that_never_answers_is_a_start_error() -> None:
    """One line says which engine, after the time that settings give it."""
    server = fake("vllm", engine=ENGINE)
    async with server:
        adapter = Adapter(server, start_timeout_s=0.3)

    with capture_logs() as lines, pytest.raises(StartError, match="does not answer: not_connected"):
        await adapter.engine.start(adapter.listener)
    ours = [(line["event"], line["log_level"]) for line in lines if line.get("part") == "http_engine"]
    assert ours == [("engine_awaited", "info")], "once, however often it is tried"


@pytest.mark.parametrize("wants_usage", [True, False])
async def test_an_openai_stream_is_passed_on_as_it_is(wants_usage: bool) -> None:
    """Status and headers come with the first token; usage only where it was asked for; the end is the engine's."""
    body = {"model": "default", "messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 4}
    if wants_usage:
        body["stream_options"] = {"include_usage": True}
    async with fake("vllm", engine=ENGINE) as server, adapting(server) as adapter:
        number = await adapter.run(openai("/v1/chat/completions", {**body, "stream": True}))

        events = adapter.listener.events[number]
        assert isinstance(events[0], FirstToken)
        assert isinstance(events[1], HttpChunk)
        assert events[1].status == 200
        assert events[1].headers["content-type"].startswith("text/event-stream")
        assert adapter.listener.last(number) == Done(4, "length", 0)
        text = adapter.listener.http_body(number)
        chunks = [json.loads(line[6:]) for line in text.decode().splitlines() if line.startswith("data: {")]
        assert text.endswith(b"data: [DONE]\n\n")
        assert [chunk["choices"] for chunk in chunks].count([]) == int(wants_usage)
        contents = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(contents) == " w1 w2 w3 w4"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_an_openai_client_that_asked_for_no_stream_gets_one_body(path: str) -> None:
    """The engine streams all the same, so that the first token is known; the parts are put together."""
    chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi there"}
    async with fake("sglang", engine=ENGINE) as server, adapting(server) as adapter:
        number = await adapter.run(openai(path, {"model": "default", "max_tokens": 3, **prompt}, stream=False))

        assert adapter.listener.kinds(number) == ["FirstToken", "HttpChunk", "Done"]
        answer = json.loads(adapter.listener.http_body(number))
        choice = answer["choices"][0]
        assert (choice["message"]["content"] if chat else choice["text"]) == " w1 w2 w3"
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["object"] == ("chat.completion" if chat else "text_completion")


async def test_a_clients_mistake_is_answered_in_the_engines_words_and_never_retried() -> None:
    """A prompt beyond the model's length is the engine's 400, with its body."""
    async with fake("vllm", engine=ENGINE) as server, adapting(server) as adapter:
        body = {"model": "default", "prompt": "hi", "max_tokens": 200_000}
        number = await adapter.run(openai("/v1/completions", body))

        first = adapter.listener.events[number][0]
        assert isinstance(first, HttpChunk)
        assert first.status == 400
        assert b"exceed" in first.data
        assert adapter.listener.last(number) == Done(0, "error")


async def test_hashes_alone_are_no_prompt_for_a_real_engine() -> None:
    """Such a request fails at once and for good."""
    async with fake("vllm", engine=ENGINE) as server, adapting(server) as adapter:
        hashes = types_pb2.BlockHashes(hashes=[1, 2], prompt_tokens=300)
        number = await adapter.run(submission(prompt=types_pb2.Prompt(block_hashes=hashes)))

        failed = adapter.listener.last(number)
        assert isinstance(failed, Failed)
        assert not failed.retryable


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_tokens_come_from_the_engine(dialect: str) -> None:
    """A chat's tokens are those that the engine then caches; what it cannot tokenize is an error, not a guess."""
    async with fake(dialect, engine=ENGINE) as server, adapting(server) as adapter:
        body = {"model": "an alias", "messages": [{"role": "user", "content": "count " * 300}], "max_tokens": 2}
        token_ids = await adapter.engine.tokens.of_body(body, chat=True)
        request = submission([int.from_bytes(token_ids[at : at + 4], "little") for at in range(0, len(token_ids), 4)])

        await adapter.run(openai("/v1/chat/completions", body))

        await until(lambda: adapter.listener.has(request))
        assert len(token_ids) > 4 * 256
        with pytest.raises(EngineCallFailed):
            await adapter.engine.tokens.of_body({"messages": "no list"}, chat=True)


async def test_sglangs_own_counters_give_the_prefill_rate_and_the_load() -> None:
    """By poll and by the load socket: uncached tokens over busy time is the measured cost."""
    engine = EngineOptions(cost=PrefillCost(0.0, 1e-4), decode_tokens_per_s=2_000.0)
    async with fake("sglang", engine=engine, load_port=0) as server, adapting(server) as adapter:
        assert adapter.engine.learnt.load_endpoint is not None
        await adapter.run(submission(tokens(1_000)))

        await until(lambda: adapter.engine.prefill_tokens_per_s is not None and adapter.engine.kv_use > 0)
        assert adapter.engine.prefill_tokens_per_s == pytest.approx(10_000, rel=0.2)
        server.ranks[0].engine.pause()
        adapter.stage(submission(tokens(700, 5_000)))
        await until(lambda: adapter.engine.load.waiting_uncached_tokens == 700)


async def test_another_block_size_of_the_ring_takes_the_index_anew() -> None:
    """The engine's cache is not touched; its events are replayed."""
    async with fake("vllm", engine=ENGINE) as server, adapting(server) as adapter:
        request = submission(tokens(500))
        await adapter.run(request)
        await until(lambda: adapter.listener.has(request))

        adapter.engine.clear_cache()

        assert not adapter.listener.held
        await until(lambda: adapter.listener.has(request))
