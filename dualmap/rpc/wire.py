"""What generated code cannot say of a message's bytes: a oneof that was set twice keeps its last form in silence.

Looks at field numbers only, never at content, and refuses nothing itself: bytes that do not parse count as no form.
"""

from __future__ import annotations

_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
_FORMS = frozenset({1, 2, 3})


def prompt_forms(raw: bytes, *path: int) -> int:
    """How many different forms of a Prompt the message holds; ``path`` is the field numbers that lead to the Prompt.

    O(fields), a few microseconds; the content of a field is stepped over.
    """
    spans = [(0, len(raw))]
    for number in path:
        spans = [found for span in spans for found in _spans(raw, span, number)]
    seen: set[int] = set()
    for span in spans:
        seen.update(number for number, _, _ in _fields(raw, span) if number in _FORMS)
    return len(seen)


def sub_message(raw: bytes, number: int) -> bytes:
    """Bytes of the embedded message ``number``; empty when it is absent."""
    spans = _spans(raw, (0, len(raw)), number)
    return raw[spans[-1][0] : spans[-1][1]] if spans else b""


def _spans(raw: bytes, span: tuple[int, int], number: int) -> list[tuple[int, int]]:
    return [(start, end) for found, start, end in _fields(raw, span) if found == number]


def _fields(raw: bytes, span: tuple[int, int]) -> list[tuple[int, int, int]]:
    """(number, start, end) of each field in ``span``; stops at the first thing it does not know."""
    position, end = span
    found: list[tuple[int, int, int]] = []
    while position < end:
        tag, position = _varint(raw, position, end)
        kind = tag & 7
        start = position
        if kind == _LENGTH:
            length, start = _varint(raw, position, end)
            position = start + length
        elif kind == _VARINT:
            _, position = _varint(raw, position, end)
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            break
        if position > end:
            break
        found.append((tag >> 3, start, position))
    return found


def _varint(raw: bytes, position: int, end: int) -> tuple[int, int]:
    if position < end and (byte := raw[position]) < 0x80:
        return byte, position + 1
    value = shift = 0
    while position < end:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return 0, end + 1
