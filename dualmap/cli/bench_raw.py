"""Unary calls written as HTTP/2 frames by hand: a caller that costs a tenth of gRPC's own, for floods on a few cores.

It speaks as much HTTP/2 as a gRPC server needs to hear, over loopback, to a server that is trusted.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualmap.cli.bench_load import Bodies

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_HEAD = struct.Struct(">BHBBI")
"""Length (8 bits and 16 more), type, flags, stream."""

_MOST = (1 << 31) - 1
_WINDOW_AT_FIRST = 65_535
_TICK_S = 0.001
_READ_BYTES = 1 << 18

# RFC 7541: indexed fields for POST and http, literals that nobody has to remember for the rest.
_POST, _HTTP, _AUTHORITY, _PATH, _CONTENT_TYPE, _NEW_NAME = b"\x83", b"\x86", b"\x01", b"\x04", b"\x0f\x10", b"\x00"


class RawCallError(Exception):
    """The server ended the connection, or said what this caller does not understand."""


@dataclass(slots=True)
class Counts:
    """Calls sent, answered, ended; what ended without an answer was refused."""

    sent: int = 0
    served: int = 0
    ended: int = 0


class RawCaller:
    """Calls of one method over a few connections; one thread."""

    def __init__(self, address: str, method: str, bodies: Sequence[bytes], connections: int = 4) -> None:
        self.counts = Counts()
        self._bodies = Bodies(bodies)
        self._connections = [_Connection(address, method, self.counts) for _ in range(connections)]

    def open(self, rate: float, going_on: Callable[[], bool]) -> None:
        """So many calls a second, whatever the answers do."""
        began_s = time.perf_counter()
        first = self.counts.sent
        while going_on():
            due = int((time.perf_counter() - began_s) * rate) - (self.counts.sent - first)
            self._send(due)
            self._read(_TICK_S)

    def closed(self, in_flight: int, going_on: Callable[[], bool]) -> None:
        """So many calls under way; each that ended is followed by the next."""
        while going_on():
            self._send(in_flight - (self.counts.sent - self.counts.ended))
            self._read(_TICK_S)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._connections:
            connection.close()

    def _send(self, calls: int) -> None:
        for number in range(calls):
            self._connections[number % len(self._connections)].call(next(self._bodies))
        for connection in self._connections:
            connection.flush()

    def _read(self, wait_s: float) -> None:
        for readable in select.select(self._connections, [], [], wait_s)[0]:
            readable.read()


class _Connection:
    def __init__(self, address: str, method: str, counts: Counts) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = b"".join(
            (
                _POST,
                _HTTP,
                _PATH + _text(method),
                _AUTHORITY + _text(address),
                _CONTENT_TYPE + _text("application/grpc"),
                _NEW_NAME + _text("te") + _text("trailers"),
            )
        )
        self._counts = counts
        self._stream = 1
        self._window = _WINDOW_AT_FIRST
        self._held: list[bytes] = []
        """Calls that the server has no room for yet."""
        # No table of headers is kept for us, and answers may be as long as they like.
        settings = struct.pack(">HIHI", 1, 0, 4, _MOST)
        self._out = bytearray(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        self._out += _frame(_WINDOW, 0, 0, struct.pack(">I", _MOST - _WINDOW_AT_FIRST))
        self._in = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def call(self, body: bytes) -> None:
        """Write one call into what is sent next."""
        self._counts.sent += 1
        self._held.append(b"\0" + struct.pack(">I", len(body)) + body)
        self._release()

    def flush(self) -> None:
        """Send what was written."""
        if self._out:
            self._socket.sendall(self._out)
            self._out.clear()

    def read(self) -> None:
        """Take what came."""
        came = self._socket.recv(_READ_BYTES)
        if not came:
            raise RawCallError("the server closed the connection")
        self._in += came
        start, end = 0, len(self._in)
        while end - start >= 9:
            high, low, kind, flags, _ = _HEAD.unpack_from(self._in, start)
            after = start + 9 + (high << 16 | low)
            if after > end:
                break
            self._take(kind, flags, start + 9, after)
            start = after
        del self._in[:start]
        self._release()
        self.flush()

    def close(self) -> None:
        self._socket.close()

    def _take(self, kind: int, flags: int, start: int, end: int) -> None:
        if kind == _DATA:
            # An answer is short: it comes in one frame.
            self._counts.served += 1
        elif kind == _HEADERS:
            # Every call ends with trailers.
            self._counts.ended += flags & _END_STREAM
        elif kind == _WINDOW:
            if not int.from_bytes(self._in[start - 4 : start], "big"):
                self._window += struct.unpack_from(">I", self._in, start)[0]
        elif kind in (_PING, _SETTINGS) and not flags & _ACK:
            self._out += _frame(kind, _ACK, 0, bytes(self._in[start:end]) if kind == _PING else b"")
        elif kind == _GOAWAY:
            raise RawCallError("the server sends us away")

    def _release(self) -> None:
        """Write the calls that the server has room for."""
        released = 0
        for message in self._held:
            if len(message) > self._window:
                break
            self._window -= len(message)
            self._out += _frame(_HEADERS, _END_HEADERS, self._stream, self._headers)
            self._out += _frame(_DATA, _END_STREAM, self._stream, message)
            self._stream += 2
            released += 1
        del self._held[:released]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload)
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def _text(value: str) -> bytes:
    raw = value.encode()
    return bytes((len(raw),)) + raw
