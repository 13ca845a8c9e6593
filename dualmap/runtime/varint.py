"""A number as protobuf writes it, for the two places that write messages by hand: routes' answers and spans."""

from __future__ import annotations

ONE_BYTE = tuple(bytes((number,)) for number in range(128))
"""Numbers below 128."""


def varint(number: int) -> bytes:
    """A number from 0 to below 2^64 as the wire has it."""
    if number < 0x80:
        return ONE_BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
