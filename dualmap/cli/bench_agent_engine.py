"""What `dualmap bench agent` measures against, each a process of its own: an engine that batches, and a bare byte pump.

The engine prefills all that waits in one step, up to a batch, and then gives each stream its tokens at a fixed beat.
It has no cache and no events: nothing of it depends on the prompt but its length.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

BATCH_TOKENS = 8_192
BEAT_FIELD = "x_beat_ms"
"""Field of the body: milliseconds between tokens. An agent passes it on like any other it does not know."""

_CHUNK = b'data: {"id":"c","object":"text_completion","model":"default","choices":[{"index":0,"text":" w"}]}\n\n'
_LAST = (
    b'data: {"id":"c","object":"text_completion","model":"default",'
    b'"choices":[{"index":0,"text":" w","finish_reason":"length"}]}\n\n'
)
_DONE = b"data: [DONE]\n\n"
_SSE = {"Content-Type": "text/event-stream"}


@dataclass(slots=True)
class _Waiting:
    tokens: int
    first: asyncio.Event = field(default_factory=asyncio.Event)


class BatchingEngine:
    """A step costs ``step_ms`` and ``token_us`` for each prompt token in it, however many prompts it holds."""

    def __init__(self, step_ms: float, token_us: float) -> None:
        self._step_s = step_ms / 1_000
        self._token_s = token_us / 1_000_000
        self._waiting: list[_Waiting] = []
        self._came = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """As much of vLLM's HTTP API as an agent uses."""
        return [
            web.get("/version", self._version),
            web.get("/health", self._health),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/v1/completions", self._completions),
        ]

    async def run(self) -> None:
        """Prefill, step after step."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                batch = self._next_batch()
                await asyncio.sleep(self._step_s + self._token_s * sum(one.tokens for one in batch))
                for one in batch:
                    one.first.set()

    def _next_batch(self) -> list[_Waiting]:
        taken = [self._waiting.pop(0)]
        room = BATCH_TOKENS - taken[0].tokens
        while self._waiting and self._waiting[0].tokens <= room:
            room -= self._waiting[0].tokens
            taken.append(self._waiting.pop(0))
        return taken

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await http.read())
        tokens, beat_s = int(body["max_tokens"]), float(body.get(BEAT_FIELD, 20)) / 1_000
        waiting = _Waiting(len(body["prompt"]))
        self._waiting.append(waiting)
        self._came.set()
        response = web.StreamResponse(headers=_SSE)
        await response.prepare(http)
        await waiting.first.wait()
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for number in range(1, tokens + 1):
            await response.write(_CHUNK if number < tokens else _LAST)
            if number < tokens:
                due_s += beat_s
                await asyncio.sleep(due_s - loop.time())
        await response.write(_DONE)
        return response

    async def _version(self, _http: web.Request) -> web.Response:
        return web.json_response({"version": "0.25.0"})

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "default", "object": "model"}]})

    async def _metrics(self, _http: web.Request) -> web.Response:
        return web.Response(text=f"vllm:num_requests_running 0\nvllm:num_requests_waiting {len(self._waiting)}\n")


class BytePump:
    """Passes a request's and an answer's bytes on, on the same HTTP library, and looks at none of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.session: aiohttp.ClientSession | None = None

    async def pump(self, http: web.Request) -> web.StreamResponse:
        """One request."""
        if self.session is None:
            raise AssertionError("serve opens the session first")
        body = await http.read()
        async with self.session.post(self._url + http.path, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers=_SSE)
            await response.prepare(http)
            async for data in answer.content.iter_any():
                await response.write(data)
        return response


async def _serve(app: web.Application) -> None:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4_096).start()
    print(json.dumps({"event": "serving", "port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


async def serve_engine(step_ms: float, token_us: float) -> None:
    """The engine, until the process is ended."""
    engine = BatchingEngine(step_ms, token_us)
    app = web.Application(client_max_size=64 << 20)
    app.add_routes(engine.routes())
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run())
        group.create_task(_serve(app))


async def serve_pump(url: str) -> None:
    """The pump, until the process is ended."""
    pump = BytePump(url)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", pump.pump)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as pump.session:
        await _serve(app)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        what, *given = sys.argv[1:]
        asyncio.run(serve_pump(given[0]) if what == "pump" else serve_engine(float(given[0]), float(given[1])))
