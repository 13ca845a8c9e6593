"""`dualmap route` before a real router: what it prints, what it leaves behind, how it fails."""

from __future__ import annotations

import base64
import json
import re

import pytest
from opentelemetry.sdk.trace import TracerProvider

from dualmap.v1 import types_pb2
from tests.cli.conftest import Run
from tests.cli.services import collector, nobody, serving
from tests.services.router.harness import Router, pool_of, running_router


def address_of(router: Router) -> str:
    return f"127.0.0.1:{router.server.port}"


def bookings(router: Router) -> int:
    return sum(len(view.bookings) for view in router.pool.view.instances.values())


def test_a_route_is_shown_and_given_back(run: Run, ids: str) -> None:
    """Instance, backup and reason in a table; a try leaves no booking."""
    with running_router(pool_of(3)) as router:
        code, out, err = run("route", "--router", address_of(router), "--tokens", ids, "--request-id", "r-1")

        assert (code, err) == (0, "")
        assert "r-1, attempt 1" in out
        assert "LESS_LOADED" in out
        assert out.count("agent-") == 2
        assert bookings(router) == 0


def test_a_kept_route_keeps_its_booking_and_gives_the_ticket(run: Run, ids: str) -> None:
    """--json says all, with the ticket as an HTTP header carries it; --keep leaves the booking for its submission."""
    with running_router(pool_of(3)) as router:
        code, out, _ = run("route", "--routers", address_of(router), "--tokens", ids, "--keep", "--json")
        said = json.loads(out)
        ticket = types_pb2.Ticket.FromString(base64.b64decode(said["ticket"]))

        assert code == 0
        assert ticket.instance_id == said["instance"]["instance_id"]
        assert ticket.prompt_tokens == 1_300
        assert bookings(router) == 1
        assert "trace_id" not in said


def test_fields_of_the_request_reach_the_router(run: Run, ids: str) -> None:
    """Excluded instances are not chosen; a wrong model is the router's own word."""
    with running_router(pool_of(2)) as router:
        line = ("route", "--routers", address_of(router), "--tokens", ids, "--json")
        _, out, _ = run(*line, "--exclude", "agent-0/0", "--model", "alias")
        code, _, err = run(*line, "--model", "other")

        assert json.loads(out)["instance"]["instance_id"] == "agent-1/0"
        assert code == 1
        assert "known: alias, default" in err


def test_a_trace_is_named_with_its_link(run: Run, ids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's trace id, and where Jaeger shows it."""
    monkeypatch.setenv("DUALMAP_JAEGER_URL", "http://jaeger.example:1/")
    with running_router(pool_of(2), provider=TracerProvider(shutdown_on_exit=False)) as router:
        line = ("route", "--routers", address_of(router), "--tokens", ids, "--trace")
        _, out, err = run(*line, "--json")
        said = json.loads(out)
        _, table, _ = run(*line)

        assert err == ""
        assert len(said["trace_id"]) == 32
        assert said["trace_url"] == f"http://jaeger.example:1/trace/{said['trace_id']}"
        assert re.search(r"^in Jaeger: http://jaeger\.example:1/trace/[0-9a-f]{32}$", table, re.MULTILINE)


def test_a_trace_that_nobody_took_is_said(run: Run, ids: str) -> None:
    """The route stands; the missing trace is one line with its cause."""
    with running_router(pool_of(2)) as router:
        code, _, err = run("route", "--routers", address_of(router), "--tokens", ids, "--trace")

    assert code == 0
    assert "no trace" in err
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in err


def test_a_dead_router_is_passed_over(run: Run, ids: str) -> None:
    """As long as one of several answers, there is a route."""
    with nobody() as dead, running_router(pool_of(2)) as router:
        for _ in range(2):
            code, _, err = run("route", "--routers", f"{dead},{address_of(router)}", "--tokens", ids)
            assert (code, err) == (0, "")


def test_failures_are_one_line_and_a_code(run: Run) -> None:
    """Nobody there, no address, another service, no prompt, an empty pool."""
    with nobody() as dead, serving(collector()) as other, running_router(pool_of(0)) as empty:
        for words, expected, says in (
            (("--routers", dead, "--text", "hi", "--timeout-s", "0.3"), 1, f"router {dead} does not answer"),
            (("--routers", "nonsense", "--text", "hi"), 1, "'nonsense' is no address"),
            (("--routers", other, "--text", "hi"), 1, "another service listens"),
            (("--routers", dead), 2, "give the prompt once"),
            (("--routers", address_of(empty), "--text", "hi", "--timeout-s", "0.3"), 1, address_of(empty)),
        ):
            code, out, err = run("route", *words)

            assert (code, out) == (expected, ""), err
            assert err.startswith("dualmap: ")
            assert err.count("\n") == 1
            assert says in err
