"""The Route span: made by hand, and only where traces are on, because an interceptor costs as much as the call.

It is never made current: nothing below it makes spans, and its context travels by the ticket.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from dualmap.core.choose import Decision
from dualmap.rpc.direct_calls import DirectCall

_PROPAGATOR = TraceContextTextMapPropagator()
_CARRIED = frozenset({"traceparent", "tracestate"})
_RPC = {"rpc.system": "grpc", "rpc.service": "dualmap.v1.Router", "rpc.method": "Route"}
"""As the gRPC instrumentation of the other services names them."""
_NAME = "dualmap.v1.Router/Route"
_SERVER = SpanKind.SERVER
_DROP = Sampling.DROP
_NO_PARENT = Context()


class _Ids(RandomIdGenerator):
    """Gives a trace the id that was drawn for it before it was known to be one."""

    def __init__(self) -> None:
        self._next = 0

    def draw(self) -> int:
        """The next trace's id."""
        self._next = super().generate_trace_id()
        return self._next

    def generate_trace_id(self) -> int:
        """The id drawn last, or a new one where none was."""
        trace_id, self._next = self._next, 0
        return trace_id or super().generate_trace_id()


class RouteSpans:
    """Spans of one router's Route calls, on one thread: started here, ended by ``routed`` or ``failed``."""

    def __init__(self, provider: TracerProvider) -> None:
        self._ids = provider.id_generator = _Ids()
        self._sampled = provider.sampler.should_sample
        self._start = provider.get_tracer("dualmap.router").start_span

    def start(self, call: DirectCall) -> tuple[Span | None, str]:
        """A server span under the caller's, and the traceparent for the ticket; no span where it is not sampled.

        Built-in samplers judge a trace by its id, so one that nobody began is asked before a span is made: that is a
        half of what the SDK takes to make a span that records nothing. Its flags: drawn at random, not sampled.
        """
        carrier = {key: str(value) for key, value in call.invocation_metadata() or () if key in _CARRIED}
        if not carrier:
            trace_id = self._ids.draw()
            if self._sampled(_NO_PARENT, trace_id, _NAME, _SERVER, _RPC).decision is _DROP:
                return None, f"00-{trace_id:032x}-{self._ids.generate_span_id():016x}-02"
        parent = _PROPAGATOR.extract(carrier, _NO_PARENT) if carrier else _NO_PARENT
        span = self._start(_NAME, parent, _SERVER, _RPC)
        return span if span.is_recording() else None, traceparent_of(span)


def traceparent_of(span: Span) -> str:
    """The W3C traceparent of a span; empty when it has no valid context."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def failed(span: Span | None, reason: str) -> None:
    """End it with an error: by reason and not by message."""
    if span is not None:
        span.set_status(Status(StatusCode.ERROR, reason))
        span.end()


def routed(span: Span, request_id: str, decision: Decision | None, ring_epoch: int) -> None:
    """End it with what was decided; a repeated answer has no decision."""
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
