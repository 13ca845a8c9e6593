"""Spans written by hand say what the SDK's encoder says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dualmap.runtime.span_encoding import encoded

_VALUES = st.one_of(
    st.text(max_size=200), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.just("")
)


def finished(make: Callable[[trace.Tracer, trace.Tracer], object]) -> Sequence[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "test"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    make(provider.get_tracer("one", "1.0"), provider.get_tracer("two"))
    return exporter.get_finished_spans()


@given(st.dictionaries(st.text(min_size=1, max_size=40), _VALUES, max_size=20), st.text(min_size=1, max_size=80))
def test_any_plain_span_is_written_as_the_sdk_writes_it(attributes: dict[str, str | int | float], name: str) -> None:
    """Whatever its attributes are called and hold."""
    spans = finished(lambda one, _two: one.start_span(name, Context(), SpanKind.SERVER, attributes).end())

    assert encoded(spans) == encode_spans(spans)


def nested(one: trace.Tracer, two: trace.Tracer) -> None:
    """A trace over two tracers, under a remote parent, with an error in it."""
    carrier = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with one.start_as_current_span("outer", TraceContextTextMapPropagator().extract(carrier)):
        inner = two.start_span("inner", kind=SpanKind.CLIENT)
        inner.set_status(Status(StatusCode.ERROR, "BROKEN"))
        inner.end()
        two.start_span("fine").end()


def rare(one: trace.Tracer, _two: trace.Tracer) -> None:
    """What is not written by hand."""
    span = one.start_span("rare", attributes={"list": ("a", "b")})
    span.add_event("happened", {"n": 1})
    one.start_span("linked", links=[trace.Link(span.get_span_context())]).end()
    span.end()


@pytest.mark.parametrize("make", [nested, rare])
def test_traces_are_written_as_the_sdk_writes_them(make: Callable[[trace.Tracer, trace.Tracer], object]) -> None:
    """Parents, scopes, errors; and what is left to the SDK."""
    spans = finished(make)

    assert encoded(spans) == encode_spans(spans)
    assert encoded([]) == encode_spans([])
