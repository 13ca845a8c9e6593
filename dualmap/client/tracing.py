"""The client's span of a request and its context on the way: client, then Route, then Submit."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from dualmap.rpc.route_calls import CallFailed, Metadata
from dualmap.rpc.route_values import Done, Request, Route


def carrying(traceparent: str) -> Metadata:
    """Metadata that carries a context; none for an empty one."""
    return (("traceparent", traceparent),) if traceparent else ()


class RequestSpan:
    """One request's span, or nothing without a tracer. It says ids, numbers and codes, never a prompt."""

    def __init__(self, tracer: trace.Tracer | None, request: Request) -> None:
        self.metadata: Metadata = ()
        self._span: trace.Span | None = None
        if tracer is None:
            return
        self._span = tracer.start_span("dualmap.request", kind=SpanKind.CLIENT)
        self._span.set_attribute("dualmap.request_id", request.request_id)
        self._span.set_attribute("gen_ai.operation.name", _operation(request))
        if request.model:
            self._span.set_attribute("gen_ai.request.model", request.model)
        if request.max_output_tokens:
            self._span.set_attribute("gen_ai.request.max_tokens", request.max_output_tokens)
        context = self._span.get_span_context()
        if context.is_valid:
            flags = int(context.trace_flags)
            self.metadata = carrying(f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._span is None:
            return
        if isinstance(error, CallFailed):
            self._span.set_status(Status(StatusCode.ERROR, error.reason or error.code))
        self._span.end()

    def retried(self, code: str, instance_id: str) -> None:
        """An attempt failed before its first token and another follows."""
        if self._span is not None:
            self._span.add_event("attempt_failed", {"code": code, "dualmap.instance": instance_id})

    def routed(self, route: Route) -> None:
        """A router said where to; the last route is the one that counts."""
        if self._span is not None:
            self._span.set_attributes(
                {
                    "dualmap.reason": route.reason,
                    "dualmap.predicted_ttft_ms": route.predicted_ttft_ms,
                    "dualmap.ring_epoch": route.ring_epoch,
                    "dualmap.state_age_ms": route.state_age_ms,
                    "dualmap.hit_tokens": route.hit_tokens,
                }
            )

    def ended(self, done: Done, attempt: int) -> None:
        """The request ran to its end."""
        if self._span is not None:
            self._span.set_attributes(
                {
                    "dualmap.instance": done.instance_id,
                    "dualmap.attempt": attempt,
                    "dualmap.ttft_ms": done.ttft_ms,
                    "dualmap.handovers": done.handovers,
                    "gen_ai.response.time_to_first_chunk": done.ttft_ms / 1000,
                    "gen_ai.response.finish_reasons": [done.finish_reason],
                    "gen_ai.usage.input_tokens": done.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": done.hit_tokens,
                    "gen_ai.usage.output_tokens": done.output_tokens,
                }
            )


def _operation(request: Request) -> str:
    chat = request.openai is not None and "chat" in request.openai.path
    return "chat" if chat else "text_completion"
