"""An OTLP collector in this process: what real exporters send, by name, trace and service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_span_id: str
    kind: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id) each."""

    @property
    def line(self) -> dict[str, Any]:
        """As the trace sink of compose writes it."""
        return {
            "name": self.name,
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_span_id": self.parent_span_id,
            "attributes": self.attributes,
            "links": [{"trace_id": trace_id, "span_id": span_id} for trace_id, span_id in self.links],
        }


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span."""

    port: int = 0
    _spans: list[Seen] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One batch."""
        seen = [
            _seen(span, _values(sent.resource.attributes).get("service.name", ""))
            for sent in request.resource_spans
            for scope in sent.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += seen
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        """All so far."""
        with self._lock:
            return list(self._spans)

    def of_trace(self, trace_id: str) -> list[Seen]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def of_request(self, request_id: str) -> list[Seen]:
        """The whole trace of a request; empty before any span of it arrived."""
        spans = self.spans
        ids = {span.trace_id for span in spans if span.attributes.get("dualmap.request_id") == request_id}
        return [span for span in spans if span.trace_id in ids]


def _seen(span: Any, service: str) -> Seen:
    return Seen(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        kind=span.kind,
        attributes=_values(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()
