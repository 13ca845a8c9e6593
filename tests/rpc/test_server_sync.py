"""Promises of the thread-pool server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dualmap.rpc.clients import sync_channel
from dualmap.rpc.server import SyncServer
from dualmap.rpc.status import problem_of
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.settings import ServerSettings
from dualmap.v1 import router_pb2, router_pb2_grpc
from tests.rpc.servers import Parts, SyncRouter


class _Running:
    def __init__(self, parts: Parts, server: SyncServer, channel: grpc.Channel) -> None:
        self.parts = parts
        self.server = server
        self.router = router_pb2_grpc.RouterStub(channel)
        # Its stubs' types end at the class.
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def route(self, request_id: str) -> router_pb2.RouteResponse:
        return self.router.Route(router_pb2.RouteRequest(request_id=request_id), timeout=10)


@pytest.fixture
def running() -> Iterator[_Running]:
    """A real server on any free port and a real stub."""
    parts = Parts()
    server = SyncServer(ServerSettings(max_message_bytes=10_000), parts.parts, threads=2)
    server.add(router_pb2_grpc.add_RouterServicer_to_server, SyncRouter())
    port = server.start()
    with sync_channel(f"127.0.0.1:{port}", max_message_bytes=1_000_000) as channel:
        yield _Running(parts, server, channel)
        server.stop()


@pytest.mark.parametrize(
    ("request_id", "code", "reason"),
    [
        ("busy", grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
        ("defect", grpc.StatusCode.INTERNAL, ""),
        ("abort", grpc.StatusCode.OUT_OF_RANGE, ""),
    ],
)
def test_errors_reach_the_client_as_the_table_says(
    running: _Running, request_id: str, code: grpc.StatusCode, reason: str
) -> None:
    """And are counted under their code; details of a defect stay inside."""
    with pytest.raises(grpc.RpcError) as failed:
        running.route(request_id)

    problem = problem_of(failed.value)
    assert (problem.code, problem.reason) == (code, reason)
    assert "secret" not in problem.message
    assert running.parts.handled("Route", code.name) == 1


def test_a_call_is_answered_and_counted(running: _Running) -> None:
    """With method and code."""
    assert running.route("r1").request_id == "r1"
    assert running.parts.handled("Route", "OK") == 1


def test_a_stream_answers_then_ends_with_its_error(running: _Running) -> None:
    """The same mapping for streams."""
    requests = [
        router_pb2.RouteStreamRequest(request=router_pb2.RouteRequest(request_id=name)) for name in ("r1", "busy")
    ]
    answers = running.router.RouteStream(iter(requests), timeout=10)
    assert next(answers).request_id == "r1"
    with pytest.raises(grpc.RpcError) as failed:
        next(answers)

    assert problem_of(failed.value).reason == "OVERLOADED"


def test_health_watchers_hold_no_thread_and_end_at_stop(running: _Running) -> None:
    """Four watchers, two threads, calls still answered; the stop does not wait for its grace."""
    component = running.parts.health.component("view")
    names = ("", "", "dualmap.v1.Router", "dualmap.v1.Router")
    watches = [running.health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=20) for name in names]
    assert [next(watch).status for watch in watches] == [2, 2, 2, 2]
    component.ok()
    assert [next(watch).status for watch in watches] == [1, 1, 1, 1]
    assert running.route("r1").request_id == "r1"

    began_s = time.monotonic()
    running.server.stop()

    assert [[answer.status for answer in watch] for watch in watches] == [[2], [2], [2], [2]]
    assert time.monotonic() - began_s < 3.0


def test_a_port_in_use_is_one_clear_error(running: _Running) -> None:
    """Never two servers on one port in silence."""
    other = SyncServer(ServerSettings(port=running.server.port), Parts().parts, threads=1)

    with pytest.raises(StartError, match="is in use"):
        other.start()
    other.stop()


def test_a_unary_call_without_timeout_is_refused(running: _Running) -> None:
    """By our own channels, before anything is sent."""
    with pytest.raises(ValueError, match="timeout"):
        running.router.Route(router_pb2.RouteRequest(request_id="r1"))
