"""Sync with a pool, sync without, or asyncio: `python -m bench.server_kinds [seconds]`, the real handler on each.

Every server is a process of its own over the same view, called in turns with one and with sixteen calls in flight.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from bench.router_in_process import full_view, servicer_over
from dualmap.cli.bench_cluster import start, stop
from dualmap.cli.bench_load import Target, Timed, closed_turn, in_turns
from dualmap.cli.bench_report import latency_of
from dualmap.cli.bench_workload import HASHES_20, samples
from dualmap.core.errors import Overloaded
from dualmap.rpc.admission import Admission
from dualmap.rpc.direct_calls import DirectCalls, Queue
from dualmap.rpc.interceptors import MethodMetrics
from dualmap.rpc.server import server_options
from dualmap.runtime.settings import ServerSettings
from services.router.servicer import RouterServicer

ANSWER_BYTES = 258
METHODS = ("empty", "route")
KINDS = ("library pool", "library pool, 2 threads", "direct", "asyncio")


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, servicer: RouterServicer, aio: bool) -> None:
        self._servicer = servicer
        self._aio = aio

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        answer = bytes(ANSWER_BYTES)
        route = self._servicer.route
        act: Any = route if handler_call_details.method.endswith("route") else lambda _raw, _context: answer
        if not self._aio:
            return grpc.unary_unary_rpc_method_handler(act)

        async def act_soon(raw: bytes, context: Any) -> Any:
            return act(raw, context)

        return grpc.unary_unary_rpc_method_handler(act_soon)


def serve(kind: str) -> None:
    """One server, until the process is ended."""
    servicer = servicer_over(full_view(HASHES_20))
    gc.collect()
    gc.freeze()
    if kind == "asyncio":
        asyncio.run(_serve_aio(servicer))
        return
    server = grpc.server(ThreadPoolExecutor(2 if "2" in kind else 8), options=server_options(ServerSettings()))
    server.add_generic_rpc_handlers((_Handlers(servicer, aio=False),))
    port = server.add_insecure_port("127.0.0.1:0")
    if kind == "direct":
        calls = DirectCalls(server, Queue(Admission(256, 0.025), lambda waiting: Overloaded(50, f"{waiting} wait")))
        answer = bytes(ANSWER_BYTES)
        calls.add_unary("/x/empty", lambda _raw, _call: answer, MethodMetrics())
        calls.add_unary("/x/route", servicer.route, MethodMetrics())
        calls.start()
    else:
        server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    threading.Event().wait()


async def _serve_aio(servicer: RouterServicer) -> None:
    server = grpc.aio.server(options=server_options(ServerSettings()))
    server.add_generic_rpc_handlers((_Handlers(servicer, aio=True),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "serving", "port": port}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Start all kinds, measure, print."""
    if len(sys.argv) > 2 and sys.argv[1] == "serve":
        serve(sys.argv[2])
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    bodies = [sample.body for sample in samples(HASHES_20)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {kind: start(("bench.server_kinds", "serve", kind), {}, folder / "log") for kind in KINDS}
        for server in servers.values():
            stack.callback(stop, server)
        print("| in flight | server | handler | p50 ms | x the library's empty call | calls/s | server µs a call |")
        print("|---|---|---|---|---|---|---|")
        for in_flight in (1, 16):
            targets = {(k, m): Target(servers[k].address, f"/x/{m}", bodies) for k in KINDS for m in METHODS}
            spent = dict.fromkeys(targets, 0.0)

            def turn(place: tuple[str, str], s: float) -> None:
                before = servers[place[0]].cpu_s
                closed_turn(targets[place], in_flight, s)  # noqa: B023  (called within the loop's turn)
                spent[place] += servers[place[0]].cpu_s - before  # noqa: B023

            turns = [lambda s, place=place: turn(place, s) for place in targets]
            in_turns(turns, 0.25)
            for place, target in targets.items():
                target.timed, spent[place] = Timed(), 0.0
            in_turns(turns, seconds)
            floor = latency_of(targets["library pool", "empty"].timed).p50_ms
            for place, target in targets.items():
                one = latency_of(target.timed, spent[place])
                print(
                    f"| {in_flight} | {place[0]} | {place[1]} | {one.p50_ms:.3f} | {one.p50_ms / floor:.2f} "
                    f"| {one.rate:,.0f} | {one.cpu_us:.0f} |"
                )
                target.close()


if __name__ == "__main__":
    main()
