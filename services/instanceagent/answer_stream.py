"""An engine's stream of server-sent events: where the first token is, what the last say. Bytes stay bytes between."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
END = b"\n\n"
DONE = b"[DONE]"

# Quotes inside a content are escaped, so these match what the engine itself says only.
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')
_ERROR = re.compile(rb'^data:\s*\{\s*"error"', re.MULTILINE)


class BadStream(Exception):
    """The engine's answer is not what it should be, or names an error; ``problem`` is fit for a log."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer. ``cached_tokens`` None: the engine does not report them."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None


class EventSplitter:
    """Cuts bytes where an event ends."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """All events that are whole now, in one piece; the rest is kept. Raises BadStream."""
        rest = self._rest
        looked_at = max(0, len(rest) - len(END) + 1)
        rest += data
        cut = rest.rfind(END, looked_at)
        if cut < 0:
            if len(rest) > MAX_EVENT_BYTES:
                raise BadStream("an event is too large")
            return b""
        cut += len(END)
        whole = bytes(rest[:cut])
        del rest[:cut]
        return whole


def events_of(whole: bytes) -> list[bytes]:
    """Whole events one by one, each with its end."""
    return [event + END for event in whole.split(END) if event]


def payload_of(event: bytes) -> bytes:
    """What stands after "data:"; empty for comments and fields of other names."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def parse(event: bytes) -> dict[str, object] | None:
    """The event's JSON object; None for the mark of the end, and for comments. Raises BadStream."""
    payload = payload_of(event)
    if not payload or payload == DONE:
        return None
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadStream("an event is no JSON") from error
    if not isinstance(value, dict):
        raise BadStream("an event is no object")
    if "error" in value and "choices" not in value:
        raise BadStream("the engine reports an error")
    return value


def choices_of(value: dict[str, object]) -> list[dict[str, object]]:
    """The choices of a chunk."""
    choices = value.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def has_token(value: dict[str, object]) -> bool:
    """Whether a chunk carries a token: of a chat, more than the role that comes before."""
    for choice in choices_of(value):
        if choice.get("finish_reason") is not None or "text" in choice:
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta.get(name) for name in delta if name != "role"):
            return True
        if isinstance(delta, dict) and "role" not in delta:
            return True
    return False


def text_of(value: dict[str, object]) -> str:
    """The text of a chunk's first choice."""
    for choice in choices_of(value):
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        return text if isinstance(text, str) else ""
    return ""


def usage_of(value: dict[str, object]) -> Usage | None:
    """The usage that a chunk or an answer carries."""
    usage = value.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return Usage(
        prompt if isinstance(prompt, int) else 0,
        output if isinstance(output, int) else 0,
        cached if isinstance(cached, int) else None,
    )


def may_have_usage(whole: bytes) -> bool:
    """Whether an event without choices may be among these: the one that carries the usage."""
    return _NO_CHOICES.search(whole) is not None


def finish_reason_in(whole: bytes) -> str | None:
    """The last reason of an end among these events."""
    found = _FINISH.findall(whole)
    return found[-1].decode() if found else None


def names_error(whole: bytes) -> bool:
    """Whether one of these events is an error."""
    return b'"error"' in whole and _ERROR.search(whole) is not None


def ends(whole: bytes) -> bool:
    """Whether the mark of the end is among these."""
    return DONE in whole and any(payload_of(event) == DONE for event in events_of(whole))
