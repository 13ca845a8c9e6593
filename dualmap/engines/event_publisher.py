"""Publishes KV events as engines do: PUB with topic and sequence, ROUTER that replays the last batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from dualmap.engines.event_wire import Event, EventWire

_END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Where one rank publishes; port 0 is any free one. ``replay`` False: late joiners get nothing."""

    wire: EventWire
    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int = 0
    replay: bool = True
    topic: str = "kv-events"
    rank: int = 0
    buffer_steps: int = 10_000


class EventPublisher:
    """One rank's publisher in one life: sequences from 0. Open, then `publish`, then `close`."""

    def __init__(self, options: PublisherOptions) -> None:
        self.options = options
        self.port = options.port
        self.replay_port = options.replay_port
        self.next_sequence = 0
        self.drop_live = 0
        """Batches that are kept for replay and not sent: for tests."""

        self.drop_all = 0
        """Batches that are neither sent nor kept."""

        self._context = zmq.asyncio.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        # Sending on a PUB never blocks, so it needs no loop.
        self._live: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Bind. Raises zmq.ZMQError for a port in use."""
        host = self.options.host
        self._live.set(zmq.SNDHWM, 100_000)
        self.port = _bind(self._live, host, self.port)
        if self.options.replay:
            self.replay_port = _bind(self._replay, host, self.replay_port)
            self._task = asyncio.create_task(self._serve_replay(), name="kv-replay")

    async def close(self) -> None:
        """Let go of the ports; subscribers see the connection end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._live.close(linger=0)
        self._replay.close(linger=0)
        self._context.destroy(linger=0)

    def publish(self, events: Sequence[Event]) -> None:
        """Send one batch, as after one step of a scheduler."""
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        payload = self.options.wire.batch(time.time(), events, self.options.rank)
        if self.drop_all:
            self.drop_all -= 1
            return
        self._kept.append((sequence, payload))
        if self.drop_live:
            self.drop_live -= 1
            return
        self._live.send_multipart([self.options.topic.encode(), sequence.to_bytes(8, "big"), payload])

    async def _serve_replay(self) -> None:
        topic = [self.options.topic.encode()] if self.options.wire.replay_topic else []
        while True:
            parts = await self._replay.recv_multipart()
            if len(parts) != 3 or len(parts[2]) != 8:
                continue
            asker, delimiter, start = parts
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._kept):
                if sequence >= first:
                    await self._replay.send_multipart([asker, delimiter, *topic, sequence.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([asker, delimiter, *([b""] if topic else []), _END_SEQUENCE, b""])


def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> int:
    address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
    if ":" in host:
        socket.set(zmq.IPV6, 1)
    if port:
        socket.bind(f"{address}:{port}")
        return port
    return int(socket.bind_to_random_port(address))
