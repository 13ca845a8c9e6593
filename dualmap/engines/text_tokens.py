"""A built-in tokenizer and chat template for the fake engines: deterministic, without vocabulary, one way only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from xxhash import xxh32_intdigest

FIRST_ID = 1_000
VOCABULARY = 128_000
_PIECE = re.compile(r"\s?[^\s]{1,4}|\s")


def tokenize(text: str) -> list[int]:
    """Ids of a text's pieces of at most four letters and the blank before; equal beginnings, equal ids."""
    return [FIRST_ID + xxh32_intdigest(piece.encode()) % (VOCABULARY - FIRST_ID) for piece in _PIECE.findall(text)]


def render_chat(messages: Sequence[object]) -> str:
    """The prompt of a chat. Raises ValueError for what is no list of messages."""
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("each message needs a role")  # noqa: TRY004  (a client's mistake, not ours)
        parts.append(f"<|{message['role']}|>\n{_content(message.get('content'))}<|end|>\n")
    return "".join(parts) + "<|assistant|>\n"


def _content(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(str(text) for text in texts)
    raise ValueError("content must be text or a list of parts")


def answer_text(number: int) -> str:
    """The ``number``-th token of any answer, as text."""
    return f" w{number}"
