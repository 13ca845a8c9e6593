"""Calls answered on gRPC's event thread: what any server of ours promises, and that no call is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from dualmap.core.errors import NotFound, Overloaded
from dualmap.rpc.admission import Admission
from dualmap.rpc.direct_calls import DirectCall, Queue
from dualmap.rpc.server import SyncServer
from dualmap.rpc.status import problem_of
from dualmap.runtime.settings import ServerSettings
from tests.rpc.servers import Parts

_SERVICE = "dualmap.v1.Router"


class Echo:
    """Answers what was asked, fails or waits as the bytes say."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.asked: list[bytes] = []
        self.open: set[DirectCall] = set()
        self.ends: SimpleQueue[DirectCall] = SimpleQueue()

    def route(self, raw: bytes, call: DirectCall) -> bytes:
        self.asked.append(raw)
        if raw == b"wait":
            self.entered.set()
            assert self.go_on.wait(10)
        if raw == b"unknown":
            raise NotFound("thing", "x")
        if raw == b"defect":
            raise KeyError("inner secret")
        if raw == b"metadata":
            return repr(dict(call.invocation_metadata() or ())["about"]).encode()
        return raw

    def opened(self, call: DirectCall) -> None:
        if len(self.open) >= 2:
            raise Overloaded(1_000, "two streams are open")
        self.open.add(call)

    def answered(self, raw: bytes, call: DirectCall) -> bytes:
        return self.route(raw, call)

    def refused(self, raw: bytes, error: Exception) -> bytes:
        return f"refused {raw.decode()}".encode()

    def ended(self, call: DirectCall) -> None:
        self.open.discard(call)
        self.ends.put(call)


class Running:
    """A real server and a channel before it."""

    def __init__(self, echo: Echo, parts: Parts, server: SyncServer, channel: grpc.Channel) -> None:
        self.echo = echo
        self.parts = parts
        self.server = server
        self.route: Any = channel.unary_unary(f"/{_SERVICE}/Route")
        self.stream: Any = channel.stream_stream(f"/{_SERVICE}/RouteStream")
        self.silent: Any = channel.stream_unary(f"/{_SERVICE}/Route")

    @property
    def under_way(self) -> int:
        """Calls that the server still knows."""
        return len(self.server._server._state.rpc_states)  # type: ignore[attr-defined]


@contextmanager
def running(echo: Echo | None = None, most: int = 256, grace_s: float = 5.0) -> Iterator[Running]:
    echo = echo or Echo()
    parts = Parts()
    queue = Queue(Admission(most, burst_s=60.0), lambda waiting: Overloaded(50, f"{waiting} wait"))
    settings = ServerSettings(max_message_bytes=10_000, drain_grace_s=grace_s)
    server = SyncServer(settings, parts.parts, threads=1, queue=queue)
    server.add(lambda one, registrar: registrar.add_direct(_SERVICE, {"Route": one.route}, {"RouteStream": one}), echo)
    port = server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", (("grpc.max_send_message_length", 1_000_000),)) as channel:
        try:
            yield Running(echo, parts, server, channel)
        finally:
            echo.go_on.set()
            server.stop()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


def test_calls_are_answered_and_none_is_left_behind() -> None:
    """Many at once over one connection; each gets its own answer, and the server forgets it."""
    with running() as one:
        calls = [one.route.future(f"r{number}".encode(), timeout=10) for number in range(200)]

        assert [call.result() for call in calls] == [f"r{number}".encode() for number in range(200)]
        until(lambda: one.under_way == 0, "calls are left behind")
        until(lambda: one.parts.handled("Route", "OK") == 200, "not all were counted")


@pytest.mark.parametrize(
    ("raw", "code", "reason"),
    [
        (b"unknown", grpc.StatusCode.NOT_FOUND, "NOT_FOUND"),
        (b"defect", grpc.StatusCode.INTERNAL, ""),
    ],
)
def test_errors_are_mapped_as_everywhere(raw: bytes, code: grpc.StatusCode, reason: str) -> None:
    """And counted under their code; details of a defect stay inside, and the next call is served."""
    with running() as one:
        with pytest.raises(grpc.RpcError) as failed:
            one.route(raw, timeout=10)
        assert one.route(b"next", timeout=10) == b"next"

        problem = problem_of(failed.value)
        assert (problem.code, problem.reason) == (code, reason)
        assert "secret" not in problem.message
        assert one.parts.handled("Route", code.name) == 1


def test_a_handler_sees_what_was_sent_beside_the_message() -> None:
    """Trace context comes that way."""
    with running() as one:
        assert one.route(b"metadata", metadata=(("about", "this"),), timeout=10) == b"'this'"


