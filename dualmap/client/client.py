"""Route, submit, and the two joined: a request runs at its instance, else at the backup, else where a new route says.

A request that has given its first token is never run again. Nothing is retried beyond the caller's deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Self

from opentelemetry import trace

from dualmap.client.routers import Routers
from dualmap.client.tracing import RequestSpan, carrying
from dualmap.rpc.route_calls import CallFailed, Metadata, SubmitCalls
from dualmap.rpc.route_values import Address, Done, Event, FirstToken, HttpChunk, Request, Route, Tokens

_OTHER_INSTANCE_MAY_DO = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED", "INTERNAL", "UNKNOWN"})
_NOT_THERE = frozenset({"UNKNOWN_INSTANCE"})
_MAX_EXCLUDED = 64

OnRoute = Callable[[Route, float], None]
"""Told a route and the seconds it took."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Times in seconds. ``silence_s`` without an event is an agent's death: it sends one at least each second.

    ``timeout_s`` bounds a request whose caller gives no other; ``routes`` bounds how often one request is routed.
    """

    router_timeout_s: float = 0.5
    timeout_s: float = 600.0
    silence_s: float = 3.0
    routes: int = 4


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that ran to its end: the last event, the first token's where one came, and all data in order."""

    done: Done
    first_token: FirstToken | None
    data: bytes
    attempt: int
    route: Route


@dataclass(slots=True)
class _Run:
    """What is known of one request while it runs."""

    request: Request
    deadline_s: float
    attempt: int
    on_route: OnRoute | None = None
    began_s: float = field(default_factory=monotonic)
    route: Route | None = None
    begun: bool = False
    failure: CallFailed | None = None


