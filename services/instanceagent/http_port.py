"""The OpenAI-compatible HTTP port of an agent. It reads requests and writes answers; the front door places them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from opentelemetry.trace import Span

from dualmap.core.errors import DualMapError
from dualmap.rpc.route_calls import CallFailed
from dualmap.runtime.clock import Clock
from dualmap.runtime.lifetime import StartError
from dualmap.runtime.logs import get_log
from services.instanceagent.agent import PULSE_S, Agent
from services.instanceagent.front_door import FrontDoor
from services.instanceagent.http_answer import HttpAnswer, problem_answer, read_body
from services.instanceagent.openai_call import CHAT, COMPLETIONS, REQUEST_ID, ModelNames, OpenAiCall, read_call
from services.instanceagent.openai_errors import HttpProblem, problem_of
from services.instanceagent.spans import http_span, show_answer, traceparent_of

BUSY_RETRY_MS = 1_000
MAX_HEADER_BYTES = 32_768
"""A ticket is some 300 bytes; a line longer than this is nobody's header."""

_log = get_log("http_port")


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where to listen, and bounds: bytes of a body, seconds until it is here, requests at once, seconds at stop."""

    host: str = "127.0.0.1"
    port: int = 0
    max_body_bytes: int = 16 * 1024 * 1024
    body_within_s: float = 30.0
    max_requests: int = 16_384
    stop_grace_s: float = 5.0


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What the port is given. ``new_id`` names requests that bring no id; ``count`` hears what each answer was."""

    agent: Agent
    door: FrontDoor
    names: ModelNames
    clock: Clock
    new_id: Callable[[], str]
    count: Callable[[str], None]


class HttpPort:
    """``async with`` serves."""

    def __init__(self, options: HttpOptions, parts: HttpParts) -> None:
        self.port = 0
        self.open_requests = 0
        self._options = options
        self._parts = parts

    async def __aenter__(self) -> Self:
        """Listen. Raises StartError."""
        options = self._options
        app = web.Application(client_max_size=options.max_body_bytes, middlewares=[self._guarded()])
        app.add_routes(
            [
                web.post(CHAT, self._completions),
                web.post(COMPLETIONS, self._completions),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.get("/health", self._health),
            ]
        )
        self._runner = web.AppRunner(
            app,
            # A client that goes away ends its handler, and with it the request.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=options.stop_grace_s,
            max_field_size=MAX_HEADER_BYTES,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, options.host, options.port, backlog=1_024).start()
        except OSError as error:
            await self._runner.cleanup()
            raise StartError(f"the HTTP port {options.host}:{options.port} cannot be had: {error.strerror}") from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what is open, after the grace."""
        await self._runner.cleanup()

    # What is served

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        if self.open_requests >= self._options.max_requests:
            raise HttpProblem(429, "too many requests at once", "TOO_MANY_REQUESTS", retry_after_ms=BUSY_RETRY_MS)
        self.open_requests += 1
        try:
            call = await self._read(http)
            with http_span(self._parts.agent.tracer, call.path, call.traceparent, call.request_id) as span:
                return await self._answer(HttpAnswer(http, call), call.traced(traceparent_of(span)), span)
        finally:
            self.open_requests -= 1

    async def _answer(self, answer: HttpAnswer, call: OpenAiCall, span: Span) -> web.StreamResponse:
        try:
            response = await self._serve(call, answer)
            show_answer(span, answer.status)
            return response
        except (DualMapError, CallFailed, HttpProblem) as error:
            problem = problem_of(error)
            response = await answer.fail(problem)
            self._parts.count(problem.reason.lower() or "unknown")
            show_answer(span, answer.status or problem.status, problem.reason or "unknown")
            return response

    async def _read(self, http: web.Request) -> OpenAiCall:
        arrived_ms = self._parts.clock.now_s() * 1_000
        body = await read_body(http, self._options.max_body_bytes, self._options.body_within_s)
        headers = {name.lower(): value for name, value in http.headers.items()}
        return read_call(http.path, body, headers, arrived_ms, self._parts.new_id())

    async def _serve(self, call: OpenAiCall, answer: HttpAnswer) -> web.StreamResponse:
        placement = await self._parts.door.take(call)
        request = placement.request
        # Its outlet itself, not `follow`: a generator around it would cost each chunk a few microseconds.
        with self._parts.agent.while_client_stays(request):
            async with aclosing(request.outlet.follow(PULSE_S)) as events:
                async for event in events:
                    await answer.tell(event, placement)
        response = await answer.end()
        self._parts.count("ok" if answer.status == web.HTTPOk.status_code else f"engine_{answer.status}")
        return response

    async def _models(self, _http: web.Request) -> web.Response:
        names = self._parts.names
        models = [_model_card(name, None) for name in names.models]
        models += [_model_card(name, names.models[0]) for name in names.loras]
        return _json({"object": "list", "data": models})

    async def _model(self, http: web.Request) -> web.Response:
        names, name = self._parts.names, http.match_info["name"]
        if name not in names.loras:
            self._parts.agent.check_model(name)
        return _json(_model_card(name, names.models[0] if name in names.loras else None))

    async def _health(self, _http: web.Request) -> web.Response:
        """200 while an instance of this agent takes work: what a balancer before it needs to know."""
        instances = self._parts.agent.instances.values()
        takes = {i.instance_id: i.eligible and i.engine.problem is None for i in instances}
        return _json(
            {"status": "ok" if any(takes.values()) else "unavailable", "instances": takes}, any(takes.values())
        )

    def _guarded(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        return guard

    async def _guard(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever goes wrong before an answer begins is told as OpenAI tells it."""
        try:
            return await handler(http)
        except web.HTTPException as error:
            problem = HttpProblem(error.status, error.reason, f"http_{error.status}")
        except ConnectionError:
            # The client went while it was written to; its handler would have been ended for it anyway.
            raise
        except Exception as error:
            problem = problem_of(error)
            if problem.reason == "INTERNAL":
                _log.error("http_failed", path=http.path, error=type(error).__name__, exc_info=error)
        self._parts.count(problem.reason.lower())
        return problem_answer(problem, http.headers.get(REQUEST_ID, ""))


def _model_card(name: str, parent: str | None) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "dualmap", "parent": parent}


def _json(value: object, well: bool = True) -> web.Response:
    status = web.HTTPOk.status_code if well else web.HTTPServiceUnavailable.status_code
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
