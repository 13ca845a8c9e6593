"""Error mapping and metrics around every method, wrapped once when a service is registered, not once a call.

A handler raises domain errors; what reaches the wire is `dualmap.rpc.status`. Deadlines are left alone.
"""

from __future__ import annotations

import inspect
import threading
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from itertools import accumulate
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.rpc import status_pb2
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.rpc.status import status_of

# Handlers carry messages of every generated type; nothing here looks inside one.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour = Callable[[Any, Any], Any]
AioContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

# Route answers in well under a millisecond, a Submit lives for minutes.
_DURATIONS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0)
_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class RpcMetrics(Collector):
    """Calls by method and code, and how long they took, for all servers of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._methods: dict[str, MethodMetrics] = {}
        registry.register(self)

    def of(self, method: str) -> MethodMetrics:
        """The series of one method, looked up once."""
        return self._methods.setdefault(method, MethodMetrics())

    def collect(self) -> Iterator[Metric]:
        """All series."""
        handled = CounterMetricFamily(
            "dualmap_rpc_handled", "Calls ended, by method and code.", labels=("method", "code")
        )
        duration = HistogramMetricFamily(
            "dualmap_rpc_duration_seconds", "From the handler's start to the call's end.", labels=("method",)
        )
        for method, series in tuple(self._methods.items()):
            by_code, buckets, total_s = series.read()
            for code, count in by_code.items():
                handled.add_metric((method, code), count)
            duration.add_metric((method,), buckets, total_s)
        yield handled
        yield duration


class MethodMetrics:
    """Counts one method's calls under one lock: the library's series take three, and a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_code = {"OK": 0}
        self._buckets = [0] * (len(_DURATIONS_S) + 1)
        self._total_s = 0.0

    def ended(self, code: str, began_s: float) -> None:
        """One call ended with this code; ``began_s`` is time.perf_counter()'s."""
        seconds = time.perf_counter() - began_s
        bucket = bisect_left(_DURATIONS_S, seconds)
        with self._lock:
            self._by_code[code] = self._by_code.get(code, 0) + 1
            self._buckets[bucket] += 1
            self._total_s += seconds

    def read(self) -> tuple[dict[str, int], list[tuple[str, float]], float]:
        """Calls by code, cumulative buckets and seconds in all."""
        with self._lock:
            by_code, counts, total_s = dict(self._by_code), tuple(self._buckets), self._total_s
        limits = (*map(str, _DURATIONS_S), "+Inf")
        return by_code, list(zip(limits, map(float, accumulate(counts)), strict=True)), total_s


def wrap_handlers(service: str, handlers: Mapping[str, Handler], metrics: RpcMetrics) -> dict[str, Handler]:
    """The same handlers, each with errors mapped and calls counted; asyncio or not is seen from the function."""
    return {name: _wrap(f"/{service}/{name}", handler, metrics) for name, handler in handlers.items()}


def _wrap(method: str, handler: Handler, metrics: RpcMetrics) -> Handler:
    asks = "stream" if handler.request_streaming else "unary"
    answers = "stream" if handler.response_streaming else "unary"
    behaviour = cast("Behaviour", getattr(handler, f"{asks}_{answers}"))
    if inspect.isasyncgenfunction(behaviour):
        wrap = _aio_stream
    elif inspect.iscoroutinefunction(behaviour):
        wrap = _aio_unary
    elif handler.response_streaming:
        wrap = _sync_stream
    else:
        wrap = _sync_unary
    make = getattr(grpc, f"{asks}_{answers}_rpc_method_handler")
    wrapped = wrap(method, behaviour, metrics.of(method))
    # gRPC reads from the function's attributes which pool of threads runs it.
    wrapped.__dict__.update(behaviour.__dict__)
    return cast(
        "Handler",
        make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        ),
    )


def _sync_unary(method: str, behaviour: Behaviour, series: MethodMetrics) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        began_s, code = time.perf_counter(), "OK"
        try:
            return behaviour(request, context)
        except Exception as error:
            code = _set_code(context)
            if code:
                raise
            status = status_of(error, method)
            code = _NAMES[status.code]
            _abort(context, status)
        finally:
            series.ended(code, began_s)

    return call


def _sync_stream(method: str, behaviour: Behaviour, series: MethodMetrics) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        began_s, code = time.perf_counter(), "CANCELLED"
        try:
            yield from behaviour(request, context)
            code = "OK"
        except Exception as error:
            code = _set_code(context)
            if code:
                raise
            status = status_of(error, method)
            code = _NAMES[status.code]
            _abort(context, status)
        finally:
            series.ended(code, began_s)

    return call


def _aio_unary(method: str, behaviour: Behaviour, series: MethodMetrics) -> Behaviour:
    async def call(request: Any, context: AioContext) -> Any:
        # A cancellation is no Exception: it passes with the code it starts with.
        began_s, code = time.perf_counter(), "CANCELLED"
        try:
            answer = await behaviour(request, context)
            code = "OK"
            return answer
        except Exception as error:
            code = _set_code(context)
            if code:
                raise
            status = status_of(error, method)
            code = _NAMES[status.code]
            await _aio_abort(context, status)
        finally:
            series.ended(code, began_s)

    return call


def _aio_stream(method: str, behaviour: Behaviour, series: MethodMetrics) -> Behaviour:
    async def call(request: Any, context: AioContext) -> AsyncIterator[Any]:
        began_s, code = time.perf_counter(), "CANCELLED"
        try:
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer
            code = "OK"
        except Exception as error:
            code = _set_code(context)
            if code:
                raise
            status = status_of(error, method)
            code = _NAMES[status.code]
            await _aio_abort(context, status)
        finally:
            series.ended(code, began_s)

    return call


def _set_code(context: grpc.ServicerContext | AioContext) -> str:
    """The code that the handler itself gave when it aborted the call; empty when it gave none."""
    # The sync stack holds a StatusCode, the asyncio stack a number.
    code: object = cast("Any", context).code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return _NAMES.get(number, "UNKNOWN") if isinstance(number, int) and number != 0 else ""


def _abort(context: grpc.ServicerContext, status: status_pb2.Status) -> None:
    context.abort_with_status(rpc_status.to_status(status))


async def _aio_abort(context: AioContext, status: status_pb2.Status) -> None:
    final = rpc_status.to_status(status)
    await context.abort(final.code, final.details or "", final.trailing_metadata or ())
