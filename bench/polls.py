"""A poll as a unary call, as a question on a held stream, and as an update pushed on one: CPU of both ends.

    python bench/polls.py [--instances 50] [--period-ms 100] [--seconds 5]

Process times, side by side. The streams exist here only; the contract has the unary call. Both ends parse and build
the real messages.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import sys
import time
from typing import Any

import grpc
import grpc.aio

from dualmap.cli.bench_state_agents import HollowInstance
from dualmap.rpc.clients import aio_channel
from dualmap.rpc.convert_state import StateQuery, query_message, query_of, state_message, update_of
from dualmap.v1 import agent_pb2

_UNARY, _ASKED, _PUSHED = "/bench.Polls/Unary", "/bench.Polls/Asked", "/bench.Polls/Pushed"
KINDS = ("unary", "asked", "pushed")
CHANGES = 8


def _agent(pipe: multiprocessing.connection.Connection, instances: int, period_s: float) -> None:
    asyncio.run(_serve(pipe, instances, period_s))


async def _serve(pipe: multiprocessing.connection.Connection, count: int, period_s: float) -> None:
    instances = {f"a/{rank}": HollowInstance(f"a/{rank}", 1_000, rank) for rank in range(count)}

    def answer(query: StateQuery) -> agent_pb2.GetStateResponse:
        instances[query.instance_id].change(CHANGES)
        return state_message(0, instances[query.instance_id].update(query))

    async def unary(request: agent_pb2.GetStateRequest, _context: Any) -> agent_pb2.GetStateResponse:
        return answer(query_of(request))

    async def asked(requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(answer(query_of(request)))

    async def pushed(request: agent_pb2.GetStateRequest, context: Any) -> None:
        query = query_of(request)
        since = query.since_version
        while True:
            message = answer(StateQuery(query.instance_id, 1, 1, since))
            since = message.update.version
            await context.write(message)
            await asyncio.sleep(period_s)

    types: dict[str, Any] = {
        "request_deserializer": agent_pb2.GetStateRequest.FromString,
        "response_serializer": agent_pb2.GetStateResponse.SerializeToString,
    }
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, **types),
        "Asked": grpc.stream_stream_rpc_method_handler(asked, **types),
        "Pushed": grpc.unary_stream_rpc_method_handler(pushed, **types),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Polls", handlers),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    await server.start()
    while True:
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time())


class _Collector:
    """Reads for some seconds in one way; how many updates, and the CPU seconds of both ends."""

    def __init__(self, port: int, pipe: multiprocessing.connection.Connection, period_s: float, seconds: float) -> None:
        self._port = port
        self._pipe = pipe
        self._period_s = period_s
        self._seconds = seconds
        self._updates = 0

    async def measure(self, kind: str, instances: int) -> tuple[int, float, float]:
        self._updates = 0
        async with aio_channel(f"127.0.0.1:{self._port}") as channel:
            read = {"unary": self._poll, "asked": self._ask, "pushed": self._listen}[kind]
            tasks = [asyncio.create_task(read(channel, f"a/{rank}")) for rank in range(instances)]
            # All streams are open, all code is warm.
            await asyncio.sleep(1.0)
            own_s, agent_s, before = time.process_time(), self._agent_cpu_s(), self._updates
            await asyncio.sleep(self._seconds)
            result = (
                self._updates - before,
                time.process_time() - own_s,
                self._agent_cpu_s() - agent_s,
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return result

    def _agent_cpu_s(self) -> float:
        self._pipe.send(None)
        return float(self._pipe.recv())

    async def _poll(self, channel: grpc.aio.Channel, name: str) -> None:
        call: Any = channel.unary_unary(
            _UNARY, agent_pb2.GetStateRequest.SerializeToString, agent_pb2.GetStateResponse.FromString
        )
        since = 1
        while True:
            update = update_of((await call(query_message(StateQuery(name, 1, 1, since)), timeout=5)).update)
            since = update.version
            self._updates += 1
            await asyncio.sleep(self._period_s)

    async def _ask(self, channel: grpc.aio.Channel, name: str) -> None:
        call: Any = channel.stream_stream(
            _ASKED, agent_pb2.GetStateRequest.SerializeToString, agent_pb2.GetStateResponse.FromString
        )
        stream = call()
        since = 1
        try:
            while True:
                await stream.write(query_message(StateQuery(name, 1, 1, since)))
                async with asyncio.timeout(5):
                    since = update_of((await stream.read()).update).version
                self._updates += 1
                await asyncio.sleep(self._period_s)
        finally:
            stream.cancel()

    async def _listen(self, channel: grpc.aio.Channel, name: str) -> None:
        call: Any = channel.unary_stream(
            _PUSHED, agent_pb2.GetStateRequest.SerializeToString, agent_pb2.GetStateResponse.FromString
        )
        stream = call(query_message(StateQuery(name, 1, 1, 1)))
        try:
            async for message in stream:
                update_of(message.update)
                self._updates += 1
        finally:
            stream.cancel()


async def _compare(collector: _Collector, instances: int, seconds: float) -> None:
    for kind in KINDS * 2:
        updates, own_s, agent_s = await collector.measure(kind, instances)
        sys.stdout.write(
            f"{kind:6}  {updates / seconds:6.0f} updates/s  collector {own_s / updates * 1e6:5.0f} us  "
            f"agent {agent_s / updates * 1e6:5.0f} us an update\n"
        )
        sys.stdout.flush()


def main() -> None:
    """All kinds in turn, twice, so that a noisy machine shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=50)
    parser.add_argument("--period-ms", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_agent, args=(theirs, given.instances, given.period_ms / 1_000), daemon=True
    )
    child.start()
    port = int(ours.recv())
    try:
        collector = _Collector(port, ours, given.period_ms / 1_000, given.seconds)
        asyncio.run(_compare(collector, given.instances, given.seconds))
    finally:
        child.kill()
        child.join()


if __name__ == "__main__":
    main()
