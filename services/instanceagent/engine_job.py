"""One request on an engine's HTTP port, from its sending to its end: the events it gives, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from services.instanceagent import answer_stream as stream
from services.instanceagent.answer_stream import BadStream, Usage
from services.instanceagent.engine import Done, EngineEvent, Failed, FirstToken, HttpChunk, Tokens
from services.instanceagent.engine_http import EngineHttp
from services.instanceagent.engine_request import EngineRequest
from services.instanceagent.whole_answer import WholeAnswer

MAX_ERROR_BYTES = 64 * 1024
_HEADERS_PASSED = ("content-type", "x-request-id")
_BUSY = frozenset({408, 429})
"""Client errors that say "later", not "wrong"."""

Emit = Callable[[EngineEvent], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended. ``trouble``: "" none, else "not_connected", "silent" or "broken", fit for a metric."""

    usage: Usage | None = None
    trouble: str = ""


class _Output(Protocol):
    """How an answer goes to its client."""

    def begin(self, first: list[dict[str, object]], whole: bytes) -> bytes:
        """The first token's chunks; gives what comes with FirstToken as text."""
        ...

    def more(self, whole: bytes) -> None:
        """Whole events after it."""
        ...

    def end(self) -> None:
        """Nothing follows."""
        ...


class EngineJob:
    """Runs once. Cancelling the task closes the connection, which is how an engine is told to give the request up."""

    def __init__(self, http: EngineHttp, request: EngineRequest, emit: Emit) -> None:
        self._http = http
        self._request = request
        self._emit = emit
        self._first = False
        self._ended = False
        self._tokens = 0
        self._usage: Usage | None = None
        self._finish_reason = "stop"
        self._splitter = stream.EventSplitter()
        self._head: list[bytes] = []
        self._headers: dict[str, str] = {}

    async def run(self) -> Outcome:
        """Send, follow to the end, tell each event; never raises for what the engine does."""
        try:
            await self._exchange()
        except BadStream as error:
            self._fail(error.problem)
        except aiohttp.ClientConnectorError:
            self._fail("the engine takes no connection")
            return Outcome(self._usage, "not_connected")
        except TimeoutError:
            self._fail("the engine is silent")
            return Outcome(self._usage, "silent")
        except (aiohttp.ClientError, OSError) as error:
            self._fail(f"the connection broke: {type(error).__name__}")
            return Outcome(self._usage, "broken")
        return Outcome(self._usage)

    async def _exchange(self) -> None:
        request = self._request
        url = self._http.url + request.path
        async with self._http.session.post(url, data=request.encoded, headers=request.headers) as response:
            self._headers = {name: response.headers[name] for name in _HEADERS_PASSED if name in response.headers}
            if response.status != 200:
                await self._refused(response)
                return
            output = self._output()
            async for data in response.content.iter_any():
                whole = self._splitter.feed(data)
                if whole:
                    self._read(whole, output)
        if not self._ended:
            self._fail("the stream was cut")
            return
        output.end()
        usage = self._usage or Usage(0, self._tokens, None)
        self._emit(Done(usage.output_tokens, self._finish_reason, usage.cached_tokens))

    def _output(self) -> _Output:
        request = self._request
        if not request.passes_on:
            return _TextOutput(self._emit, self._note)
        if request.client_streams:
            return _BytesOutput(self._emit, self._headers, self._note, keep_usage=request.client_wants_usage)
        return _WholeOutput(self._emit, self._note, chat=request.chat)

    def _read(self, whole: bytes, output: _Output) -> None:
        if not self._first:
            whole = self._until_first(whole, output)
        if not whole:
            return
        if stream.names_error(whole):
            raise BadStream("the engine reports an error")
        self._ended = self._ended or stream.ends(whole)
        self._finish_reason = stream.finish_reason_in(whole) or self._finish_reason
        output.more(whole)

    def _until_first(self, whole: bytes, output: _Output) -> bytes:
        """Read events up to the first token; gives those after it."""
        events = stream.events_of(whole)
        for at, event in enumerate(events):
            self._head.append(event)
            value = stream.parse(event)
            if value is None and stream.payload_of(event) == stream.DONE:
                raise BadStream("the answer has no token")
            if value is None or not stream.has_token(value):
                continue
            self._first = True
            self._tokens = 1
            self._finish_reason = stream.finish_reason_in(event) or self._finish_reason
            head, self._head = self._head, []
            chunks = [chunk for chunk in map(stream.parse, head) if chunk is not None]
            # Data that is the client's text goes with the event; HTTP's bytes come right after it.
            text = output.begin(chunks, b"".join(head))
            self._emit(FirstToken(data=text))
            if isinstance(output, _BytesOutput):
                output.pass_on_head()
            return b"".join(events[at + 1 :])
        return b""

    def _note(self, tokens: int, usage: Usage | None) -> None:
        self._tokens += tokens
        self._usage = usage or self._usage

    async def _refused(self, response: aiohttp.ClientResponse) -> None:
        body = await response.content.read(MAX_ERROR_BYTES)
        wrong = 400 <= response.status < 500 and response.status not in _BUSY
        if wrong and self._request.passes_on:
            # The client's mistake, in the engine's words.
            self._emit(HttpChunk(body, response.status, self._headers))
            self._emit(Done(0, "error"))
            return
        self._emit(Failed(f"HTTP {response.status}", retryable=not wrong))

    def _fail(self, problem: str) -> None:
        self._emit(Failed(problem, retryable=not self._first))


