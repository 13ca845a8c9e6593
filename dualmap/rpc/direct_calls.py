"""Calls answered on the thread that takes gRPC's events: no pool, and no hand-overs, which cost as much as a route.

For handlers over bytes that never block. It stands on what grpcio's own server stands on, which is private: the version
is pinned, and the tests fail where it changes. All other methods of the same server go grpcio's way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from time import monotonic, perf_counter
from types import MethodType
from typing import Any, Protocol, cast

import grpc
from grpc_status import rpc_status

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.admission import Admission
from dualmap.rpc.interceptors import MethodMetrics
from dualmap.rpc.status import status_of
from dualmap.runtime.logs import get_log

# Neither has type stubs.
_grpc: Any = import_module("grpc._server")
cygrpc: Any = import_module("grpc._cython.cygrpc")
_STARTED = _grpc._ServerStage.STARTED

_TURN = 64
"""Events taken while calls wait, before one of them is answered in any case. What came must be seen before it is old:
with 16, a flood that was refused more slowly than it came waited unseen for a second."""

_AT_ONCE = 0.0
"""A deadline long past: what is there is taken and nothing waited for."""

_TIMEOUT = cygrpc.CompletionType.queue_timeout
_NO_FLAGS = 0
_OK = cygrpc.StatusCode.ok
_log = get_log("rpc")

Metadata = Iterable[tuple[str, str | bytes]]


class DirectCall(Protocol):
    """What a handler knows of its call."""

    def invocation_metadata(self) -> Metadata | None:
        """What the caller sent beside the message."""

    def cancel(self) -> None:
        """End the call; from any thread."""


class StreamHandler(Protocol):
    """A method of messages both ways, each answered by one, in order."""

    def opened(self, call: DirectCall) -> None:
        """A stream begins; raise to refuse it."""

    def answered(self, raw: bytes, call: DirectCall) -> bytes:
        """The answer to one message; raises nothing."""

    def refused(self, raw: bytes, error: Exception) -> bytes:
        """The answer to one message that may not wait."""

    def ended(self, call: DirectCall) -> None:
        """The stream is over, however it ended."""


_Status = tuple[str, int, bytes, Any]
"""A code's name and number, the message, what travels beside it."""

Answer = Callable[[bytes, DirectCall], bytes]
"""Makes an answer's bytes of a request's; what it raises is mapped as everywhere."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Who may wait, and what one is told that may not: ``refusal`` is given how many wait.

    It is asked for every refusal; one error given again and again is written only once, which makes refusing cheap.
    """

    admission: Admission
    refusal: Callable[[int], Exception]


