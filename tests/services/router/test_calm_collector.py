"""The collector's passes are kept from calls, and what a route leaves needs none."""

from __future__ import annotations

import gc
import weakref
from typing import Any, cast

import pytest

from services.router.calm_collector import CalmCollector
from tests.services.router.harness import Router, chain_of_blocks, request


class Ring:
    """Refers to itself: only a pass finds it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.asyncio
async def test_the_young_are_set_aside_and_everything_is_looked_at_in_time() -> None:
    """Between whole passes nothing is looked at; a whole pass takes what is in cycles, however old."""
    now_s = 0.0
    collector = CalmCollector(lambda: now_s, whole_every_s=600)
    collector.start()
    try:
        left = weakref.ref(Ring())
        await collector.turn()
        kept = left() is not None
        now_s = 601.0
        await collector.turn()
        enabled = gc.isenabled()
    finally:
        collector.stop()

    assert kept
    assert left() is None
    assert collector.whole_passes == 1
    assert not enabled
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_route_leaves_no_cycle(router: Router) -> None:
    """That is why the passes may be rare."""
    raws = [request(f"r{number}", chain_of_blocks(number, 8)).SerializeToString() for number in range(200)]
    router.servicer.route(raws[0], cast("Any", None))
    gc.collect()
    gc.disable()
    try:
        for raw in raws[1:]:
            router.servicer.route(raw, cast("Any", None))
        unreachable = gc.collect()
    finally:
        gc.enable()

    assert unreachable == 0
