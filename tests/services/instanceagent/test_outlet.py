"""Events on their way to a follower: in order, batched, pulsed, bounded."""

from __future__ import annotations

import pytest

from dualmap.core.errors import Superseded
from dualmap.rpc.route_values import Pulse, Started, Tokens
from services.instanceagent.outlet import MAX_PENDING_BYTES, MAX_PENDING_EVENTS, Outlet


async def test_events_come_in_order_tokens_batched_and_then_the_end() -> None:
    """Tokens that still wait are one event; nothing follows the end."""
    outlet = Outlet()
    outlet.put(Started("a/0", 1.0))
    outlet.put(Tokens(1, b"x"))
    outlet.put(Tokens(2, b"y"))
    outlet.end()
    outlet.put(Tokens(9))
    assert [event async for event in outlet.follow(1)] == [Started("a/0", 1.0), Tokens(3, b"xy")]


async def test_an_error_comes_after_what_was_put() -> None:
    """The follower hears all of it, then the error."""
    outlet = Outlet()
    outlet.put(Tokens(1))
    outlet.end(Superseded("r", 1))
    events = outlet.follow(1)
    assert await anext(events) == Tokens(1)
    with pytest.raises(Superseded):
        await anext(events)


async def test_silence_is_filled_with_pulses() -> None:
    """Each pulse time without an event gives one."""
    outlet = Outlet()
    events = outlet.follow(0.01)
    assert [await anext(events), await anext(events)] == [Pulse(), Pulse()]
    outlet.put(Tokens(1))
    assert await anext(events) == Tokens(1)
    await events.aclose()


def test_a_follower_too_slow_is_found_out() -> None:
    """Neither events nor bytes pile up without end."""
    events, data = Outlet(), Outlet()
    assert all(events.put(Started("a/0", float(n))) for n in range(MAX_PENDING_EVENTS))
    assert not events.put(Started("a/0", 0.0))
    assert data.put(Tokens(1, bytes(MAX_PENDING_BYTES)))
    assert not data.put(Tokens(1, b"x"))