class DirectCalls:
    """The event loop of one server, with the methods it answers itself."""

    def __init__(self, server: grpc.Server, queue: Queue) -> None:
        self._state = cast("Any", server)._state
        self._queue = queue
        self._arrivals: list[_Arrivals] = []
        self.waiting: deque[_Unary | _Stream] = deque()
        """Calls whose message is here."""
        self._refusal: Exception | None = None
        self._refusal_status: _Status = ("OK", 0, b"", None)

    def add_unary(self, name: str, answer: Answer, series: MethodMetrics) -> None:
        """Answer a method of one message each way; before `start`."""
        self._add(name, lambda event: _Unary(self, event, name, answer, series).begin())

    def add_stream(self, name: str, handler: StreamHandler, series: MethodMetrics) -> None:
        """Answer a method of messages both ways; before `start`."""
        self._add(name, lambda event: _Stream(self, event, name, handler, series).begin())

    def start(self) -> None:
        """Start the server with this loop in the place of its own."""
        state = self._state
        with state.lock:
            state.server.start()
            state.stage = _STARTED
            for method in state.registered_method_handlers:
                _grpc._request_registered_call(state, method)
            _grpc._request_call(state)
            for arrivals in self._arrivals:
                arrivals.ask(state)
        threading.Thread(target=self._serve, name="calls", daemon=True).start()

    def admits(self) -> bool:
        """Whether a call that comes now may wait."""
        return self._queue.admission.admits(len(self.waiting), monotonic())

    def refusal(self) -> Exception:
        """What a call is told that may not."""
        return self._queue.refusal(len(self.waiting))

    def refusal_status(self) -> _Status:
        """The status of a refused call, in pieces."""
        refusal = self.refusal()
        if refusal is not self._refusal:
            self._refusal, self._refusal_status = refusal, _status(refusal, "")
        return self._refusal_status

    def began(self, call: object) -> None:
        """The server does not end before this call has."""
        self._state.rpc_states.add(call)

    def ended(self, call: object) -> None:
        """Nothing of the call is under way any more."""
        self._state.rpc_states.discard(call)

    def _add(self, name: str, begin: Callable[[Any], None]) -> None:
        self._state.server.register_method(name)
        self._arrivals.append(_Arrivals(name, begin))

    def _serve(self) -> None:
        """Take events until the server has stopped; answer what waits when there are none, or many were taken."""
        state = self._state
        poll = state.completion_queue.poll
        waiting = self.waiting
        taken = 0
        going_on = True
        while going_on:
            event = poll(_AT_ONCE if waiting else None)
            taken += 1
            try:
                if waiting and (taken > _TURN or event.completion_type == _TIMEOUT):
                    taken = 0
                    waiting.popleft().answer()
                going_on = self._take(event, state)
            except Exception:
                # A broken call must not end the others.
                _log.exception("call_broken")
            # An event that lived on while the next is waited for would hold its call.
            del event

    def _take(self, event: Any, state: Any) -> bool:
        """Deal with one event; False once the server has stopped."""
        tag = event.tag
        if type(tag) is MethodType:
            tag(event)
        elif type(tag) is _Arrivals:
            tag.take(event, state)
        elif event.completion_type == _TIMEOUT:
            return True
        else:
            return bool(_grpc._process_event_and_continue(state, event))
        if state.stage is _STARTED:
            return True
        with state.lock:
            return not _grpc._stop_serving(state)


class _Arrivals:
    """Asks gRPC for one method's next call, and begins it."""

    __slots__ = ("_begin", "_name")

    def __init__(self, name: str, begin: Callable[[Any], None]) -> None:
        self._name = name
        self._begin = begin

    def ask(self, state: Any) -> None:
        """Ask for the next call; under the server's lock."""
        queue = state.completion_queue
        state.server.request_registered_call(queue, queue, self._name, self)
        state.due.add(self)

    def take(self, event: Any, state: Any) -> None:
        """A call has come, or the server stops."""
        with state.lock:
            state.due.discard(self)
            if state.stage is _STARTED:
                self.ask(state)
        if event.success:
            self._begin(event)


class _Call:
    """What calls of both kinds share: batches of operations under way, the end, an error's status."""

    __slots__ = ("_calls", "_due", "_event", "_name", "_said", "_series", "began_s", "cancelled", "code")

    def __init__(self, calls: DirectCalls, event: Any, name: str, series: MethodMetrics) -> None:
        self._calls = calls
        self._event = event
        self._name = name
        self._series = series
        self._due = 0
        self._said = False
        """The answer's head was sent."""
        self.began_s = perf_counter()
        self.cancelled = False
        self.code = "OK"

    def invocation_metadata(self) -> Metadata | None:
        """What the caller sent beside the message."""
        return cast("Metadata | None", self._event.invocation_metadata)

    def cancel(self) -> None:
        """End the call; from any thread."""
        self._event.call.cancel()

    def _start(self, operations: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        self._due += 1
        self._event.call.start_server_batch(operations, then)

    def _listen(self) -> None:
        """Hear of the call's end, and of its first message."""
        self._calls.began(self)
        self._start((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS),), self._closed)
        self._receive()

    def _receive(self) -> None:
        self._start((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), self._received)

    def _received(self, event: Any) -> None:
        raise NotImplementedError

    def _refuse(self, status: _Status) -> None:
        """End a call that was not listened to: one batch, one event."""
        self._calls.began(self)
        self._start((cygrpc.ReceiveCloseOnServerOperation(_NO_FLAGS), *self._failure(status)), self._batch_ended)

    def _failure(self, status: _Status) -> tuple[Any, ...]:
        """Operations that end the call with this status."""
        self.code, number, details, trailers = status
        return (*self._head(), cygrpc.SendStatusFromServerOperation(trailers, number, details, _NO_FLAGS))

    def _head(self) -> tuple[Any, ...]:
        if self._said:
            return ()
        self._said = True
        return (cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),)

    def _closed(self, event: Any) -> None:
        if event.batch_operations[0].cancelled():
            self.cancelled = True
        self._batch_ended(event)

    def _batch_ended(self, _event: Any) -> None:
        self._due -= 1
        if not self._due:
            self._calls.ended(self)
            self._end()

    def _end(self) -> None:
        """Nothing is under way any more."""


