"""What the fake vLLM and SGLang servers share: OpenAI endpoints over HTTP, ranks, faults. Each adds its own routes."""

from __future__ import annotations

import errno
import ipaddress
import socket
import uuid
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

import msgspec
from aiohttp import web

from dualmap.core import engine_model
from dualmap.core.engine_model import EngineOptions
from dualmap.engines.event_publisher import PublisherOptions
from dualmap.engines.event_wire import DEFAULT_VERSIONS, Dialect, EventWire, parse_version
from dualmap.engines.fake_rank import EngineJob, FakeRank, RankOptions
from dualmap.engines.openai_bodies import Answer, Ask, BadBody, read_ask, read_prompt
from dualmap.runtime.clock import Clock, SystemClock

MAX_BODY_BYTES = 64 * 1024 * 1024
PORT_TRIES = 20
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """A fake engine. Ports: 0 is any free one, None is none; rank r has port + r.

    ``admin``: serve faults under /admin to loopback callers. ``load_port``: SGLang's load socket.
    """

    dialect: Dialect
    version: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    kv_events_port: int | None = 0
    replay_port: int | None = 0
    load_port: int | None = None
    model: str = "default"
    loras: tuple[str, ...] = ()
    block_tokens: int = 16
    ranks: int = 1
    max_model_len: int = 131_072
    bytes_hashes: bool = False
    admin: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)

    @property
    def wire(self) -> EventWire:
        """The encoding of this version. Raises ValueError."""
        version = self.version or DEFAULT_VERSIONS[self.dialect]
        return EventWire(self.dialect, parse_version(version), self.bytes_hashes)


