"""Promises of the metrics port and of departed instances' series."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from dualmap.runtime.health import Health
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.metrics import Exposition, InstanceSeries, new_registry


def _get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_port_shows_metrics_liveness_and_readiness() -> None:
    """And says what is not well."""
    registry = new_registry()
    Counter("dualmap_x_things", "Things.", registry=registry).inc()
    health = Health()
    redis = health.component("redis")
    with Exposition(registry, "127.0.0.1", 0, health) as exposition:
        assert "dualmap_x_things_total 1.0" in _get(exposition.port, "/metrics")[1]
        assert _get(exposition.port, "/livez")[0] == 200
        assert _get(exposition.port, "/readyz") == (503, "redis: starting\n")
        redis.ok()
        assert _get(exposition.port, "/readyz") == (200, "redis: ok\n")
        assert _get(exposition.port, "/other")[0] == 404


def test_a_port_in_use_is_one_clear_error() -> None:
    """No traceback for the operator."""
    with (
        Exposition(CollectorRegistry(), "127.0.0.1", 0) as first,
        pytest.raises(StartError, match=f"metrics port 127.0.0.1:{first.port}"),
    ):
        Exposition(CollectorRegistry(), "127.0.0.1", first.port)


def test_ipv6_loopback_is_served() -> None:
    """::1 is loopback too."""
    with Exposition(CollectorRegistry(), "::1", 0) as exposition:
        assert exposition.port > 0


def test_series_of_the_departed_go_after_five_minutes() -> None:
    """In every metric, for every pool; the others stay."""
    registry = CollectorRegistry()
    waiting = Gauge("waiting", "x", ["pool", "instance"], registry=registry)
    moved = Counter("moved", "x", ["pool", "instance", "reason"], registry=registry)
    for instance in ("a/0", "b/0", "c/0"):
        waiting.labels("p", instance).set(1)
        moved.labels("p", instance, "slo").inc()
    series = InstanceSeries([waiting, moved])

    series.departed("a/0", 0.0)
    series.departed("b/0", 0.0)
    series.departed("a/0", 200.0)
    series.returned("b/0")

    assert series.sweep(299.0) == ()
    assert series.sweep(300.0) == ("a/0",)
    page = generate_latest(registry).decode()
    assert 'instance="a/0"' not in page
    assert page.count('instance="b/0"') >= 2
    assert series.sweep(1e6) == ()
