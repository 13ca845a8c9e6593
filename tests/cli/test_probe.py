"""The container's health check: the exit code says what the server's health says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from dualmap.cli.probe import main, probe
from dualmap.rpc.health import SyncHealthServicer
from dualmap.runtime.health import Component, Health


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def component(health: Health) -> Component:
    return health.component("redis")


@pytest.fixture
def address(health: Health) -> Iterator[str]:
    """A real server with our health service on a free port."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(SyncHealthServicer(health), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_ready_server_passes(address: str, component: Component) -> None:
    """Exit code 0 and silence."""
    component.ok()

    assert probe(address) is None
    assert main([address]) == 0


def test_a_server_that_is_not_ready_fails(
    address: str, component: Component, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alive is not enough, and stderr says what is wrong."""
    component.fail("does not answer")

    assert main([address]) == 1
    assert "not serving" in capsys.readouterr().err
    assert main([address, "--component", "liveness"]) == 0


def test_one_component_can_be_asked_for(address: str, health: Health, component: Component) -> None:
    """A component's own state, whatever the rest says; an unknown one fails."""
    health.component("ring").fail("none yet")
    component.ok()

    assert probe(address, "redis") is None
    assert probe(address, "ring") == f"{address}: not serving"
    assert probe(address, "nobody") == f"{address}: NOT_FOUND"


def test_no_server_fails_within_the_time() -> None:
    """A closed port is an answer, not an exception."""
    assert probe("127.0.0.1:1", timeout_s=0.5) == "127.0.0.1:1: UNAVAILABLE"


def test_a_name_that_does_not_fit_is_refused() -> None:
    """The request is written by hand and has one byte for the length."""
    with pytest.raises(ValueError, match="127"):
        probe("127.0.0.1:1", "x" * 128)


def test_the_port_comes_from_the_environment(
    address: str, component: Component, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's one health check fits every service."""
    component.ok()
    monkeypatch.setenv("DUALMAP_SERVER__PORT", address.rpartition(":")[2])

    assert main([]) == 0


def test_it_imports_none_of_what_services_are_made_of() -> None:
    """It runs every few seconds beside each service: gRPC is all it may load."""
    code = (
        "import sys, dualmap.cli.probe; print([m for m in ('pydantic', 'numpy', 'typer', 'redis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == "[]"