Note = Callable[[int, Usage | None], None]
"""Told tokens and usage as they are read."""


class _BytesOutput:
    """An OpenAI client's stream: bytes as they come, without the usage it did not ask for."""

    def __init__(self, emit: Emit, headers: dict[str, str], note: Note, *, keep_usage: bool) -> None:
        self._emit = emit
        self._headers = headers
        self._note = note
        self._keep_usage = keep_usage
        self._head = b""

    def begin(self, first: list[dict[str, object]], whole: bytes) -> bytes:
        del first
        self._head = whole
        return b""

    def pass_on_head(self) -> None:
        """Status, headers and the first token's bytes."""
        self._emit(HttpChunk(self._head, 200, self._headers))

    def more(self, whole: bytes) -> None:
        if stream.may_have_usage(whole):
            whole = b"".join(event for event in stream.events_of(whole) if not self._is_unwanted(event))
        self._note(whole.count(stream.END), None)
        if whole:
            self._emit(HttpChunk(whole))

    def _is_unwanted(self, event: bytes) -> bool:
        value = stream.parse(event)
        usage = stream.usage_of(value) if value is not None else None
        self._note(0, usage)
        return usage is not None and value is not None and not stream.choices_of(value) and not self._keep_usage

    def end(self) -> None:
        return None


class _TextOutput:
    """A gRPC client: the text of the tokens."""

    def __init__(self, emit: Emit, note: Note) -> None:
        self._emit = emit
        self._note = note

    def begin(self, first: list[dict[str, object]], whole: bytes) -> bytes:
        del whole
        return "".join(map(stream.text_of, first)).encode()

    def more(self, whole: bytes) -> None:
        texts: list[str] = []
        for event in stream.events_of(whole):
            value = stream.parse(event)
            if value is None:
                continue
            self._note(0, stream.usage_of(value))
            text = stream.text_of(value)
            if text:
                texts.append(text)
        if texts:
            self._note(len(texts), None)
            self._emit(Tokens(len(texts), "".join(texts).encode()))

    def end(self) -> None:
        return None


class _WholeOutput:
    """An OpenAI client that asked for no stream: one body at the end."""

    def __init__(self, emit: Emit, note: Note, *, chat: bool) -> None:
        self._emit = emit
        self._note = note
        self._answer = WholeAnswer(chat=chat)

    def begin(self, first: list[dict[str, object]], whole: bytes) -> bytes:
        del whole
        for chunk in first:
            self._answer.add(chunk)
        return b""

    def more(self, whole: bytes) -> None:
        for event in stream.events_of(whole):
            value = stream.parse(event)
            if value is not None:
                self._answer.add(value)
                self._note(stream.has_token(value), stream.usage_of(value))

    def end(self) -> None:
        self._emit(HttpChunk(self._answer.body, 200, {"content-type": "application/json"}))
