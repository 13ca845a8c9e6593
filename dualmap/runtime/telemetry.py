"""Traces by the standard `OTEL_*` variables, to OTLP over gRPC; nothing is made when none asks for them.

A backend that does not answer costs one log line a minute and at most two seconds at stop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult

from dualmap.runtime.lifetime import StartError
from dualmap.runtime.logs import get_log
from dualmap.runtime.span_encoding import encoded

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_LOG_EVERY_S = 60.0
# These speak once a batch, or once a span: we count and say it once a minute instead.
_LOUD_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")

_log = get_log("telemetry")


class Telemetry:
    """The process's traces: a provider to pass on, or the no-op one."""

    def __init__(self, provider: trace.TracerProvider, exporter: QuietExporter | None = None) -> None:
        self.provider = provider
        self._exporter = exporter

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere; callers leave gRPC's tracing interceptors out when not."""
        return self._exporter is not None

    @property
    def failed_exports(self) -> int:
        """Batches that the backend did not take."""
        return self._exporter.failures if self._exporter else 0

    def tracer(self, name: str) -> trace.Tracer:
        """The tracer of one part of the process."""
        return self.provider.get_tracer(name)

    def shutdown(self, timeout_s: float = 2.0) -> bool:
        """Send what is left; False when the time was over first and the rest was dropped."""
        if self._exporter is None or not isinstance(self.provider, TracerProvider):
            return True
        sender = threading.Thread(target=self.provider.shutdown, name="telemetry-shutdown", daemon=True)
        sender.start()
        sender.join(timeout_s)
        finished = not sender.is_alive()
        if not finished:
            self._exporter.shutdown()
            _log.warning("traces_dropped_at_stop", timeout_s=timeout_s)
        return finished


class _WrittenExporter(OTLPSpanExporter):
    """The SDK's exporter, with our encoder."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encoded(data)


class QuietExporter(SpanExporter):
    """Passes batches on; counts the failed ones and logs at most one event a minute."""

    def __init__(self, inner: SpanExporter, now_s: Callable[[], float] = time.monotonic) -> None:
        self.failures = 0
        self._inner = inner
        self._now_s = now_s
        self._log_at_s = float("-inf")
        self._given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one batch; called by one thread at a time."""
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failures += 1
            if not self._given_up and self._now_s() >= self._log_at_s:
                self._log_at_s = self._now_s() + _LOG_EVERY_S
                _log.warning("trace_export_failed", failed_batches=self.failures)
        return result

    def shutdown(self) -> None:
        """Give up what is being sent."""
        self._given_up = True
        self._inner.shutdown()


def start_telemetry(service: str, environ: Mapping[str, str] = os.environ) -> Telemetry:
    """Set traces up if a variable asks for it: an OTLP endpoint, or OTEL_TRACES_EXPORTER (otlp, console, none).

    Sampling follows the caller's decision unless OTEL_TRACES_SAMPLER says otherwise. Raises StartError naming the
    variable when it asks for what this process cannot do.
    """
    kind = environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(environ.get(name) for name in _ENDPOINTS) else "none")
    if kind == "none" or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return Telemetry(trace.NoOpTracerProvider())
    exporter = QuietExporter(_exporter_of(kind, environ))
    for name in _LOUD_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": f"dualmap-{service}"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Telemetry(provider, exporter)


def _exporter_of(kind: str, environ: Mapping[str, str]) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter()
    if kind != "otlp":
        raise StartError(f"OTEL_TRACES_EXPORTER={kind}: only otlp, console and none are built in")
    for name in _PROTOCOLS:
        if environ.get(name, "grpc") != "grpc":
            raise StartError(f"{name}={environ[name]}: only grpc is built in")
    return _WrittenExporter()
