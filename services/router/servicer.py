"""The wire side of the router: bytes in, bytes out. Logic is the decider's.

Requests come as bytes, so that malformed ones are answered INVALID_ARGUMENT and two prompts are noticed.
"""

from __future__ import annotations

import threading
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dualmap.core.errors import DualMapError, InvalidRequest, Overloaded, Unavailable
from dualmap.rpc.convert_explain import explanation, view_message
from dualmap.rpc.convert_route import RouteCall, RouteRules, digest_of, identity_of, read_route, route_call
from dualmap.rpc.convert_route import streamed_route as request_of
from dualmap.rpc.direct_calls import DirectCall
from dualmap.rpc.route_answer import streamed_answer
from dualmap.rpc.status import problem_of_status, status_of
from dualmap.rpc.wire import sub_message
from dualmap.v1 import router_pb2
from services.router.decider import Decider
from services.router.metrics import RouterMetrics
from services.router.spans import RouteSpans, failed, routed

SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
_WHAT_IF_FIELD = 2
_STREAM_RETRY_MS = 1_000


class RouterServicer:
    """Serves Route, Explain, Release and GetView over a decider."""

    def __init__(self, decider: Decider, spans: RouteSpans | None) -> None:
        """``spans`` None: traces are off, and a call pays nothing for them."""
        self._decider = decider
        self._spans = spans

    def route(self, raw: bytes, call: DirectCall) -> bytes:
        """Route."""
        return self.decide(Reader(raw), call)

    def decide(self, reader: Reader, call: DirectCall) -> bytes:
        """The answer to a request, by call or by stream."""
        if self._spans is None:
            return self._decider.route(reader)[0]
        return self._traced(reader, call, self._spans)

    def explain(self, raw: bytes, _context: grpc.ServicerContext) -> bytes:
        """Explain."""
        request = _parsed(router_pb2.ExplainRequest(), raw)
        subject = request.WhichOneof("subject")
        if subject == "request_id":
            return explanation(self._decider.explain(request.request_id)).SerializeToString()
        if subject == "what_if":
            return self._what_if(sub_message(raw, _WHAT_IF_FIELD)).SerializeToString()
        raise InvalidRequest("subject", "set request_id or what_if")

    def release(self, raw: bytes, _call: DirectCall) -> bytes:
        """Release."""
        request_id, attempt = identity_of(_parsed(router_pb2.ReleaseRequest(), raw))
        released, epoch = self._decider.release(request_id, attempt)
        return router_pb2.ReleaseResponse(released=released, ring_epoch=epoch).SerializeToString()

    def get_view(self, raw: bytes, _context: grpc.ServicerContext) -> bytes:
        """GetView."""
        request = _parsed(router_pb2.GetViewRequest(), raw)
        return view_message(self._decider.view_facts(tuple(request.instance_ids))).SerializeToString()

    def _what_if(self, raw: bytes) -> router_pb2.ExplainResponse:
        message = read_route(raw)
        asked = message.request_id
        # A what-if may have no id; without a full block the pair then comes from this one.
        message.request_id = asked or "what-if"
        explained = self._decider.what_if(route_call(message, 0, self._decider.scene().rules))
        response = explanation(explained)
        response.request_id = asked
        return response

    def _traced(self, reader: Reader, call: DirectCall, spans: RouteSpans) -> bytes:
        span, traceparent = spans.start(call)
        try:
            answer, decision = self._decider.route(reader, traceparent)
        except DualMapError as error:
            failed(span, error.reason)
            raise
        except Exception as error:
            failed(span, type(error).__name__)
            raise
        if span is not None:
            routed(span, reader.request_id(), decision, self._decider.scene().ring.epoch)
        return answer


class RouteStreams:
    """RouteStream: one answer a message, in order, whatever the message is."""

    def __init__(self, servicer: RouterServicer, metrics: RouterMetrics, most: int) -> None:
        """``most`` streams may be open."""
        self._servicer = servicer
        self._metrics = metrics
        self._most = most
        self._open: set[DirectCall] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def opened(self, call: DirectCall) -> None:
        """Take one more. Raises Overloaded, Unavailable."""
        with self._lock:
            if self._stopping:
                raise Unavailable("this router stops and", _STREAM_RETRY_MS)
            if len(self._open) >= self._most:
                self._metrics.count("streams_refused")
                raise Overloaded(_STREAM_RETRY_MS, f"{self._most} route streams are open")
            self._open.add(call)

    def answered(self, raw: bytes, call: DirectCall) -> bytes:
        """The answer to one message: a route, or an error in its place."""
        reader = Reader(request_of(raw))
        try:
            answer = self._servicer.decide(reader, call)
            return streamed_answer(reader.request_id(), answer)
        except Exception as error:
            return self._error(reader, error)

    def refused(self, raw: bytes, error: Exception) -> bytes:
        """The answer to one message that came in overload."""
        return self._error(Reader(request_of(raw)), error)

    def ended(self, call: DirectCall) -> None:
        """Its place is free."""
        with self._lock:
            self._open.discard(call)

    def end(self) -> None:
        """End every open stream and refuse new ones: the process stops, and an idle stream would use up the grace.

        Their clients see CANCELLED: the thread that could choose a status may be in the middle of an answer.
        """
        with self._lock:
            self._stopping = True
            streams = tuple(self._open)
        for call in streams:
            call.cancel()

    def _error(self, reader: Reader, error: Exception) -> bytes:
        self._metrics.count("stream_errors")
        problem = problem_of_status(status_of(error, f"/{SERVICE}/RouteStream"))
        number: int = problem.code.value[0]
        failed = router_pb2.RouteError(code=number, message=problem.message, retry_after_ms=problem.retry_after_ms or 0)
        return router_pb2.RouteStreamResponse(request_id=reader.request_id(), error=failed).SerializeToString()


class Reader:
    """One request's bytes, parsed once; checked under each ring it is asked for."""

    __slots__ = ("_message", "_raw")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._message: router_pb2.RouteRequest | None = None

    def __call__(self, rules: RouteRules) -> RouteCall:
        """The checked request. Raises InvalidRequest, UnknownModel."""
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


def register(servicer: RouterServicer, streams: RouteStreams, server: Any) -> None:
    """Register the handlers as generated code would, but over bytes; what is asked often needs no thread."""
    unary = grpc.unary_unary_rpc_method_handler
    server.add_registered_method_handlers(
        SERVICE, {"Explain": unary(servicer.explain), "GetView": unary(servicer.get_view)}
    )
    server.add_direct(SERVICE, {"Route": servicer.route, "Release": servicer.release}, {"RouteStream": streams})
