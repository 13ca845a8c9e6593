"""The client before a real router: what it sends is understood, what it gets is the router's answer."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from dualmap.client import CallFailed, DualMapClient, Prompt, Request
from tests.client.fakes import FakeAgent, answers_well, ends_early, serving
from tests.services.router.harness import pool_of, running_router

IDS = tuple(range(600))
FORMS = [
    (Prompt.of_tokens(IDS), 600, "LESS_LOADED"),
    (Prompt.of_tokens(struct.pack("<600I", *IDS)), 600, "LESS_LOADED"),
    (Prompt.of_text("word " * 480), 600, "LESS_LOADED"),
    (Prompt.of_hashes([1, 2, 3, 4], 600), 600, "LESS_LOADED"),
    (Prompt.of_caller_ids([1], 600, 512), 600, "LESS_LOADED"),
    (Prompt.of_hashes([], 100), 100, "NO_KEY"),
]


@pytest.mark.parametrize(("prompt", "tokens", "reason"), FORMS)
async def test_every_form_of_a_prompt_is_understood(prompt: Prompt, tokens: int, reason: str) -> None:
    """The same values that the client takes are what the router counts."""
    pool = pool_of(3)
    with running_router(pool) as router:
        async with DualMapClient([f"127.0.0.1:{router.server.port}"]) as client:
            route = await client.route(Request("r", prompt, ttft_slo_ms=60_000), timeout_s=5)
            assert route.reason == reason
            assert route.backup is not None
            assert route.instance.http_address
            assert sum(len(view.bookings) for view in pool.view.instances.values()) == 1
            assert router.decider.explain("r").prompt_tokens == tokens
            assert await client.release(route)


async def test_a_prompt_without_form_is_refused_by_field() -> None:
    """The server validates; the client hands its word on."""
    with running_router(pool_of(1)) as router:
        async with DualMapClient([f"127.0.0.1:{router.server.port}"]) as client:
            with pytest.raises(CallFailed) as failed:
                await client.route(Request("r", Prompt()), timeout_s=5)

    assert (failed.value.code, failed.value.fields["field"]) == ("INVALID_ARGUMENT", "prompt")


async def test_a_request_runs_to_its_end_over_a_real_route() -> None:
    """Where the routed agent fails, its backup of the same route answers."""
    agents = [FakeAgent(f"agent-{number}/0", ends_early if number else answers_well) for number in range(2)]
    pool = pool_of(2)
    async with serving(*agents):
        ring = pool.view.ring
        assert ring is not None
        addresses = {agent.instance_id: agent.address for agent in agents}
        members = tuple(replace(member, grpc_address=addresses[member.instance_id]) for member in ring.members)
        pool.adopt(replace(ring, epoch=ring.epoch + 1, members=members))
        with running_router(pool) as router:
            async with DualMapClient([f"127.0.0.1:{router.server.port}"]) as client:
                for number in range(8):
                    request = Request(f"r{number}", Prompt.of_hashes([number + 1], 200))
                    completion = await client.complete(request, timeout_s=10)
                    assert completion.data == b"ab"

    assert len(agents[0].submitted) == 8
    assert {submitted.ticket.pool for submitted in agents[0].submitted} == {"default"}
