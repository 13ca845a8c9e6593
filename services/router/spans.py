"""The Route span: made by hand, and only where traces are on, because an interceptor costs as much as the call.

It is never made current: nothing below it makes spans, and its context travels by the ticket.
"""

from __future__ import annotations

from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dualmap.core.choose import Decision
from dualmap.rpc.direct_calls import DirectCall

_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = frozenset({"traceparent", "tracestate"})
_RPC = {"rpc.system": "grpc", "rpc.service": "dualmap.v1.Router", "rpc.method": "Route"}
"""As the gRPC instrumentation of the other services names them."""
_SERVER = SpanKind.SERVER
_NO_PARENT = Context()


class RouteSpans:
    """Spans of one router's Route calls: each is started here, then ended by ``routed`` or ``failed``."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._start = tracer.start_span

    def start(self, call: DirectCall) -> Span:
        """A server span under the caller's."""
        carrier = {key: str(value) for key, value in call.invocation_metadata() or () if key in _CARRIED}
        parent = _PROPAGATOR.extract(carrier, _NO_PARENT) if carrier else _NO_PARENT
        return self._start("dualmap.v1.Router/Route", parent, _SERVER, _RPC)


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of a span; empty when it has no valid context."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def failed(span: Span, reason: str) -> None:
    """End it with an error: by reason and not by message."""
    span.set_status(Status(StatusCode.ERROR, reason))
    span.end()


def routed(span: Span, request_id: str, decision: Decision | None, ring_epoch: int) -> None:
    """End it with what was decided; a repeated answer has no decision."""
    if span.is_recording():
        span.set_attributes(_described(request_id, decision, ring_epoch))
        span.end()


def _described(request_id: str, decision: Decision | None, ring_epoch: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "dualmap.request_id": request_id,
        "dualmap.ring_epoch": ring_epoch,
        "dualmap.repeated": decision is None,
        "rpc.grpc.status_code": 0,
    }
    if decision is not None:
        chosen = decision.chosen
        attributes["dualmap.instance"] = chosen.instance_id
        attributes["dualmap.reason"] = decision.reason.name
        attributes["dualmap.hit_tokens"] = chosen.hit_tokens
        attributes["dualmap.key_blocks"] = decision.key_blocks
        attributes["dualmap.predicted_ttft_ms"] = chosen.predicted_ttft_s * 1000
        attributes["dualmap.state_age_ms"] = chosen.state_age_ms
        attributes["dualmap.candidates"] = len(decision.candidates)
        other = decision.backup
        if other is not None:
            attributes["dualmap.other_instance"] = other.instance_id
            attributes["dualmap.other_hit_tokens"] = other.hit_tokens
            attributes["dualmap.other_predicted_ttft_ms"] = other.predicted_ttft_s * 1000
    return attributes
