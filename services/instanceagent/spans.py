"""Spans of one request at an agent: queue wait, prefill, decode, hand-over. Counts and ids only, never content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"

Value = str | int | float
_CONVENTIONS = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
"""Names of OpenTelemetry's GenAI conventions; what they do not know is named dualmap.…"""


def _named(facts: Mapping[str, Value]) -> dict[str, Value]:
    return {_CONVENTIONS.get(key, f"dualmap.{key}"): value for key, value in facts.items()}


def parent_of(brought: str, ticket: str) -> Context:
    """Context to parent on: what the call brought (the server's own span where it is traced), else the ticket's."""
    if brought:
        current = get_current()
        if trace.get_current_span(current).get_span_context().is_valid:
            return current
        return _PROPAGATOR.extract({_TRACEPARENT: brought}, Context())
    return _PROPAGATOR.extract({_TRACEPARENT: ticket}, Context()) if ticket else Context()


class RequestSpans:
    """The span of the state a request is in; a new one ends the one before."""

    def __init__(self, tracer: Tracer, parent: Context, **common: Value) -> None:
        """``common``: facts that every span of the request shows."""
        self._tracer = tracer
        self._parent = parent
        self._common = _named(common)
        self._open: Span | None = None

    def enter(self, name: str, linked: str = "", **facts: Value) -> None:
        """Begin a state; ``linked`` is a traceparent that caused it."""
        self.leave()
        attributes = self._common | _named(facts)
        links = []
        if linked:
            cause = trace.get_current_span(_PROPAGATOR.extract({_TRACEPARENT: linked}, Context())).get_span_context()
            links = [Link(cause)] if cause.is_valid else []
        self._open = self._tracer.start_span(name, context=self._parent, attributes=attributes, links=links)

    def leave(self, facts: Mapping[str, Value] | None = None, problem: str = "") -> None:
        """End the state; ``problem`` marks it failed."""
        if self._open is None:
            return
        self._open.set_attributes(_named(facts or {}))
        if problem:
            self._open.set_status(Status(StatusCode.ERROR, problem))
        self._open.end()
        self._open = None

    def traceparent(self) -> str:
        """W3C traceparent of the open span, for the next process; empty when nothing is traced."""
        return traceparent_of(self._open) if self._open is not None else ""


def traceparent_of(span: Span) -> str:
    """W3C traceparent of a span; empty when nothing is traced."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier.get(_TRACEPARENT, "")


@contextmanager
def http_span(tracer: Tracer, path: str, traceparent: str, request_id: str) -> Iterator[Span]:
    """The span of one HTTP request: under its client's, where it says one. An exception is the caller's to name."""
    attributes = {"http.request.method": "POST", "http.route": path, "dualmap.request_id": request_id}
    parent = parent_of(traceparent, "")
    span = tracer.start_span(f"POST {path}", context=parent, kind=SpanKind.SERVER, attributes=attributes)
    try:
        yield span
    except Exception as error:
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        span.end()


def show_answer(span: Span, status: int, problem: str = "") -> None:
    """What the HTTP request was answered with; ``problem`` is its reason."""
    span.set_attribute("http.response.status_code", status)
    if problem:
        span.set_attribute("error.type", problem)
        span.set_status(Status(StatusCode.ERROR, problem))