class DualMapClient:
    """One event loop's client of one pool; ``async with`` closes its channels."""

    def __init__(
        self, routers: Sequence[str], options: ClientOptions | None = None, tracer: trace.Tracer | None = None
    ) -> None:
        """``routers``: host:port of each. ``tracer``: makes one client span a request, else nothing is traced."""
        self.options = options or ClientOptions()
        self._routers = Routers(routers, self.options.router_timeout_s)
        self._agents = SubmitCalls()
        self._tracer = tracer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels; streams under way end."""
        await asyncio.gather(self._routers.close(), self._agents.close())

    async def route(self, request: Request, timeout_s: float | None = None) -> Route:
        """Where the request goes, at its own attempt. Raises CallFailed when no router answers within the time."""
        with RequestSpan(self._tracer, request) as span:
            route = await self._routers.route(request, self._deadline_s(timeout_s), span.metadata)
            span.routed(route)
            return route

    async def release(self, route: Route) -> bool:
        """Give a route's booking back, as it will not be submitted; False when none is held any more."""
        return await self._routers.release(route.request_id, route.attempt)

    async def submit(
        self, route: Route, request: Request, timeout_s: float | None = None, *, backup: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Run a routed request at its instance, or at its backup with attempt + 1; the events until its end.

        Raises CallFailed; a stream that ends without Done, or is silent for 3 s, is UNAVAILABLE. Leaving the
        iteration early cancels the request: close the iterator (``contextlib.aclosing``).
        """
        address, attempt = route.instance, route.attempt
        if backup:
            if route.backup is None:
                raise ValueError(f"route of {route.request_id!r} has no backup")
            address, attempt = route.backup, route.attempt + 1
        deadline_s = self._deadline_s(timeout_s)
        metadata = carrying(route.traceparent)
        tried = replace(request, attempt=attempt)
        async with aclosing(self._events(route, tried, address, deadline_s, metadata)) as events:
            async for event in events:
                yield event

    async def run(
        self, request: Request, timeout_s: float | None = None, *, on_route: OnRoute | None = None
    ) -> AsyncGenerator[Event, None]:
        """Route and submit, on failure before the first token at the backup, then by a new route; all its events.

        ``on_route`` is told each route and the seconds it took to get.

        Raises CallFailed when the time is over, the routes are used up, or a retry cannot help. Leaving the iteration
        early cancels the request: close the iterator (``contextlib.aclosing``).
        """
        run = _Run(request, self._deadline_s(timeout_s), request.attempt, on_route)
        with RequestSpan(self._tracer, request) as span:
            async with aclosing(self._run(run, span)) as events:
                async for event in events:
                    yield event

    async def complete(self, request: Request, timeout_s: float | None = None) -> Completion:
        """Run a request and wait for its end. Raises CallFailed."""
        run = _Run(request, self._deadline_s(timeout_s), request.attempt)
        first: FirstToken | None = None
        data: list[bytes] = []
        with RequestSpan(self._tracer, request) as span:
            async with aclosing(self._run(run, span)) as events:
                async for event in events:
                    if isinstance(event, FirstToken | Tokens | HttpChunk):
                        data.append(event.data)
                    if isinstance(event, FirstToken):
                        first = event
                    if isinstance(event, Done) and run.route is not None:
                        return Completion(event, first, b"".join(data), run.attempt, run.route)
        raise AssertionError("a run ends with Done or an error")

    async def _run(self, run: _Run, span: RequestSpan) -> AsyncGenerator[Event, None]:
        for _ in range(self.options.routes):
            route = run.route = await self._route(run, span)
            run.attempt = route.attempt
            for place, address in enumerate(filter(None, (route.instance, route.backup))):
                if place:
                    run.attempt += 1
                async with aclosing(self._attempt(run, address, span)) as events:
                    async for event in events:
                        if isinstance(event, Done):
                            # Told first: a caller that has its end need not come back for more.
                            span.ended(event, run.attempt)
                            yield event
                            return
                        yield event
            run.attempt += 1
            await self._heed(run)
        raise _failure_of(run)

    async def _route(self, run: _Run, span: RequestSpan) -> Route:
        """A route at the run's attempt; an aborted attempt is repeated as the next."""
        while True:
            asked_s = monotonic()
            try:
                route = await self._routers.route(
                    replace(run.request, attempt=run.attempt), run.deadline_s, span.metadata
                )
            except CallFailed as error:
                if error.code != "ABORTED" or monotonic() >= run.deadline_s:
                    raise
                run.attempt += 1
            else:
                span.routed(route)
                if run.on_route is not None:
                    run.on_route(route, monotonic() - asked_s)
                return route

    async def _attempt(self, run: _Run, address: Address, span: RequestSpan) -> AsyncGenerator[Event, None]:
        """Events of one attempt; a failure that another instance may make good is kept, any other raised."""
        route = run.route
        if route is None:
            raise AssertionError("an attempt follows a route")
        metadata = carrying(route.traceparent) or span.metadata
        age_ms = run.request.age_ms + (monotonic() - run.began_s) * 1_000
        request = replace(run.request, attempt=run.attempt, age_ms=age_ms)
        try:
            async with aclosing(self._events(route, request, address, run.deadline_s, metadata)) as events:
                async for event in events:
                    run.begun = run.begun or isinstance(event, FirstToken | Tokens | HttpChunk)
                    yield event
        except CallFailed as error:
            other_may_do = error.code in _OTHER_INSTANCE_MAY_DO or error.reason in _NOT_THERE
            if run.begun or not other_may_do:
                raise
            run.failure = error
            span.retried(error.code, address.instance_id)
            if error.code != "RESOURCE_EXHAUSTED" and len(run.request.exclude) < _MAX_EXCLUDED:
                run.request = replace(run.request, exclude=(*run.request.exclude, address.instance_id))

    async def _heed(self, run: _Run) -> None:
        """Wait as long as a full agent advised. Raises the failure when the deadline is nearer."""
        failure = _failure_of(run)
        wait_s = (failure.retry_after_ms or 0) / 1000
        if monotonic() + wait_s >= run.deadline_s:
            raise failure
        if wait_s:
            await asyncio.sleep(wait_s)

    async def _events(
        self, route: Route, request: Request, address: Address, deadline_s: float, metadata: Metadata
    ) -> AsyncGenerator[Event, None]:
        """Events of one Submit until Done; leaving it cancels the call."""
        call = self._agents.submit(address.grpc_address, request, route.ticket, address.instance_id, metadata)
        try:
            while True:
                event = await call.next(self.options.silence_s, deadline_s - monotonic())
                yield event
                if isinstance(event, Done):
                    return
        finally:
            call.cancel()

    def _deadline_s(self, timeout_s: float | None) -> float:
        return monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)


def _failure_of(run: _Run) -> CallFailed:
    if run.failure is None:
        raise AssertionError("every route that did not end the request left its failure")
    return run.failure
