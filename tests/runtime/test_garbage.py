"""Full collections in calm moments only."""

from __future__ import annotations

import asyncio
import sys
import weakref

from dualmap.runtime.garbage import LATEST_S, CalmCollector


class _Ring:
    def __init__(self) -> None:
        self.itself = self


class _HandClock:
    now = 0.0

    def now_s(self) -> float:
        return self.now

    async def wait(self, event: asyncio.Event, timeout_s: float) -> bool:
        raise AssertionError("nobody waits here")


def test_a_full_collection_waits_for_calm_but_not_for_ever() -> None:
    """Busy: what only a collection frees stays. Calm, or the latest moment reached: it goes."""
    clock, calm = _HandClock(), False
    collector = CalmCollector(lambda: calm, clock)

    def garbage() -> weakref.ref[_Ring]:
        return weakref.ref(_Ring())

    first = garbage()
    collector.look()
    assert first() is not None
    calm = True
    collector.look()
    assert first() is None

    calm, second = False, garbage()
    clock.now = LATEST_S
    collector.look()
    assert second() is None


async def test_a_process_looks_no_more_at_what_its_start_made() -> None:
    """After the collector began a full collection has nothing of the start to walk, and none comes by itself."""
    code = (
        "import asyncio, gc\n"
        "from dualmap.runtime.garbage import CalmCollector\n"
        "async def main():\n"
        "    stop = asyncio.Event()\n"
        "    stop.set()\n"
        "    before = len(gc.get_objects())\n"
        "    await CalmCollector(lambda: False).run(stop)\n"
        "    print(before > 10_000, len(gc.get_objects()) < before / 10, gc.get_threshold()[2] > 1_000_000)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    told, _ = await asyncio.wait_for(process.communicate(), 20)
    assert told.split() == [b"True"] * 3
