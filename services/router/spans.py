"""The Route span: made by hand, and only where traces are on, because an interceptor costs as much as the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dualmap.core.choose import Decision
from dualmap.core.errors import DualMapError

_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = frozenset({"traceparent", "tracestate"})
_RPC = {"rpc.system": "grpc", "rpc.service": "dualmap.v1.Router", "rpc.method": "Route"}
"""As the gRPC instrumentation of the other services names them."""


class RouteSpans:
    """Spans of one router's Route calls."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def route(self, context: grpc.ServicerContext) -> Iterator[Span]:
        """A server span under the caller's; an error is its status, by reason and not by message."""
        carrier = {key: value for key, value in context.invocation_metadata() or () if key in _CARRIED}
        parent = _PROPAGATOR.extract(carrier) if carrier else None
        span = self._tracer.start_span("dualmap.v1.Router/Route", parent, SpanKind.SERVER, _RPC)
        try:
            yield span
        except DualMapError as error:
            span.set_status(Status(StatusCode.ERROR, error.reason))
            raise
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of a span; empty when it has no valid context."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def describe(span: Span, request_id: str, decision: Decision | None, ring_epoch: int) -> None:
    """Set what was decided; a repeated answer has no decision."""
    if not span.is_recording():
        return
    attributes: dict[str, Any] = {
        "dualmap.request_id": request_id,
        "dualmap.ring_epoch": ring_epoch,
        "dualmap.repeated": decision is None,
        "rpc.grpc.status_code": 0,
    }
    if decision is not None:
        chosen = decision.chosen
        attributes |= {
            "dualmap.instance": chosen.instance_id,
            "dualmap.reason": decision.reason.name,
            "dualmap.hit_tokens": chosen.hit_tokens,
            "dualmap.key_blocks": decision.key_blocks,
            "dualmap.predicted_ttft_ms": chosen.predicted_ttft_s * 1000,
            "dualmap.state_age_ms": chosen.state_age_ms,
            "dualmap.candidates": len(decision.candidates),
        }
        other = decision.backup
        if other is not None:
            attributes["dualmap.other_instance"] = other.instance_id
            attributes["dualmap.other_hit_tokens"] = other.hit_tokens
            attributes["dualmap.other_predicted_ttft_ms"] = other.predicted_ttft_s * 1000
    span.set_attributes(attributes)
