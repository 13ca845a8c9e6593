"""Prometheus metrics of one process: its registry, its HTTP port (with /livez and /readyz), series of the departed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, Counter, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app

from dualmap.runtime.health import Health
from dualmap.runtime.lifetime import StartError

DEPARTED_KEPT_S = 300.0
"""How long a departed instance's series stay: long enough for the last scrape and a look."""


def new_registry() -> CollectorRegistry:
    """A registry with the process's own facts (memory, processor time, open files) in it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def count_by_reason(counter: Counter, pool: str) -> Callable[[str], None]:
    """Counts by reason; a series is looked up once, as that costs more than to count. For a fixed set of reasons."""
    known: dict[str, Counter] = {}

    def count(reason: str) -> None:
        series = known.get(reason)
        if series is None:
            series = known[reason] = counter.labels(pool=pool, reason=reason)
        series.inc()

    return count


class Exposition:
    """The HTTP server of /metrics, /livez and /readyz, in its own thread until `stop`."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int, health: Health | None = None) -> None:
        """Listen at once (port 0: any free one). Raises StartError when the port is in use."""
        try:
            server = _Ipv6Server if ":" in host else ThreadingWSGIServer
            self._server = make_server(host, port, _application(registry, health), server, _SilentHandler)
        except OSError as error:
            raise StartError(f"metrics port {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Close the port; a scrape under way is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


class LabelledMetric(Protocol):
    """What a metric with labels can do here."""

    def remove_by_labels(self, labels: dict[str, str]) -> None:
        """Drop every series that has these labels."""
        ...


class InstanceSeries:
    """Drops the series of instances that departed, some time after."""

    def __init__(self, metrics: Iterable[LabelledMetric], kept_s: float = DEPARTED_KEPT_S) -> None:
        self._metrics = tuple(metrics)
        self._kept_s = kept_s
        self._departed_at_s: dict[str, float] = {}

    def departed(self, instance_id: str, now_s: float) -> None:
        """The instance left; monotonic seconds."""
        self._departed_at_s.setdefault(instance_id, now_s)

    def returned(self, instance_id: str) -> None:
        """The instance is back: its series stay."""
        self._departed_at_s.pop(instance_id, None)

    def sweep(self, now_s: float) -> tuple[str, ...]:
        """Drop what departed long enough ago; call it every few seconds. Gives the instances dropped."""
        due = tuple(name for name, at_s in self._departed_at_s.items() if now_s - at_s >= self._kept_s)
        for name in due:
            del self._departed_at_s[name]
            for metric in self._metrics:
                metric.remove_by_labels({"instance": name})
        return due


class _Ipv6Server(ThreadingWSGIServer):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the parent's name)
        """A scrape is not worth a line."""


def _application(
    registry: CollectorRegistry, health: Health | None
) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    metrics = make_wsgi_app(registry)

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            page: Iterable[bytes] = metrics(environ, start_response)
            return page
        if health is not None and path in {"/livez", "/readyz"}:
            well = health.alive if path == "/livez" else health.ready
            lines = [f"{state.name}: {state.problem or 'ok'}\n" for state in health.states()]
            status = "200 OK" if well else "503 Service Unavailable"
        else:
            lines, status = ["see /metrics, /livez and /readyz\n"], "404 Not Found"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [line.encode() for line in lines]

    return application
