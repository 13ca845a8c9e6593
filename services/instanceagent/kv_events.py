"""Follows the KV events of one data-parallel rank over ZMQ: live frames, replay before them, gaps, restarts.

A frame is never applied ahead of one that is missing; where continuity cannot be shown, what was known is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from dualmap.runtime.logs import get_log
from services.instanceagent.event_order import EventOrder, Verdict
from services.instanceagent.kv_wire import MAX_PAYLOAD_BYTES, Batch, WireError, decode_in_parts

END_OF_REPLAY = -1
LIVE_FRAMES_KEPT = 100_000

_SEQUENCE_BYTES = 8
_log = get_log("kv_events")


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank publishes. ``replay_endpoint`` None: it replays nothing. ``rank`` None: any rank is taken."""

    endpoint: str
    replay_endpoint: str | None = None
    rank: int | None = None
    sglang: bool = False


@dataclass(frozen=True, slots=True)
class FollowTimes:
    """Patience, in seconds. An idle publisher is silent, so it is asked for its last batch every ``verify_s``."""

    replay_silence_s: float = 5.0
    verify_s: float = 10.0
    reconnect_ms: int = 100
    reconnect_most_ms: int = 5_000
    heartbeat_ms: int = 2_000


class EventSink(Protocol):
    """Who hears of the events; called in the loop's thread."""

    def kv_batch(self, batch: Batch) -> None:
        """Events of the next batch, or a part of them."""
        ...

    def kv_lost(self, reason: str) -> None:
        """What was told before does not hold any more."""
        ...

    def kv_dropped(self, reason: str) -> None:
        """A frame, or an event, was left out."""
        ...

    def kv_replayed(self, outcome: str) -> None:
        """A replay ended."""
        ...


class ReplayFailed(Exception):
    """The replay did not come to its end."""