def test_a_call_without_a_message_is_refused_by_name() -> None:
    """A caller that closes its side without a word is told so."""
    with running() as one:
        with pytest.raises(grpc.RpcError) as failed:
            one.silent(iter(()), timeout=10)

        assert problem_of(failed.value).code is grpc.StatusCode.INVALID_ARGUMENT
        assert one.echo.asked == []


def test_a_message_too_long_costs_its_call_and_not_the_connection() -> None:
    """RESOURCE_EXHAUSTED, and the next call over the same connection is served."""
    with running() as one:
        with pytest.raises(grpc.RpcError) as failed:
            one.route(bytes(20_000), timeout=10)

        assert problem_of(failed.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert one.route(b"next", timeout=10) == b"next"
        until(lambda: one.under_way == 0, "the failed call is left behind")


def test_who_went_away_while_waiting_is_not_answered() -> None:
    """The work would be for nobody."""
    with running() as one:
        held = one.route.future(b"wait", timeout=10)
        assert one.echo.entered.wait(5)
        gone = one.route.future(b"gone", timeout=10)
        gone.cancel()
        late = one.route.future(b"late", timeout=10)
        one.echo.go_on.set()

        assert (held.result(), late.result()) == (b"wait", b"late")
        until(lambda: one.under_way == 0, "the cancelled call is left behind")
        assert b"gone" not in one.echo.asked


def test_calls_over_the_limit_are_refused_with_the_queues_word() -> None:
    """Served or refused, every call ends; what is refused costs the handler nothing."""
    with running(most=4) as one:
        held = one.route.future(b"wait", timeout=10)
        assert one.echo.entered.wait(5)
        calls = [one.route.future(f"r{number}".encode(), timeout=10) for number in range(100)]
        one.echo.go_on.set()
        problems = [problem_of(error) for call in calls if (error := call.exception()) is not None]

        assert held.result() == b"wait"
        assert len(one.echo.asked) == 1 + 100 - len(problems)
        assert all(problem.code is grpc.StatusCode.RESOURCE_EXHAUSTED for problem in problems)
        assert all(problem.retry_after_ms == 50 for problem in problems)
        until(lambda: one.under_way == 0, "calls are left behind")


def test_a_stream_answers_each_message_in_order() -> None:
    """Sent one by one or all at once."""
    with running() as one:
        messages = [f"m{number}".encode() for number in range(100)]

        assert list(one.stream(iter(messages), timeout=10)) == messages
        one.echo.ends.get(timeout=5)
        until(lambda: one.parts.handled("RouteStream", "OK") == 1, "the stream was not counted")


def test_a_stream_too_many_is_refused_and_a_closed_one_makes_room() -> None:
    """Room is made however a stream ends: by its client's word or by its going away."""
    with running() as one:
        said: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(2)]
        streams = [one.stream(iter(words.get, None), timeout=20) for words in said]
        for words, stream in zip(said, streams, strict=True):
            words.put(b"hello")
            assert next(stream) == b"hello"
        with pytest.raises(grpc.RpcError) as failed:
            list(one.stream(iter((b"third",)), timeout=10))

        said[0].put(None)
        assert list(streams[0]) == []
        streams[1].cancel()
        said[1].put(None)
        for _ in streams:
            one.echo.ends.get(timeout=5)

        assert problem_of(failed.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert list(one.stream(iter((b"again",)), timeout=10)) == [b"again"]


def test_a_stop_waits_for_the_call_in_hand() -> None:
    """Within the grace what was taken is answered, and nothing new is."""
    with running() as one:
        held = one.route.future(b"wait", timeout=10)
        assert one.echo.entered.wait(5)
        stopping = threading.Thread(target=one.server.stop)
        stopping.start()
        assert one.server.stopping.wait(5)
        one.echo.go_on.set()
        stopping.join(5)

        assert held.result() == b"wait"
        assert not stopping.is_alive()
        with pytest.raises(grpc.RpcError):
            one.route(b"late", timeout=2)


def test_a_stop_ends_an_idle_stream_after_the_grace() -> None:
    """Who says nothing more does not hold the process."""
    with running(grace_s=0.1) as one:
        words: SimpleQueue[bytes | None] = SimpleQueue()
        stream = one.stream(iter(words.get, None), timeout=20)
        words.put(b"hello")
        assert next(stream) == b"hello"

        one.server.stop()

        with pytest.raises(grpc.RpcError):
            next(stream)
        words.put(None)
        one.echo.ends.get(timeout=5)


def test_a_server_without_a_queue_takes_no_direct_method() -> None:
    """It would have no rule to refuse by."""
    server = SyncServer(ServerSettings(), Parts().parts, threads=1)

    with pytest.raises(ValueError, match="no queue"):
        server.add(lambda one, registrar: registrar.add_direct(_SERVICE, {"Route": one.route}), Echo())
