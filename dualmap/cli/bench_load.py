"""Sends calls and times them: closed loop, open loop, one stream; two targets in turns of a quarter second.

The collector of this process is off while it measures: its own pauses are not the server's.
"""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from queue import SimpleQueue
from typing import Any, cast

import grpc

from dualmap.cli.bench_workload import streamed, with_id
from dualmap.rpc.clients import channel_options

TURN_S = 0.25
"""One target's turn; short, so that what else this machine does falls on both alike."""

_TIMEOUT_S = 5.0
Call = Callable[[bytes], object]
Clock = time.perf_counter


@dataclass(slots=True)
class Timed:
    """What was measured of one target: seconds a call, refusals, other failures, seconds of measuring."""

    latency_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0

    def add(self, other: Timed) -> None:
        """Take in another turn, or another thread's part of one."""
        self.latency_s += other.latency_s
        self.refused_s += other.refused_s
        self.failed += other.failed

    @property
    def rate(self) -> float:
        """Answered calls a second."""
        return len(self.latency_s) / self.seconds if self.seconds else 0.0


class Bodies:
    """Requests without end: the bodies in turn, each with an id never sent before."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self._bodies = bodies
        self._run = f"{random.getrandbits(32):08x}"
        self._number = 0

    def __next__(self) -> bytes:
        # Two threads may take the same number in between; the id must not depend on it alone.
        self._number = number = self._number + 1
        return with_id(
            self._bodies[number % len(self._bodies)], f"{self._run}{number:08x}{threading.get_ident():x}"[:32]
        )


class Target:
    """One method of one server over one connection or several, which take calls in turn."""

    def __init__(self, address: str, method: str, bodies: Sequence[bytes], connections: int = 1) -> None:
        # Channels of one process share their connections unless told not to.
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        self.channels = [grpc.insecure_channel(address, options) for _ in range(connections)]
        self.bodies = Bodies(bodies)
        self.timed = Timed()
        self._method = method
        unaries: Iterator[Any] = cycle([channel.unary_unary(method) for channel in self.channels])
        self.call: Call = lambda raw: next(unaries)(raw, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close every connection."""
        for channel in self.channels:
            channel.close()

    def stream(self) -> tuple[Call, Callable[[], None]]:
        """A call that sends one message on a stream and waits for its answer; and the stream's end."""
        messages: SimpleQueue[bytes | None] = SimpleQueue()
        answers: Iterator[bytes] = self.channels[0].stream_stream(self._method)(cast("Any", iter(messages.get, None)))

        def call(raw: bytes) -> object:
            messages.put(streamed(raw))
            return next(answers)

        return call, lambda: messages.put(None)


def timed_call(call: Call, raw: bytes, began_s: float, timed: Timed) -> None:
    """Make one call and note how it ended."""
    try:
        call(raw)
    except grpc.RpcError as error:
        if cast("grpc.Call", error).code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            timed.refused_s.append(Clock() - began_s)
        else:
            timed.failed += 1
    else:
        timed.latency_s.append(Clock() - began_s)


def _on_threads(count: int, work: Callable[[Timed], None], into: Timed) -> None:
    parts = [Timed() for _ in range(count)]
    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    began_s = Clock()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    into.seconds += Clock() - began_s
    for part in parts:
        into.add(part)


def closed_turn(target: Target, in_flight: int, seconds: float) -> None:
    """So many threads, each sending its next call when the last was answered."""
    until_s = Clock() + seconds

    def work(timed: Timed) -> None:
        while (now_s := Clock()) < until_s:
            timed_call(target.call, next(target.bodies), now_s, timed)

    _on_threads(in_flight, work, target.timed)


def open_turn(target: Target, rate: float, threads: int, seconds: float) -> None:
    """Poisson arrivals, whatever the answers do. A call taken up late is timed from when it was due."""
    start_s = Clock() + 0.01
    due = iter(_arrivals(start_s, rate, seconds))

    def work(timed: Timed) -> None:
        # `next` of a list's iterator is one step of the interpreter: no lock is needed.
        for due_s in due:
            late = Clock() > due_s
            while (left_s := due_s - Clock()) > 0:
                time.sleep(left_s)
            timed_call(target.call, next(target.bodies), due_s if late else Clock(), timed)

    _on_threads(threads, work, target.timed)


def _arrivals(start_s: float, rate: float, seconds: float) -> list[float]:
    arrivals = []
    at_s = 0.0
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        arrivals.append(start_s + at_s)
    return arrivals


def stream_turn(target: Target, seconds: float) -> None:
    """One stream, one message at a time."""
    call, end = target.stream()
    call(next(target.bodies))  # the stream is open when the clock starts
    began_s = now_s = Clock()
    while now_s < began_s + seconds:
        call(next(target.bodies))
        after_s = Clock()
        target.timed.latency_s.append(after_s - now_s)
        now_s = after_s
    target.timed.seconds += now_s - began_s
    end()


def in_turns(turns: Sequence[Callable[[float], None]], seconds: float) -> None:
    """Each target's turn after the other's until every one had ``seconds``."""
    with _quiet_collector():
        left_s = seconds
        while left_s > 0:
            for turn in turns:
                turn(min(TURN_S, left_s))
            left_s -= TURN_S


@contextmanager
def _quiet_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