class _Unary(_Call):
    """One message each way."""

    __slots__ = ("_answer", "_raw")

    def __init__(self, calls: DirectCalls, event: Any, name: str, answer: Answer, series: MethodMetrics) -> None:
        super().__init__(calls, event, name, series)
        self._answer = answer
        self._raw = b""

    def begin(self) -> None:
        """Wait for the message, or refuse."""
        if self._calls.admits():
            self._listen()
            return
        self._refuse(self._calls.refusal_status())
        self._series.ended(self.code, self.began_s)

    def _received(self, event: Any) -> None:
        raw = event.batch_operations[0].message()
        if raw is not None:
            self._raw = raw
            self._calls.waiting.append(self)
        elif not self.cancelled:
            missing = _status(InvalidRequest("request", "is missing"), self._name)
            self._start(self._failure(missing), self._batch_ended)
            self._series.ended(self.code, self.began_s)
        self._batch_ended(event)

    def answer(self) -> None:
        """Answer, if the caller is still there."""
        if self.cancelled:
            self._series.ended("CANCELLED", self.began_s)
            return
        try:
            answer = self._answer(self._raw, self)
        except Exception as error:
            operations = self._failure(_status(error, self._name))
        else:
            self._said = True
            operations = (
                cygrpc.SendInitialMetadataOperation(None, _NO_FLAGS),
                cygrpc.SendMessageOperation(answer, _NO_FLAGS),
                cygrpc.SendStatusFromServerOperation(None, _OK, b"", _NO_FLAGS),
            )
        self._start(operations, self._batch_ended)
        self._series.ended(self.code, self.began_s)


class _Stream(_Call):
    """Messages both ways: the next is taken once the answer to the last was written."""

    __slots__ = ("_handler", "_opened", "_raw")

    def __init__(
        self, calls: DirectCalls, event: Any, name: str, handler: StreamHandler, series: MethodMetrics
    ) -> None:
        super().__init__(calls, event, name, series)
        self._handler = handler
        self._opened = False
        self._raw = b""

    def begin(self) -> None:
        """Open the stream, or refuse it."""
        try:
            self._handler.opened(self)
        except Exception as error:
            self._refuse(_status(error, self._name))
            return
        self._opened = True
        self._listen()

    def _received(self, event: Any) -> None:
        raw = event.batch_operations[0].message()
        if raw is None:
            if not self.cancelled:
                status = cygrpc.SendStatusFromServerOperation(None, _OK, b"", _NO_FLAGS)
                self._start((*self._head(), status), self._batch_ended)
        elif self._calls.admits():
            self._raw = raw
            self._calls.waiting.append(self)
        else:
            self._send(self._handler.refused(raw, self._calls.refusal()))
        self._batch_ended(event)

    def answer(self) -> None:
        """Answer one message, if the caller is still there."""
        if not self.cancelled:
            self._send(self._handler.answered(self._raw, self))

    def _send(self, answer: bytes) -> None:
        self._start((*self._head(), cygrpc.SendMessageOperation(answer, _NO_FLAGS)), self._sent)

    def _sent(self, event: Any) -> None:
        if event.success and not self.cancelled:
            self._receive()
        self._batch_ended(event)

    def _end(self) -> None:
        if self.cancelled:
            self.code = "CANCELLED"
        self._series.ended(self.code, self.began_s)
        if self._opened:
            self._handler.ended(self)


def _status(error: Exception, method: str) -> _Status:
    status = rpc_status.to_status(status_of(error, method))
    return status.code.name, status.code.value[0], (status.details or "").encode(), status.trailing_metadata
