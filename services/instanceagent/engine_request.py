"""A submission as the HTTP request that an engine gets: always a stream, always with usage at its end."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from dualmap.rpc.submission import Submission

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
HEADERS_KEPT = frozenset({"x-request-id", "traceparent", "tracestate", "baggage"})
_JSON = "application/json"


class NoRequest(Exception):
    """The submission cannot be put to an engine over HTTP; ``problem`` is fit for a log."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(slots=True)
class EngineRequest:
    """What is sent. ``passes_on``: the client speaks OpenAI and gets the engine's answer as it is."""

    path: str
    body: dict[str, object]
    headers: dict[str, str]
    passes_on: bool = False
    client_streams: bool = True
    client_wants_usage: bool = False

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path.endswith("/chat/completions")

    @property
    def encoded(self) -> bytes:
        """The body's bytes."""
        return msgspec.json.encode(self.body)


def request_of(submission: Submission, served_model: str) -> EngineRequest:
    """The request of a submission. Raises NoRequest where it carries hashes alone."""
    if submission.message.HasField("openai"):
        return _opaque(submission, served_model)
    if submission.token_ids:
        prompt: object = struct.unpack(f"<{len(submission.token_ids) // 4}I", submission.token_ids)
    elif submission.text:
        prompt = submission.text
    else:
        raise NoRequest("the request carries hashes only: an engine needs the prompt")
    body: dict[str, object] = {"model": submission.message.lora or served_model, "prompt": prompt}
    if submission.max_output_tokens:
        body["max_tokens"] = submission.max_output_tokens
    _stream(body)
    _salt(body, submission)
    return EngineRequest("/v1/completions", body, {"Content-Type": _JSON})


def _opaque(submission: Submission, served_model: str) -> EngineRequest:
    openai = submission.message.openai
    if openai.path not in PATHS:
        raise NoRequest("the path is none of an engine's completions")
    try:
        body = msgspec.json.decode(openai.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NoRequest("the body is no JSON") from error
    if not isinstance(body, dict):
        raise NoRequest("the body is no object")
    options = body.get("stream_options")
    wants_usage = isinstance(options, dict) and options.get("include_usage") is True
    headers = {name: value for name, value in openai.headers.items() if name.lower() in HEADERS_KEPT}
    # The pool's name for a model need not be the engine's.
    body["model"] = submission.message.lora or served_model
    # The client gave one of the pool's names, which the engine need not know.
    body["model"] = submission.message.lora or served_model
    _stream(body)
    _salt(body, submission)
    return EngineRequest(
        openai.path, body, {**headers, "Content-Type": _JSON}, True, openai.stream, wants_usage or not openai.stream
    )


def _stream(body: dict[str, object]) -> None:
    options = body.get("stream_options")
    body["stream"] = True
    body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}


def _salt(body: dict[str, object], submission: Submission) -> None:
    if submission.message.cache_salt:
        body["cache_salt"] = submission.message.cache_salt