class FakeServer(ABC):
    """One HTTP port over one or more ranks; ``async with`` serves."""

    def __init__(self, options: FakeOptions, clock: Clock | None = None) -> None:
        self.options = options
        self.wire = options.wire
        self.version = options.version or DEFAULT_VERSIONS[options.dialect]
        self.port = 0
        self.clock = clock or SystemClock()
        live, replay = (self._base(port) for port in (options.kv_events_port, options.replay_port))
        self.ranks = [FakeRank(self._rank_options(rank, live, replay), self.clock) for rank in range(options.ranks)]

    def _base(self, port: int | None) -> int | None:
        """Engines publish at one port after the other, so several ranks need a free run of ports."""
        return free_run(self.options.host, self.options.ranks) if port == 0 and self.options.ranks > 1 else port

    def _rank_options(self, rank: int, live: int | None, replay: int | None) -> RankOptions:
        options = self.options
        events = None
        if live is not None:
            events = PublisherOptions(
                self.wire,
                options.host,
                port=live + rank if live else 0,
                replay_port=replay + rank if replay else 0,
                replay=replay is not None,
                rank=rank,
            )
        return RankOptions(self.wire, options.engine, options.block_tokens, events)

    async def __aenter__(self) -> Self:
        """Start the ranks, then serve."""
        for rank in self.ranks:
            await rank.start()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.add_routes(self._shared_routes() + self.routes())
        if self.options.admin:
            app.router.add_post("/admin/{fault}", self._admin)
        # A client that goes away ends its handler, and with it the request.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.options.host, self.options.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """End."""
        for rank in self.ranks:
            await rank.stop()
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://{self.options.host}:{self.port}"

    @property
    def kv_tokens(self) -> int:
        """Capacity of one rank's device cache in tokens, whole blocks."""
        return self.options.engine.kv_tokens // self.options.block_tokens * self.options.block_tokens

    @abstractmethod
    def routes(self) -> list[web.RouteDef]:
        """The dialect's own endpoints."""

    @abstractmethod
    def rank_of(self, request: web.Request, ask: Ask) -> int | None:
        """The rank that a request names, in the dialect's way."""

    def _shared_routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self._health),
            web.get("/v1/models", self._models),
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
            web.post("/tokenize", self._tokenize),
        ]

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _request: web.Request) -> web.Response:
        length = self.options.max_model_len
        names = [(self.options.model, None), *((name, self.options.model) for name in self.options.loras)]
        models = [
            {"id": name, "object": "model", "owned_by": "dualmap", "parent": parent, "max_model_len": length}
            for name, parent in names
        ]
        return json_answer({"object": "list", "data": models})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            body = await read_json(request)
            token_ids = read_prompt(body, chat="messages" in body)
        except BadBody as error:
            return refused(error)
        length = self.options.max_model_len
        return json_answer({"count": len(token_ids), "max_model_len": length, "tokens": token_ids})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, chat=True)

    async def _serve(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            ask = read_ask(await read_json(request), chat=chat)
            rank = self._rank(request, ask)
        except BadBody as error:
            return refused(error)
        lora_name = ask.model if ask.model in self.options.loras else ""
        job = rank.submit(ask.token_ids, ask.max_tokens, lora_name, ask.cache_salt)
        try:
            answer = Answer(f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", ask)
            if ask.stream:
                return await self._stream(request, job, answer)
            return await self._whole(request, job, answer)
        finally:
            rank.cancel(job)

    def _rank(self, request: web.Request, ask: Ask) -> FakeRank:
        known = (self.options.model, *self.options.loras)
        if ask.model not in (*known, ""):
            raise BadBody(f"The model `{ask.model}` does not exist.", 404)
        if len(ask.token_ids) + ask.max_tokens > self.options.max_model_len:
            raise BadBody(f"the prompt and max_tokens exceed {self.options.max_model_len} tokens")
        wanted = self.rank_of(request, ask)
        if wanted is None:
            return min(self.ranks, key=lambda rank: len(rank.jobs))
        if not 0 <= wanted < len(self.ranks):
            raise BadBody(f"there is no data-parallel rank {wanted}")
        return self.ranks[wanted]

    async def _stream(self, request: web.Request, job: EngineJob, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            match await job.events.get():
                case engine_model.FirstToken() as first:
                    answer.cached_tokens = first.hit_tokens
                    await response.write(answer.first_chunks())
                case engine_model.Tokens() as more:
                    await response.write(answer.more_chunks(more.count))
                case engine_model.Done():
                    await response.write(answer.last_chunks())
                    await response.write_eof()
                    return response
                case None:
                    _abort(request)
                    return response

    async def _whole(self, request: web.Request, job: EngineJob, answer: Answer) -> web.Response:
        while True:
            match await job.events.get():
                case engine_model.FirstToken() as first:
                    answer.cached_tokens = first.hit_tokens
                    answer.tokens = 1
                case engine_model.Tokens() as more:
                    answer.tokens += more.count
                case engine_model.Done():
                    return web.Response(body=answer.whole(), content_type=JSON)
                case None:
                    _abort(request)
                    return web.Response(status=500)

    async def _admin(self, request: web.Request) -> web.Response:
        """Faults: pause, resume, restart, drop_live, drop_all; ``rank`` and ``count`` as query."""
        if request.remote is None or not ipaddress.ip_address(request.remote).is_loopback:
            return web.Response(status=403)
        rank = self.ranks[int(request.query.get("rank", "0"))]
        count = int(request.query.get("count", "1"))
        match request.match_info["fault"]:
            case "pause":
                rank.engine.pause()
            case "resume":
                rank.engine.resume()
            case "restart":
                await rank.restart()
            case "drop_live" if rank.publisher is not None:
                rank.publisher.drop_live = count
            case "drop_all" if rank.publisher is not None:
                rank.publisher.drop_all = count
            case _:
                return web.Response(status=404)
        return web.Response()


def _abort(request: web.Request) -> None:
    """Cut the connection, as a process that dies does."""
    if request.transport is not None:
        request.transport.abort()


def free_run(host: str, count: int) -> int:
    """First of ``count`` ports after each other that are free now. Raises OSError when none is found."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(PORT_TRIES):
        with ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket(family)) for _ in range(count)]
            try:
                sockets[0].bind((host, 0))
                first = int(sockets[0].getsockname()[1])
                for offset, other in enumerate(sockets[1:], 1):
                    other.bind((host, first + offset))
            except (OSError, OverflowError):
                continue
            return first
    raise OSError(errno.EADDRINUSE, f"no {count} free ports after each other on {host}")


async def read_json(request: web.Request) -> dict[str, object]:
    """The body as a JSON object. Raises BadBody."""
    try:
        body = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadBody("the body is no JSON") from error
    if not isinstance(body, dict):
        raise BadBody("the body must be an object")
    return body


def json_answer(value: object) -> web.Response:
    """200 with JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type=JSON)


def refused(error: BadBody) -> web.Response:
    """The error's status and body."""
    return web.Response(status=error.status, body=error.body, content_type=JSON)
