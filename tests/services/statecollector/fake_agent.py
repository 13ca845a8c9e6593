"""A hand-written agent on a real gRPC server: truthful by default, and with one switch for each way to fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.rpc.convert_state import StateQuery, query_of, state_message
from dualmap.v1 import agent_pb2


@dataclass(eq=False)
class FakeRank:
    """One instance: an index, the changes that led to it, and a load."""

    name: str
    incarnation: int = 1
    agent_epoch: int = 1
    version: int = 1
    index: KvIndex = field(default_factory=KvIndex)
    load: LoadReport = field(default_factory=lambda: LoadReport(running_requests=1))
    changes: list[tuple[int, bytes]] = field(default_factory=list)
    polls: list[StateQuery] = field(default_factory=list)
    delay_s: float = 0.0
    broken: bool = False
    fail_next: int = 0
    lie: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def store(self, *blocks: int) -> None:
        for block in blocks:
            self.version += 1
            self.index.set(block, 1)
            self.changes.append((self.version, pack_change(block, 1)))
        self._tell()

    def set_load(self, load: LoadReport) -> None:
        self.version += 1
        self.load = load
        self._tell()

    def restart_engine(self) -> None:
        self.incarnation += 1
        self.index = KvIndex()
        self.changes.clear()
        self.version += 1
        self._tell()

    def restart_agent(self) -> None:
        self.agent_epoch += 1
        self.restart_engine()
        self.version = 1

    def update(self, query: StateQuery) -> StateUpdate:
        whole = query.full or (query.incarnation, query.agent_epoch) != (self.incarnation, self.agent_epoch)
        update = StateUpdate(
            self.name,
            self.incarnation,
            self.agent_epoch,
            self.version,
            0 if whole else query.since_version,
            self.load,
            self.index.snapshot() if whole else None,
            b"" if whole else b"".join(record for version, record in self.changes if version > query.since_version),
            self.index.digest,
            len(self.index),
        )
        return self._falsify(update)

    def _falsify(self, update: StateUpdate) -> StateUpdate:
        if self.lie == "digest" and not update.full:
            return replace(update, kv_digest=update.kv_digest ^ 1)
        if self.lie == "whole_digest" and update.full:
            return replace(update, kv_digest=update.kv_digest ^ 1)
        if self.lie == "version" and not update.full:
            return replace(update, version=update.since - 1)
        if self.lie == "not_full":
            return replace(update, snapshot=None)
        if self.lie == "order" and update.snapshot is not None:
            return replace(update, snapshot=KvSnapshot(b"\2" * 8 + b"\1" * 8, b"\1\1"))
        if self.lie == "stale_whole" and update.full:
            return replace(update, version=1)
        if self.lie == "name":
            return replace(update, instance_id="another/0")
        return update

    def _tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class FakeAgent:
    """Serves its ranks."""

    def __init__(self, *ranks: FakeRank, streams: bool = True) -> None:
        """``streams`` False: it is of a version that knows no held streams."""
        self.streams = streams
        self.opened_streams = 0
        self.ranks = {rank.name: rank for rank in ranks}
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def get_state(self, request: agent_pb2.GetStateRequest, context: Any) -> agent_pb2.GetStateResponse:
        query = query_of(request)
        rank = self.ranks[query.instance_id]
        rank.polls.append(query)
        if rank.broken or rank.fail_next > 0:
            rank.fail_next -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")
        if rank.delay_s:
            await asyncio.sleep(rank.delay_s)
        same = (query.incarnation, query.agent_epoch) == (rank.incarnation, rank.agent_epoch)
        if query.wait_ms and same and query.since_version == rank.version:
            changed = rank.changed
            try:
                async with asyncio.timeout(query.wait_ms / 1_000):
                    await changed.wait()
            except TimeoutError:
                pass
        return state_message(1, rank.update(query))

    async def poll_state(self, requests: Any, context: Any) -> None:
        self.opened_streams += 1
        async for request in requests:
            await context.write(agent_pb2.PollStateResponse(state=await self.get_state(request.query, context)))

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        get_state = grpc.unary_unary_rpc_method_handler(
            self.get_state,
            request_deserializer=agent_pb2.GetStateRequest.FromString,
            response_serializer=agent_pb2.GetStateResponse.SerializeToString,
        )
        handlers: dict[str, Any] = {"GetState": get_state}
        if self.streams:
            handlers["PollState"] = grpc.stream_stream_rpc_method_handler(
                self.poll_state,
                request_deserializer=agent_pb2.PollStateRequest.FromString,
                response_serializer=agent_pb2.PollStateResponse.SerializeToString,
            )
        handler = grpc.method_handlers_generic_handler("dualmap.v1.InstanceAgent", handlers)
        self._server.add_generic_rpc_handlers((handler,))
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
