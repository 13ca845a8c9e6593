"""Token ids of a prompt, from the engine that will serve it: no tokenizer of ours could be as right."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from services.instanceagent.engine_http import EngineCallFailed, EngineHttp

_CHAT_FIELDS = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip


class EngineTokens:
    """The engine's /tokenize. ``served_model`` gives the name that the engine knows its model by."""

    def __init__(self, http: EngineHttp, served_model: Callable[[], str]) -> None:
        self._http = http
        self._served_model = served_model

    async def of_text(self, text: str) -> bytes:
        """Token ids of a text as little-endian uint32. Raises EngineCallFailed."""
        return await self._ask({"prompt": text})

    async def of_body(self, body: Mapping[str, object], *, chat: bool) -> bytes:
        """Token ids of an OpenAI body's prompt, a chat's through the engine's own template. Raises EngineCallFailed."""
        if chat:
            return await self._ask({name: body[name] for name in _CHAT_FIELDS if name in body})
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self.of_text(prompt)
        return packed(prompt)

    async def _ask(self, body: Mapping[str, object]) -> bytes:
        answer = await self._http.post_json("/tokenize", {"model": self._served_model(), **body})
        return packed(answer.get("tokens"))


def packed(token_ids: object) -> bytes:
    """A JSON list of token ids as little-endian uint32. Raises EngineCallFailed."""
    if not isinstance(token_ids, list) or not token_ids:
        raise EngineCallFailed("no_tokens")
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise EngineCallFailed("no_tokens") from error
