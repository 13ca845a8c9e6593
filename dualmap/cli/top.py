"""`dualmap top`: a live view of a running system, through its public calls alone; `--once` is one frame for scripts."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from dualmap.cli.addresses import (
    COLLECTORS,
    REBALANCERS,
    RING_MANAGERS,
    ROUTERS,
    CollectorsOption,
    PoolOption,
    RebalancersOption,
    RingManagersOption,
    RoutersOption,
    TimeoutOption,
    addresses_of,
    each_behind,
)
from dualmap.cli.failures import CommandError, failing_plainly, plain
from dualmap.cli.top_frame import SHOWN_EVENTS, WIDE_COLUMNS, Room, frame
from dualmap.cli.top_picture import History, Picture
from dualmap.cli.top_sources import Places, Sample, Sources

SVG_COLUMNS = 144
"""Width of a frame that goes nowhere but into a file or a pipe: all columns fit, with containers' names too."""

_MOST_ROWS = 64


def top(
    *,
    routers: RoutersOption = ROUTERS,
    collectors: CollectorsOption = COLLECTORS,
    ring_managers: RingManagersOption = RING_MANAGERS,
    rebalancers: RebalancersOption = REBALANCERS,
    pool: PoolOption = "",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write one frame to this SVG file, too, and end.")] = None,
    watch_s: Annotated[
        float, typer.Option(min=0, max=600, help="With --once or --svg: watch so long first, so that rates are recent.")
    ] = 0.0,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Time between frames, seconds.")] = 1.0,
    timeout_s: TimeoutOption = 2.0,
) -> None:
    """Show instances, routers, leaders, ring changes and migrations; Ctrl-C ends it."""
    with failing_plainly():
        places = Places(
            each_behind(addresses_of(routers, "--routers")),
            each_behind(addresses_of(collectors, "--collectors")),
            each_behind(addresses_of(ring_managers, "--ring-managers")),
            each_behind(addresses_of(rebalancers, "--rebalancers")),
            pool,
        )
        console = Console()
        if once or svg is not None or not console.is_terminal:
            picture = asyncio.run(_one(places, watch_s, interval_s, timeout_s))
            _print(picture, svg)
            return
        asyncio.run(_follow(console, places, interval_s, timeout_s))


async def _one(places: Places, watch_s: float, interval_s: float, timeout_s: float) -> Picture:
    history = History()
    async with Sources(places, timeout_s) as sources:
        first = _checked(await sources.sample())
        picture = history.take(first)
        while picture.sample.at_s - first.at_s < watch_s:
            await asyncio.sleep(interval_s)
            picture = history.take(await sources.sample())
        return picture


async def _follow(console: Console, places: Places, interval_s: float, timeout_s: float) -> None:
    """Frames until SIGINT or SIGTERM; the screen is given back either way."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    history = History()
    async with Sources(places, timeout_s) as sources:
        picture = history.take(_checked(await sources.sample()))
        with Live(frame(picture, _room(console, picture)), console=console, screen=True, auto_refresh=False) as live:
            while not await _stopped(stop, interval_s):
                picture = history.take(await sources.sample())
                live.update(frame(picture, _room(console, picture)), refresh=True)


async def _stopped(stop: asyncio.Event, within_s: float) -> bool:
    try:
        await asyncio.wait_for(stop.wait(), within_s)
    except TimeoutError:
        return False
    return True


def _checked(sample: Sample) -> Sample:
    """The sample. Raises CommandError when nobody answered at all: there is no system at these addresses."""
    if sample.answered:
        return sample
    first = plain(sample.failures[0])
    raise CommandError(f"no service answers; {first}" if len(sample.failures) > 1 else first)


def _room(console: Console, picture: Picture) -> Room:
    """Rows of the instance table that leave the rest of the frame on the screen."""
    sample = picture.sample
    services = (len(sample.routers), len(sample.ring_managers) + len(sample.collectors) + len(sample.rebalancers))
    wide = console.size.width >= WIDE_COLUMNS
    beside = max if wide else sum
    tables = beside((services[0] + 4, services[1] + 4))
    events = beside((SHOWN_EVENTS + 2, SHOWN_EVENTS + 2))
    return Room(max(3, console.size.height - 2 - 5 - tables - events), console.size.width)


def _print(picture: Picture, svg: Path | None) -> None:
    probe = Console()
    console = Console(record=svg is not None, width=None if probe.is_terminal and svg is None else SVG_COLUMNS)
    console.print(frame(picture, Room(_MOST_ROWS, console.width)))
    if svg is None:
        return
    drawn = console.export_svg(title="dualmap top", unique_id="dualmap-top")
    # Without its web fonts the file is whole by itself; a viewer's monospace does.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    try:
        svg.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--svg {svg}: {error.strerror}") from error
