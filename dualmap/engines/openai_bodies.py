"""OpenAI's request and answer bodies as the fake engines read and write them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dualmap.engines.text_tokens import answer_text, render_chat, tokenize

DEFAULT_MAX_TOKENS = 16
DONE = b"data: [DONE]\n\n"


class BadBody(Exception):
    """The request cannot be served; ``status`` is HTTP's."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status

    @property
    def body(self) -> bytes:
        """OpenAI's error body."""
        kind = "NotFoundError" if self.status == 404 else "BadRequestError"
        error = {"message": str(self), "type": kind, "param": None, "code": self.status}
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class Ask:
    """What a completion request asks for. ``rank`` None: any."""

    chat: bool
    model: str
    token_ids: Sequence[int]
    max_tokens: int
    stream: bool
    include_usage: bool
    cache_salt: str
    rank: int | None


def read_ask(body: Mapping[str, object], *, chat: bool) -> Ask:
    """A body checked. Raises BadBody."""
    model, salt, options = body.get("model"), body.get("cache_salt"), body.get("stream_options")
    rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise BadBody("max_tokens must be at least 1")
    return Ask(
        chat=chat,
        model=model if isinstance(model, str) else "",
        token_ids=read_prompt(body, chat=chat),
        max_tokens=limit if isinstance(limit, int) else DEFAULT_MAX_TOKENS,
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        cache_salt=salt if isinstance(salt, str) else "",
        rank=rank if isinstance(rank, int) else None,
    )


def read_prompt(body: Mapping[str, object], *, chat: bool) -> list[int]:
    """Token ids of a prompt in any of its forms. Raises BadBody."""
    if chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadBody("messages must be a list of at least one")
        try:
            return tokenize(render_chat(messages))
        except ValueError as error:
            raise BadBody(str(error)) from error
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokenize(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(item, int) and item >= 0 for item in prompt):
        return prompt
    raise BadBody("prompt must be one text or one list of token ids")


@dataclass(slots=True)
class Answer:
    """One answer as it grows."""

    answer_id: str
    ask: Ask
    cached_tokens: int = 0
    tokens: int = 0

    def first_chunks(self) -> bytes:
        """What comes with the first token: of a chat its role before."""
        role = self._chunk({"role": "assistant", "content": ""}, None) if self.ask.chat else b""
        return role + self.more_chunks(1)

    def more_chunks(self, count: int) -> bytes:
        """The next ``count`` tokens, an event each."""
        chunks = []
        for _ in range(count):
            self.tokens += 1
            chunks.append(self._chunk({"content": answer_text(self.tokens)}, None))
        return b"".join(chunks)

    def last_chunks(self) -> bytes:
        """The reason of the end, usage where wanted, and the mark of the end."""
        usage = b""
        if self.ask.include_usage:
            usage = _event(self._frame(self._kind(chunk=True)) | {"choices": [], "usage": self._usage()})
        return self._chunk({}, "length") + usage + DONE

    def whole(self) -> bytes:
        """The answer of one that is not streamed."""
        text = "".join(answer_text(number) for number in range(1, self.tokens + 1))
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if self.ask.chat else {"text": text}
        return msgspec.json.encode(self._frame(self._kind(chunk=False)) | {"choices": [choice], "usage": self._usage()})

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        choice |= {"delta": delta} if self.ask.chat else {"text": delta.get("content", "")}
        return _event(self._frame(self._kind(chunk=True)) | {"choices": [choice]})

    def _kind(self, *, chunk: bool) -> str:
        if not self.ask.chat:
            return "text_completion"
        return "chat.completion.chunk" if chunk else "chat.completion"

    def _frame(self, kind: str) -> dict[str, object]:
        return {"id": self.answer_id, "object": kind, "created": int(time.time()), "model": self.ask.model}

    def _usage(self) -> dict[str, object]:
        prompt = len(self.ask.token_ids)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.tokens,
            "completion_tokens": self.tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def _event(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
