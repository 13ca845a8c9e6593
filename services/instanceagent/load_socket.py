"""SGLang's load socket: load pushed on change. Lossy by design, so it only ever refreshes what polls say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from services.instanceagent.engine_dialect import EngineLoad
from services.instanceagent.engine_http import number

LEAST_FIELDS = 6
"""Of the positional statistic, as far as every version has it."""

MAX_STAT_BYTES = 64 * 1024


def load_of(payload: bytes) -> EngineLoad | None:
    """A "LoadStat"; None for anything else. Fields beyond those known are passed over."""
    try:
        stat: object = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return None
    if not isinstance(stat, list) or len(stat) < LEAST_FIELDS or stat[0] != "LoadStat":
        return None
    values = [number(value) for value in stat[1:]] + [None] * 10
    running, waiting, tokens, capacity = values[0], values[1], values[2], values[3]
    if running is None or waiting is None or tokens is None or capacity is None:
        return None
    busy_us, uncached = values[9], values[5]
    return EngineLoad(
        running=int(running),
        waiting=int(waiting),
        kv_use=min(1.0, tokens / capacity) if capacity > 0 else 0.0,
        waiting_uncached_tokens=int(uncached) if uncached is not None else None,
        prefill_tokens=values[8],
        prefill_busy_s=busy_us / 1e6 if busy_us is not None else None,
        kv_tokens=int(capacity) or None,
    )


async def follow_load(
    endpoint: str, heard: Callable[[EngineLoad], None], dropped: Callable[[str], None], stop: asyncio.Event
) -> None:
    """Tell each reading until ``stop``; reconnects by itself."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.MAXMSGSIZE, MAX_STAT_BYTES)
        socket.set(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.subscribe(b"load")
        socket.connect(endpoint)
        while not stop.is_set():
            frame = asyncio.ensure_future(socket.recv_multipart())
            await asyncio.wait({frame, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not frame.done():
                frame.cancel()
                await asyncio.gather(frame, return_exceptions=True)
                return
            load = load_of(frame.result()[-1])
            if load is None:
                dropped("bad_load")
            else:
                heard(load)
    finally:
        stopped.cancel()
        socket.close(linger=0)
        context.destroy(linger=0)