class KvEventFollower:
    """One subscription; `run` it in a task."""

    def __init__(self, source: EventSource, sink: EventSink, times: FollowTimes | None = None) -> None:
        self._source = source
        self._sink = sink
        self._times = times or FollowTimes()
        self._order = EventOrder()
        self._context = zmq.asyncio.Context()
        self._resync = asyncio.Event()
        self.connected = asyncio.Event()
        """Set while the subscription stands and was caught up once."""

    def resync(self) -> None:
        """Forget what was applied and take everything anew from the publisher's buffer."""
        self._resync.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Follow until ``stop``; a publisher that is away is waited for."""
        try:
            with self._socket(zmq.SUB) as live:
                live.subscribe(b"")
                monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
                live.connect(self._source.endpoint)
                try:
                    await self._follow(live, monitor, stop)
                finally:
                    live.disable_monitor()
        finally:
            self._context.destroy(linger=0)

    async def _follow(self, live: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, stop: asyncio.Event) -> None:
        stopped = asyncio.ensure_future(stop.wait())
        asked = asyncio.ensure_future(self._resync.wait())
        frame = asyncio.ensure_future(live.recv_multipart())
        link = asyncio.ensure_future(monitor.recv_multipart())
        try:
            while not stop.is_set():
                waiting: set[asyncio.Future[object]] = {stopped, asked, frame, link}  # type: ignore[arg-type]
                done, _ = await asyncio.wait(waiting, timeout=self._times.verify_s, return_when=asyncio.FIRST_COMPLETED)
                if link in done:
                    await self._link_changed(parse_monitor_message(link.result())["event"])
                    link = asyncio.ensure_future(monitor.recv_multipart())
                if asked in done:
                    self._resync.clear()
                    self._order.forget()
                    await self._catch_up()
                    asked = asyncio.ensure_future(self._resync.wait())
                if frame in done:
                    await self._live_frame(frame.result())
                    frame = asyncio.ensure_future(live.recv_multipart())
                if not done and self.connected.is_set():
                    await self._catch_up()
        finally:
            for future in (stopped, asked, frame, link):
                future.cancel()
            await asyncio.gather(stopped, asked, frame, link, return_exceptions=True)

    async def _link_changed(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            _log.info("kv_events_connected", endpoint=self._source.endpoint)
            await self._catch_up()
            self.connected.set()
            return
        _log.warning("kv_events_disconnected", endpoint=self._source.endpoint)
        self.connected.clear()
        if self._source.replay_endpoint is None and not self._order.fresh:
            # Nobody can show that the publisher which comes back is the same.
            self._lost("disconnected")

    # Live

    async def _live_frame(self, parts: list[bytes]) -> None:
        frame = _sequence_and_payload(parts)
        if frame is None:
            self._sink.kv_dropped("bad_frame")
            return
        sequence, payload = frame
        verdict = self._order.judge(sequence, payload)
        if verdict in (Verdict.GAP, Verdict.RESTART):
            if verdict is Verdict.RESTART:
                self._lost("restart")
            await self._catch_up()
            verdict = self._order.judge(sequence, payload)
        if verdict in (Verdict.GAP, Verdict.RESTART):
            self._lost("gap")
            verdict = Verdict.NEXT
        if verdict is Verdict.NEXT:
            await self._apply(sequence, payload)

    async def _apply(self, sequence: int, payload: bytes) -> None:
        self._order.applied(sequence, payload)
        wanted = self._source.rank
        try:
            for batch in decode_in_parts(payload, sglang=self._source.sglang):
                for reason in batch.dropped:
                    self._sink.kv_dropped(reason)
                if wanted is not None and batch.rank is not None and batch.rank != wanted:
                    self._sink.kv_dropped("other_rank")
                    return
                self._sink.kv_batch(batch)
                if batch.partial:
                    # A batch may hold thousands of tokens: others get their turn.
                    await asyncio.sleep(0)
        except WireError as error:
            self._sink.kv_dropped(error.reason)

    def _lost(self, reason: str) -> None:
        _log.warning("kv_continuity_lost", endpoint=self._source.endpoint, reason=reason)
        self._order.forget()
        self._sink.kv_lost(reason)

    # Replay

    async def _catch_up(self) -> None:
        """Apply what the publisher's buffer has beyond the watermark, once it proves to be the same publisher."""
        if self._source.replay_endpoint is None:
            return
        try:
            if not self._order.fresh and not await self._continue():
                self._lost("not_continued")
            if self._order.fresh:
                await self._replay_from(0)
        except ReplayFailed:
            _log.warning("kv_replay_failed", endpoint=self._source.replay_endpoint)
            self._sink.kv_replayed("failed")
        else:
            self._sink.kv_replayed("ended")

    async def _continue(self) -> bool:
        """Replay from the last batch applied: it must come back the same, else this is another publisher's life."""
        return await self._replay_from(self._order.watermark, proof=True)

    async def _replay_from(self, start: int, *, proof: bool = False) -> bool:
        count = 0
        async for sequence, payload in self._replay(start):
            if proof and count == 0 and not self._order.knows(sequence, payload):
                return False
            count += 1
            match self._order.judge(sequence, payload):
                case Verdict.NEXT:
                    await self._apply(sequence, payload)
                case Verdict.GAP | Verdict.RESTART:
                    self._lost("gap")
                    await self._apply(sequence, payload)
            await asyncio.sleep(0)
        return count > 0

    async def _replay(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        # A socket for each replay: late answers of one that failed can never mix with the next.
        with self._socket(zmq.DEALER) as dealer:
            dealer.connect(self._source.replay_endpoint or "")
            await dealer.send_multipart([b"", start.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                try:
                    async with asyncio.timeout(self._times.replay_silence_s):
                        parts = await dealer.recv_multipart()
                except TimeoutError as error:
                    raise ReplayFailed from error
                frame = _sequence_and_payload(parts)
                if frame is None:
                    self._sink.kv_dropped("bad_frame")
                    continue
                if frame[0] == END_OF_REPLAY:
                    return
                yield frame

    @contextmanager
    def _socket(self, kind: int) -> Iterator[zmq.asyncio.Socket]:
        socket = self._context.socket(kind)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, LIVE_FRAMES_KEPT)
            socket.set(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            socket.set(zmq.IPV6, 1)
            socket.set(zmq.RECONNECT_IVL, self._times.reconnect_ms)
            socket.set(zmq.RECONNECT_IVL_MAX, self._times.reconnect_most_ms)
            # A silent publisher is normal, so only the transport can tell that it is gone.
            socket.set(zmq.HEARTBEAT_IVL, self._times.heartbeat_ms)
            socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * self._times.heartbeat_ms)
            yield socket
        finally:
            socket.close(linger=0)


def _sequence_and_payload(parts: list[bytes]) -> tuple[int, bytes] | None:
    """The last two parts of any frame: live ones begin with a topic, replayed ones with a delimiter, then maybe one."""
    if len(parts) < 2 or len(parts[-2]) != _SEQUENCE_BYTES:
        return None
    return int.from_bytes(parts[-2], "big", signed=True), parts[-1]
