"""Watches of the ring: first the whole, then each change, cut off rather than buffered."""

from __future__ import annotations

import asyncio

import pytest

from dualmap.core.errors import Overloaded
from dualmap.core.membership import RingParameters, RingSnapshot
from services.ringmanager.watchers import QUEUED_RINGS, WatcherHub


def ring(epoch: int) -> RingSnapshot:
    return RingSnapshot("pool", epoch, RingParameters())


async def test_a_watch_begins_with_the_ring_and_tells_each_change() -> None:
    """Whole first, then in order; and it ends when the process stops."""
    hub = WatcherHub(60, lambda: None)
    watch = aiter(hub.watch(ring(1)))

    assert await anext(watch) == ring(1)
    hub.publish(ring(2))
    hub.publish(ring(3))
    assert [await anext(watch), await anext(watch)] == [ring(2), ring(3)]
    hub.close()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    assert len(hub) == 0


async def test_silence_is_filled_with_signs_of_life() -> None:
    """A watcher tells a quiet ring from a dead ring manager."""
    hub = WatcherHub(0.01, lambda: None)
    watch = aiter(hub.watch(None))

    async with asyncio.timeout(5):
        assert [await anext(watch) for _ in range(3)] == [None, None, None]


async def test_a_slow_reader_is_cut_off() -> None:
    """It costs a bounded queue and then ends, and the others hear on."""
    cut: list[int] = []
    hub = WatcherHub(60, lambda: cut.append(1))
    slow, quick = aiter(hub.watch(ring(1))), aiter(hub.watch(ring(1)))
    await anext(slow)
    await anext(quick)

    for epoch in range(2, QUEUED_RINGS + 3):
        hub.publish(ring(epoch))
        assert await anext(quick) == ring(epoch)

    with pytest.raises(Overloaded, match="slowly"):
        await anext(slow)
    assert cut == [1]
    assert len(hub) == 1


async def test_a_stopping_hub_takes_no_watch() -> None:
    """No stream outlives the process's stop."""
    hub = WatcherHub(60, lambda: None)
    hub.close()

    assert [item async for item in hub.watch(ring(1))] == []


async def test_one_watch_too_many_is_refused_and_a_place_that_is_left_is_free_again() -> None:
    """The limit is of watches open now."""
    hub = WatcherHub(60, lambda: None, most=1)
    first, second = hub.watch(ring(1)), hub.watch(ring(1))
    await anext(first)

    with pytest.raises(Overloaded):
        await anext(second)

    await first.aclose()
    assert await anext(hub.watch(ring(1))) == ring(1)
