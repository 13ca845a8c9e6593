"""The wire side of the router: bytes in, bytes out. Logic is the decider's.

Requests come as bytes, so that malformed ones are answered INVALID_ARGUMENT and two prompts are noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dualmap.core.errors import DualMapError, InvalidRequest, Overloaded, Unavailable
from dualmap.rpc.convert_explain import explanation, view_message
from dualmap.rpc.convert_route import RouteCall, RouteRules, digest_of, identity_of, read_route, route_call
from dualmap.rpc.convert_route import streamed_route as request_of
from dualmap.rpc.route_answer import streamed_answer
from dualmap.rpc.status import problem_of_status, status_of
from dualmap.rpc.wire import sub_message
from dualmap.v1 import router_pb2
from services.router.decider import Decider
from services.router.metrics import RouterMetrics
from services.router.spans import RouteSpans, failed, routed, traceparent_of
from services.router.worker_pool import WorkerPool

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
_WHAT_IF_FIELD = 2
_REFUSING_THREADS = 4
_STREAM_RETRY_MS = 1_000


class RouterServicer:
    """Serves Route, RouteStream, Explain, Release and GetView over a decider."""

    def __init__(
        self, decider: Decider, pool: WorkerPool, metrics: RouterMetrics, max_streams: int, spans: RouteSpans | None
    ) -> None:
        """``spans`` None: traces are off, and a call pays nothing for them."""
        self._decider = decider
        self._pool = pool
        self._metrics = metrics
        self._spans = spans
        self._max_streams = max_streams
        self._streams: set[grpc.ServicerContext] = set()
        self._streams_lock = threading.Lock()
        self._stopping = False
        # A stream holds its thread, so streams must not hold those of calls; a few more refuse the one too many.
        self.stream_pool = ThreadPoolExecutor(max_streams + _REFUSING_THREADS, thread_name_prefix="stream")

    def route(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        """Route."""
        if self._pool.shedding:
            raise self._decider.overloaded(self._pool.waiting, self._pool.threads)
        if self._spans is None:
            return self._decider.route(_Reader(raw))[0]
        return self._traced_route(raw, context, self._spans)

    def route_stream(self, raws: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """RouteStream: one answer a message, in order."""
        self._open(context)
        try:
            for raw in raws:
                yield self._streamed(raw, context)
        finally:
            with self._streams_lock:
                self._streams.discard(context)

    def explain(self, raw: bytes, _context: grpc.ServicerContext) -> bytes:
        """Explain."""
        request = _parsed(router_pb2.ExplainRequest(), raw)
        subject = request.WhichOneof("subject")
        if subject == "request_id":
            return explanation(self._decider.explain(request.request_id)).SerializeToString()
        if subject == "what_if":
            return self._what_if(sub_message(raw, _WHAT_IF_FIELD)).SerializeToString()
        raise InvalidRequest("subject", "set request_id or what_if")

    def release(self, raw: bytes, _context: grpc.ServicerContext) -> bytes:
        """Release."""
        request_id, attempt = identity_of(_parsed(router_pb2.ReleaseRequest(), raw))
        released, epoch = self._decider.release(request_id, attempt)
        return router_pb2.ReleaseResponse(released=released, ring_epoch=epoch).SerializeToString()

    def get_view(self, raw: bytes, _context: grpc.ServicerContext) -> bytes:
        """GetView."""
        request = _parsed(router_pb2.GetViewRequest(), raw)
        return view_message(self._decider.view_facts(tuple(request.instance_ids))).SerializeToString()

    def end_streams(self) -> None:
        """End every open stream and refuse new ones: the process stops, and an idle stream would use up the grace.

        Their clients see CANCELLED: gRPC lets no other thread than the stream's own choose a status.
        """
        with self._streams_lock:
            self._stopping = True
            streams = tuple(self._streams)
        for context in streams:
            context.cancel()

    def _what_if(self, raw: bytes) -> router_pb2.ExplainResponse:
        message = read_route(raw)
        asked = message.request_id
        # A what-if may have no id; without a full block the pair then comes from this one.
        message.request_id = asked or "what-if"
        explained = self._decider.what_if(route_call(message, 0, self._decider.scene().rules))
        response = explanation(explained)
        response.request_id = asked
        return response

    def _traced_route(self, raw: bytes, context: grpc.ServicerContext, spans: RouteSpans) -> bytes:
        span = spans.start(context)
        reader = _Reader(raw)
        try:
            answer, decision = self._decider.route(reader, traceparent_of(span))
        except DualMapError as error:
            failed(span, error.reason)
            raise
        except Exception as error:
            failed(span, type(error).__name__)
            raise
        routed(span, reader.request_id(), decision, self._decider.scene().ring.epoch)
        return answer

    def _open(self, context: grpc.ServicerContext) -> None:
        with self._streams_lock:
            if self._stopping:
                raise Unavailable("this router stops and", _STREAM_RETRY_MS)
            if len(self._streams) >= self._max_streams:
                self._metrics.count("streams_refused")
                raise Overloaded(_STREAM_RETRY_MS, f"{self._max_streams} route streams are open")
            self._streams.add(context)

    def _streamed(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        inner = request_of(raw)
        reader = _Reader(inner)
        try:
            if self._spans is None:
                answer = self._decider.route(reader)[0]
            else:
                answer = self._traced_route(inner, context, self._spans)
            return streamed_answer(reader.request_id(), answer)
        except Exception as error:
            self._metrics.count("stream_errors")
            problem = problem_of_status(status_of(error, f"/{SERVICE}/RouteStream"))
            number: int = problem.code.value[0]
            failed = router_pb2.RouteError(
                code=number, message=problem.message, retry_after_ms=problem.retry_after_ms or 0
            )
            response = router_pb2.RouteStreamResponse(request_id=reader.request_id(), error=failed)
        return response.SerializeToString()


class _Reader:
    """One request's bytes, parsed once; checked under each ring it is asked for."""

    __slots__ = ("_message", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._message: router_pb2.RouteRequest | None = None

    def __call__(self, rules: RouteRules) -> RouteCall:
        if self._message is None:
            self._message = read_route(self._raw)
        return route_call(self._message, digest_of(self._raw), rules)

    def request_id(self) -> str:
        """As sent; empty when the bytes are no request."""
        if self._message is None:
            try:
                self._message = router_pb2.RouteRequest.FromString(self._raw)
            except DecodeError:
                return ""
        return self._message.request_id


def _parsed(message: Any, raw: bytes) -> Any:
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise InvalidRequest("request", f"is not a {type(message).__name__}") from error
    return message


def register(servicer: RouterServicer, server: Any) -> None:
    """Register the handlers as generated code would, but over bytes."""
    unary = grpc.unary_unary_rpc_method_handler

    def stream(raws: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return servicer.route_stream(raws, context)

    stream.experimental_thread_pool = servicer.stream_pool  # type: ignore[attr-defined]
    server.add_registered_method_handlers(
        SERVICE,
        {
            "Route": unary(servicer.route),
            "RouteStream": grpc.stream_stream_rpc_method_handler(stream),
            "Explain": unary(servicer.explain),
            "Release": unary(servicer.release),
            "GetView": unary(servicer.get_view),
        },
    )
