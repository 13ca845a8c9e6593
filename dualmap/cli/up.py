"""`dualmap up`: a whole cluster on this machine in the foreground, stopped cleanly by Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.runtime.settings import mask_password


def up(
    instances: Annotated[int, typer.Option(min=1, max=64, help="Agents with simulated engines.")] = 4,
    routers: Annotated[int, typer.Option(min=1, max=8, help="Routers.")] = 1,
    start_depth: Annotated[int, typer.Option(min=1, max=64, help="Blocks of the shortest key.")] = 2,
    queue_policy: Annotated[str, typer.Option(help="slo, hit_first or fifo.")] = "slo",
) -> None:
    """Start everything here and keep it running until Ctrl-C."""
    options = LocalOptions(instances=instances, routers=routers, start_depth=start_depth, queue_policy=queue_policy)
    asyncio.run(_up(options))


async def _up(options: LocalOptions) -> None:
    console = Console()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with console.status("starting"):
        cluster = LocalCluster(options)
        start = asyncio.create_task(cluster.__aenter__())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            return
        await start
    try:
        _show(console, cluster)
        await stop.wait()
    finally:
        with console.status("stopping"):
            await cluster.__aexit__(None, None, None)
        console.print("stopped")


def _show(console: Console, cluster: LocalCluster) -> None:
    table = Table(title=f"DualMap is up (pool {cluster.pool}, start depth {cluster.options.start_depth})")
    for column in ("service", "gRPC", "metrics", "pid"):
        table.add_column(column)
    for name, service in sorted(cluster.services.items()):
        table.add_row(name, service.address, service.metrics_address or "-", str(service.process.pid))
    console.print(table)
    router = cluster.router_addresses[0]
    console.print(
        f"redis  {mask_password(cluster.redis_url)}\nlogs   {cluster.folder}\n"
        f"try    dualmap route --routers {router} --text 'hello'"
    )
    console.print("Ctrl-C stops it.")
