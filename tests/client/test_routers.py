"""Routers in turn: failover, patience within the deadline, and no retry of what is wrong."""

from __future__ import annotations

from time import monotonic

import pytest

from dualmap.client import CallFailed, ClientOptions, DualMapClient, Prompt, Request
from dualmap.core.errors import AlreadyExists, InvalidRequest, NoInstance, Overloaded
from tests.client.fakes import FakeAgent, FakeRouter, answers_well, serving

REQUEST = Request("r", Prompt.of_text("hello"))
NOBODY = "127.0.0.1:1"


def router_to(agent: FakeAgent) -> FakeRouter:
    return FakeRouter((agent, None))


async def test_calls_take_the_routers_in_turn() -> None:
    """Load spreads over all routers without a balancer."""
    agent = FakeAgent("a/0", answers_well)
    agent.address = NOBODY
    routers = [router_to(agent) for _ in range(3)]
    async with serving(*routers), DualMapClient([router.address for router in routers]) as client:
        for _ in range(9):
            await client.route(REQUEST, timeout_s=5)

    assert [len(router.asked) for router in routers] == [3, 3, 3]


async def test_a_dead_router_is_passed_over_and_rested() -> None:
    """A router that does not answer costs one try, not one a call."""
    agent = FakeAgent("a/0", answers_well)
    agent.address = NOBODY
    router = router_to(agent)
    async with serving(router), DualMapClient([NOBODY, router.address]) as client:
        for _ in range(6):
            assert (await client.route(REQUEST, timeout_s=5)).instance.instance_id == "a/0"

    assert len(router.asked) == 6


async def test_a_full_router_is_waited_for_as_long_as_it_advised() -> None:
    """RetryInfo is honoured within the caller's deadline."""
    agent = FakeAgent("a/0", answers_well)
    agent.address = NOBODY
    router = FakeRouter(Overloaded(150, "calls"), NoInstance(150), (agent, None))
    async with serving(router), DualMapClient([router.address]) as client:
        began_s = monotonic()
        await client.route(REQUEST, timeout_s=5)

    assert 0.3 <= monotonic() - began_s < 3
    assert len(router.asked) == 3


async def test_advice_beyond_the_deadline_is_told_at_once() -> None:
    """No wait that cannot help."""
    router = FakeRouter(Overloaded(60_000, "calls"))
    async with serving(router), DualMapClient([router.address]) as client:
        began_s = monotonic()
        with pytest.raises(CallFailed) as failed:
            await client.route(REQUEST, timeout_s=1)

    assert monotonic() - began_s < 0.9
    assert (failed.value.code, failed.value.reason) == ("RESOURCE_EXHAUSTED", "OVERLOADED")
    assert failed.value.retry_after_ms == 60_000


@pytest.mark.parametrize("error", [InvalidRequest("prompt", "is bad"), AlreadyExists("r", 1)])
async def test_a_wrong_request_is_not_asked_twice(error: InvalidRequest | AlreadyExists) -> None:
    """Another router would say the same."""
    routers = [FakeRouter(error), FakeRouter(error)]
    async with serving(*routers), DualMapClient([router.address for router in routers]) as client:
        with pytest.raises(CallFailed) as failed:
            await client.route(REQUEST, timeout_s=5)

    assert failed.value.reason == error.reason
    assert sum(len(router.asked) for router in routers) == 1


async def test_no_router_at_all_ends_with_the_deadline() -> None:
    """UNAVAILABLE or DEADLINE_EXCEEDED, within the caller's time."""
    async with DualMapClient([NOBODY], ClientOptions(router_timeout_s=0.2)) as client:
        began_s = monotonic()
        with pytest.raises(CallFailed) as failed:
            await client.route(REQUEST, timeout_s=0.6)

    assert monotonic() - began_s < 2
    assert failed.value.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


async def test_a_release_reaches_whoever_holds_the_booking() -> None:
    """All routers are asked; those that are away do not matter."""
    agent = FakeAgent("a/0", answers_well)
    agent.address = NOBODY
    router = router_to(agent)
    options = ClientOptions(router_timeout_s=0.3)
    async with serving(router), DualMapClient([NOBODY, router.address], options) as client:
        route = await client.route(REQUEST, timeout_s=5)
        assert await client.release(route)
        assert not await client.release(route)

    assert router.released == [("r", 1), ("r", 1)]


def test_a_client_without_routers_is_refused() -> None:
    """A mistake in the settings shows at once."""
    with pytest.raises(ValueError, match="router address"):
        DualMapClient([])


def test_prompts_do_not_show_in_what_is_printed() -> None:
    """A repr is how things reach logs."""
    shown = repr(Request("r", Prompt.of_text("secret words"), cache_salt="tenant")) + repr(Prompt.of_tokens([99999]))

    assert "secret" not in shown
    assert "tenant" not in shown
    assert "99999" not in shown
    assert "\\x9f" not in shown
