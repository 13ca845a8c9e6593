"""Spans of one request at an agent: queue wait, prefill, decode, hand-over. Counts and ids only, never content."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACEPARENT = "traceparent"


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

    def __init__(self, tracer: Tracer, parent: Context, instance_id: str) -> None:
        self._tracer = tracer
        self._parent = parent
        self._instance_id = instance_id
        self._open: Span | None = None

    def enter(self, name: str, linked: str = "", **counts: int) -> None:
        """Begin a state; ``linked`` is a traceparent that caused it."""
        self.leave()
        attributes: dict[str, str | int] = {f"dualmap.{key}": count for key, count in counts.items()}
        attributes["dualmap.instance"] = self._instance_id
        links = []
        if linked:
            cause = trace.get_current_span(_PROPAGATOR.extract({_TRACEPARENT: linked}, Context())).get_span_context()
            links = [Link(cause)] if cause.is_valid else []
        self._open = self._tracer.start_span(name, context=self._parent, attributes=attributes, links=links)

    def leave(self, problem: str = "", **counts: int) -> None:
        """End the state; ``problem`` marks it failed."""
        if self._open is None:
            return
        for key, count in counts.items():
            self._open.set_attribute(f"dualmap.{key}", count)
        if problem:
            self._open.set_status(Status(StatusCode.ERROR, problem))
        self._open.end()
        self._open = None

    def traceparent(self) -> str:
        """W3C traceparent of the open span, for the next process; empty when nothing is traced."""
        carrier: dict[str, str] = {}
        if self._open is not None:
            _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._open, Context()))
        return carrier.get(_TRACEPARENT, "")
