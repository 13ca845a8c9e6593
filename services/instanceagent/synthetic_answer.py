"""The simulated engine's side of OpenAI's API: tokens of a prompt, and HTTP answers. Decides nothing."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from dualmap.engines.openai_bodies import Answer, Ask, BadBody, read_prompt
from dualmap.rpc.route_values import OpenAiBody
from dualmap.rpc.submission import Submission
from services.instanceagent.engine import Done, EngineEvent, FirstToken, HttpChunk, Tokens
from services.instanceagent.engine_http import EngineCallFailed

_EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
_JSON = {"content-type": "application/json"}


class SimulatedTokens:
    """A tokenizer without vocabulary, the same for every simulated engine."""

    async def of_body(self, body: Mapping[str, object], *, chat: bool) -> bytes:
        """Token ids as little-endian uint32. Raises EngineCallFailed."""
        try:
            token_ids = read_prompt(body, chat=chat)
        except BadBody as error:
            raise EngineCallFailed(f"http_{error.status}", error.status) from error
        return struct.pack(f"<{len(token_ids)}I", *token_ids)


class SyntheticAnswer:
    """Turns what the engine model tells of one request into the bytes of an HTTP answer."""

    def __init__(self, submission: Submission, openai: OpenAiBody, output_tokens: int) -> None:
        chat = openai.path.endswith("/chat/completions")
        ask = Ask(
            chat=chat,
            model=submission.message.lora or submission.model,
            token_ids=range(submission.chain.prompt_tokens),
            max_tokens=output_tokens,
            stream=openai.stream,
            include_usage=_wants_usage(openai.body),
            cache_salt="",
            rank=None,
        )
        self._answer = Answer(f"{'chatcmpl' if chat else 'cmpl'}-{submission.request_id}", ask)

    def events(self, event: EngineEvent) -> list[EngineEvent]:
        """The event and what of the answer goes with it, in order."""
        answer = self._answer
        match event:
            case FirstToken():
                answer.cached_tokens = event.hit_tokens or 0
                if answer.ask.stream:
                    return [event, HttpChunk(answer.first_chunks(), 200, _EVENTS)]
                answer.tokens = 1
                return [event]
            case Tokens() if answer.ask.stream:
                return [HttpChunk(answer.more_chunks(event.count))]
            case Tokens():
                answer.tokens += event.count
                return []
            case Done() if answer.ask.stream:
                return [HttpChunk(answer.last_chunks()), event]
            case Done():
                return [HttpChunk(answer.whole(), 200, _JSON), event]
        return [event]


def _wants_usage(body: bytes) -> bool:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        # What a gRPC client calls OpenAI's is opaque here: an engine would refuse it, this one needs none of it.
        return False
    options = fields.get("stream_options") if isinstance(fields, dict) else None
    return isinstance(options, dict) and options.get("include_usage") is True
