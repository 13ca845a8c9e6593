"""The prompt of an OpenAI request as it is hashed: its engine's tokens, else its bytes, which is counted."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from dualmap.core.errors import InvalidRequest
from dualmap.rpc.route_values import Prompt
from dualmap.runtime.logs import get_log
from services.instanceagent.engine_http import EngineCallFailed
from services.instanceagent.openai_call import OpenAiCall

TOKENIZE_WITHIN_S = 1.0
"""A text of 100,000 tokens takes an engine a tenth of this."""

_BAD_REQUEST = 400

_log = get_log("prompts")


class BodyTokens(Protocol):
    """Tells the token ids of an OpenAI body's prompt, the engine's chat template applied."""

    async def of_body(self, body: Mapping[str, object], *, chat: bool) -> bytes:
        """Token ids as little-endian uint32. Raises EngineCallFailed; status 400 where the prompt is wrong."""
        ...


@runtime_checkable
class TellsTokens(Protocol):
    """An engine that has a tokenizer."""

    @property
    def tokens(self) -> BodyTokens:
        """It."""
        ...


class Prompts:
    """Finds the prompt of a request. ``fell_back`` hears why one is hashed over bytes."""

    def __init__(self, engines: Sequence[object], fell_back: Callable[[str], None]) -> None:
        # The ranks of one agent serve one model: any of them tokenizes for all.
        self._engine = next((engine for engine in engines if isinstance(engine, TellsTokens)), None)
        self._fell_back = fell_back

    async def of(self, call: OpenAiCall) -> Prompt:
        """The prompt. Raises InvalidRequest where there is none, or more than one."""
        text = _chat_text(call.fields) if call.chat else _one_prompt(call.fields)
        if isinstance(text, list):
            return _tokens(text)
        reason = "no_tokenizer"
        if self._engine is not None:
            try:
                async with asyncio.timeout(TOKENIZE_WITHIN_S):
                    return Prompt.of_tokens(await self._engine.tokens.of_body(call.fields, chat=call.chat))
            except EngineCallFailed as error:
                if error.status == _BAD_REQUEST:
                    raise InvalidRequest(call.prompt_field, "is not one that the engine takes") from error
                reason = error.reason
            except TimeoutError:
                reason = "timeout"
        self._fell_back(reason)
        _log.debug("hashed_over_bytes", reason=reason)
        return Prompt.of_text(text)


def _one_prompt(fields: Mapping[str, object]) -> str | list[object]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        raise InvalidRequest("prompt", "must be one prompt: send the others as requests of their own")
    if not isinstance(prompt, (str, list)) or not prompt:
        raise InvalidRequest("prompt", "is required: a text or a list of token ids")
    return prompt


def _tokens(token_ids: list[object]) -> Prompt:
    try:
        return Prompt.of_tokens(struct.pack(f"<{len(token_ids)}I", *token_ids))
    except struct.error as error:
        raise InvalidRequest("prompt", "must hold token ids: whole numbers from 0") from error


def _chat_text(fields: Mapping[str, object]) -> str:
    """A text that grows at its end as the chat does; tools come first, as chat templates have them."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "is required: a list of at least one message")
    tools = msgspec.json.encode(fields.get("tools")) if fields.get("tools") else b""
    return (tools + msgspec.json.encode(messages).removesuffix(b"]")).decode()
