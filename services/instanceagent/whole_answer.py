"""Puts a streamed answer together again for a client that asked for no stream. Every chunk is read, none is kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from services.instanceagent.answer_stream import choices_of


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    reasoning: dict[str, list[str]] = field(default_factory=dict)
    tool_calls: dict[int, dict[str, object]] = field(default_factory=dict)
    logprobs: dict[str, list[object]] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)


class WholeAnswer:
    """Feed it every chunk in order, then take the body."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._frame: dict[str, object] = {}
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: dict[str, object]) -> None:
        """One more chunk."""
        self._frame |= {key: value for key, value in chunk.items() if key not in {"choices", "object"}}
        for part in choices_of(chunk):
            index = part.get("index")
            choice = self._choices.setdefault(index if isinstance(index, int) else 0, _Choice())
            delta = part.get("delta") if self._chat else part
            if isinstance(delta, dict):
                self._add_delta(choice, delta)
            _add_logprobs(choice, part.get("logprobs"))
            known = {"index", "delta", "text", "logprobs"}
            choice.extra |= {key: value for key, value in part.items() if key not in known and value is not None}

    def _add_delta(self, choice: _Choice, delta: dict[str, object]) -> None:
        text = delta.get("content" if self._chat else "text")
        if isinstance(text, str):
            choice.text.append(text)
        for name in ("reasoning_content", "reasoning", "refusal"):
            part = delta.get(name)
            if self._chat and isinstance(part, str):
                choice.reasoning.setdefault(name, []).append(part)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict):
                _add_tool_call(choice, call)

    @property
    def body(self) -> bytes:
        """The answer as OpenAI's JSON."""
        kind = "chat.completion" if self._chat else "text_completion"
        choices = [self._choice(index, self._choices[index]) for index in sorted(self._choices)]
        return msgspec.json.encode({**self._frame, "object": kind, "choices": choices})

    def _choice(self, index: int, choice: _Choice) -> dict[str, object]:
        whole: dict[str, object] = {"index": index, "logprobs": choice.logprobs or None, "finish_reason": None}
        whole |= choice.extra
        text = "".join(choice.text)
        if not self._chat:
            return whole | {"text": text}
        message: dict[str, object] = {"role": "assistant", "content": text}
        message |= {name: "".join(parts) for name, parts in choice.reasoning.items()}
        if choice.tool_calls:
            message["tool_calls"] = [choice.tool_calls[at] for at in sorted(choice.tool_calls)]
            message["content"] = text or None
        return whole | {"message": message}


def _add_tool_call(choice: _Choice, call: dict[str, object]) -> None:
    index = call.get("index")
    kept = choice.tool_calls.setdefault(index if isinstance(index, int) else 0, {"function": {}})
    kept |= {key: value for key, value in call.items() if key not in {"index", "function"} and value is not None}
    function, grown = call.get("function"), kept["function"]
    if isinstance(function, dict) and isinstance(grown, dict):
        if isinstance(function.get("name"), str):
            grown["name"] = function["name"]
        if isinstance(function.get("arguments"), str):
            grown["arguments"] = grown.get("arguments", "") + function["arguments"]


def _add_logprobs(choice: _Choice, logprobs: object) -> None:
    for name, values in logprobs.items() if isinstance(logprobs, dict) else ():
        if isinstance(values, list):
            choice.logprobs.setdefault(name, []).extend(values)
