"""Promises of tracing."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from dualmap.runtime.lifetime import StartError
from dualmap.runtime.telemetry import QuietExporter, start_telemetry


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_nothing_is_made_when_no_variable_asks() -> None:
    """And spans cost nothing."""
    telemetry = start_telemetry("router", {})

    with telemetry.tracer("x").start_as_current_span("route") as span:
        assert not span.is_recording()
    assert not telemetry.enabled
    assert telemetry.shutdown()


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_the_standard_off_switches_work(environ: dict[str, str]) -> None:
    """An endpoint alone does not force traces."""
    assert not start_telemetry("router", environ).enabled


def test_a_backend_that_never_answers_does_not_hold_up_the_stop(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds at most, and the process says what it dropped."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent_port}"}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", environ["OTEL_EXPORTER_OTLP_ENDPOINT"])
    telemetry = start_telemetry("router", environ)
    with telemetry.tracer("x").start_as_current_span("route") as span:
        assert span.is_recording()

    began_s = time.monotonic()
    finished = telemetry.shutdown(0.2)

    assert not finished
    assert time.monotonic() - began_s < 2.0


def test_spans_carry_the_service_name_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME goes before ours."""
    given = start_telemetry("router", {"OTEL_TRACES_EXPORTER": "console"})
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    told = start_telemetry("router", {"OTEL_TRACES_EXPORTER": "console"})

    assert getattr(given.provider, "resource").attributes["service.name"] == "dualmap-router"  # noqa: B009
    assert getattr(told.provider, "resource").attributes["service.name"] == "mine"  # noqa: B009
    assert given.shutdown()
    assert told.shutdown()


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
    ],
)
def test_what_is_not_built_in_is_refused_at_start(environ: dict[str, str]) -> None:
    """Traces that silently go nowhere are worse."""
    with pytest.raises(StartError, match="built in"):
        start_telemetry("router", environ)


class _Refusing(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_failed_exports_are_counted_and_said_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    """Not once a batch."""
    now_s = 0.0
    exporter = QuietExporter(_Refusing(), lambda: now_s)

    for _ in range(100):
        exporter.export([])
    now_s = 61.0
    exporter.export([])

    assert exporter.failures == 101
    assert capsys.readouterr().out.count("trace_export_failed") == 2


def test_spans_for_a_backend_that_is_not_there_are_dropped_and_memory_stays_flat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bounded queue is all that an absent backend costs: 40,000 spans kept would be 80 MiB."""
    # The discard port: nothing listens there.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    telemetry = start_telemetry("router", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    tracer, process = telemetry.tracer("x"), psutil.Process()

    def make(spans: int) -> int:
        for number in range(spans):
            tracer.start_span("route", attributes={"number": number, "text": f"{number:x}" * 8}).end()
        gc.collect()
        return int(process.memory_info().rss)

    before = make(10_000)
    after = make(40_000)
    telemetry.shutdown(0.1)

    assert after - before < 16 * 2**20
