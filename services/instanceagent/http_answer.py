"""One HTTP answer as its request's events come: status and headers with the first token, then bytes as they are."""

from __future__ import annotations

import asyncio

from aiohttp import web

from dualmap.rpc.request_events import AcceptOutcome
from dualmap.rpc.route_values import FirstToken, HttpChunk
from services.instanceagent.front_door import Placement
from services.instanceagent.openai_call import INSTANCE, REQUEST_ID, OpenAiCall
from services.instanceagent.openai_errors import HttpProblem

REASON = "x-dualmap-reason"
HIT_TOKENS = "x-dualmap-hit-tokens"

_PASSED = ("content-type", "x-request-id")
"""The engine's headers that its client gets; those of the connection are not ours to pass."""


class HttpAnswer:
    """Begins at the first bytes; until then an error can still be a status."""

    def __init__(self, http: web.Request, call: OpenAiCall) -> None:
        self._http = http
        self._call = call
        self._response: web.StreamResponse | None = None
        self._instance_id = ""
        self._hit_tokens: int | None = None

    @property
    def status(self) -> int:
        """What was sent; 0: nothing yet."""
        return self._response.status if self._response is not None else 0

    async def tell(self, event: AcceptOutcome, placement: Placement) -> None:
        """One event of the request."""
        if isinstance(event, FirstToken):
            self._instance_id, self._hit_tokens = event.instance_id, event.hit_tokens
        elif isinstance(event, HttpChunk):
            response = self._response or await self._begin(event, placement)
            if event.data:
                await response.write(event.data)

    async def end(self) -> web.StreamResponse:
        """The request is done. Raises HttpProblem where the engine gave no answer to pass on."""
        if self._response is None:
            raise HttpProblem(502, "the engine gave no HTTP answer", "NO_ANSWER")
        await self._response.write_eof()
        return self._response

    async def fail(self, problem: HttpProblem) -> web.StreamResponse:
        """The request failed: a status where none was sent, an event in a stream, else a cut connection."""
        if self._response is None:
            return problem_answer(problem, self._call.request_id)
        if self._call.stream:
            await self._response.write(problem.event)
            await self._response.write_eof()
        elif self._http.transport is not None:
            # A body that ends early must not look whole.
            self._http.transport.abort()
        return self._response

    async def _begin(self, chunk: HttpChunk, placement: Placement) -> web.StreamResponse:
        headers = {name: chunk.headers[name] for name in _PASSED if name in chunk.headers}
        headers |= {"Cache-Control": "no-cache", REQUEST_ID: self._call.request_id, REASON: placement.reason}
        if self._instance_id:
            headers[INSTANCE] = self._instance_id
        if self._hit_tokens is not None:
            headers[HIT_TOKENS] = str(self._hit_tokens)
        self._response = web.StreamResponse(status=chunk.status or 200, headers=headers)
        await self._response.prepare(self._http)
        return self._response


def problem_answer(problem: HttpProblem, request_id: str = "") -> web.Response:
    """An error as OpenAI has it."""
    headers = dict(problem.headers)
    if request_id:
        headers[REQUEST_ID] = request_id
    headers[REASON] = problem.reason
    return web.Response(status=problem.status, body=problem.body, headers=headers, content_type="application/json")


async def read_body(http: web.Request, max_bytes: int, within_s: float) -> bytes:
    """The whole body. Raises HttpProblem for one too large or too slow."""
    try:
        async with asyncio.timeout(within_s):
            return await http.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise HttpProblem(413, f"the body is larger than {max_bytes} bytes", "TOO_LARGE") from error
    except TimeoutError as error:
        raise HttpProblem(408, f"the body did not come within {within_s:g} s", "TOO_SLOW") from error
