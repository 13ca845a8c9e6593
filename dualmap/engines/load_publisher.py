"""SGLang's load socket: a statistic on change, and each second as a sign of life. Lossy as the real one."""

from __future__ import annotations

import asyncio

import msgspec
import zmq

from dualmap.engines.fake_rank import FakeRank
from dualmap.runtime.clock import Clock

HEARTBEAT_S = 1.0
LOOK_S = 0.05
_HIGH_WATER = 8


class LoadPublisher:
    """One rank's; `run` it in a task."""

    def __init__(self, rank: FakeRank, number: int, kv_tokens: int, clock: Clock) -> None:
        self._rank = rank
        self._number = number
        self._kv_tokens = kv_tokens
        self._clock = clock
        self._sequence = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self.port = 0

    def open(self, host: str, port: int) -> None:
        """Bind; port 0 is any free one."""
        self._socket.set(zmq.SNDHWM, _HIGH_WATER)
        if port:
            self._socket.bind(f"tcp://{host}:{port}")
            self.port = port
        else:
            self.port = int(self._socket.bind_to_random_port(f"tcp://{host}"))

    async def run(self, stop: asyncio.Event) -> None:
        """Publish until ``stop``."""
        last: list[object] = []
        said_s = 0.0
        try:
            while not await self._clock.wait(stop, LOOK_S):
                stat, now_s = self._stat(), self._clock.now_s()
                if stat != last or now_s - said_s >= HEARTBEAT_S:
                    last, said_s = stat, now_s
                    self._socket.send_multipart(
                        [b"load", self._sequence.to_bytes(8, "big"), msgspec.msgpack.encode(stat)]
                    )
                    self._sequence += 1
        finally:
            self._socket.close(linger=0)
            self._context.destroy(linger=0)

    def _stat(self) -> list[object]:
        rank = self._rank
        model = rank.engine.model
        counters = rank.counters
        return [
            "LoadStat",
            rank.running,
            rank.waiting,
            model.cache.used,
            self._kv_tokens,
            self._number,
            rank.waiting_uncached_tokens,
            model.cache.used + rank.waiting_uncached_tokens,
            model.options.max_running,
            counters.prefill_tokens,
            int(counters.prefill_busy_s * 1_000_000),
        ]
