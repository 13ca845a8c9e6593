"""Reading several streams at once: the shapes of the client's answers are known here only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

START = "0-0"
"""Position before the first entry of a stream."""

_Page = list[tuple[bytes, dict[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of one stream."""

    stream: str
    position: str
    fields: Mapping[bytes, bytes]


async def read_streams(
    client: Redis, positions: Mapping[str, str], block_ms: int, count: int | None = None
) -> list[StreamEntry]:
    """Entries after the positions, at most ``count`` a stream; waits up to ``block_ms`` (0: not at all) for one.

    ``block_ms`` must be below the client's socket timeout. Raises StoreError.
    """
    after: dict[str | bytes | memoryview, str | bytes | int | memoryview] = dict(positions.items())
    answer = await client.xread(after, block=block_ms or None, count=count)
    pages = cast("dict[bytes, _Page]", answer or {})
    return [
        StreamEntry(stream.decode(), position.decode(), fields)
        for stream, page in pages.items()
        for position, fields in page
    ]


async def last_position(client: Redis, stream: str) -> str:
    """Position of the newest entry; START for an empty stream, and for a key that is none."""
    try:
        page = cast("_Page", await client.xrevrange(stream, count=1))
    except ResponseError as error:
        if is_wrong_type(error):
            return START
        raise
    return page[0][0].decode() if page else START


def is_wrong_type(error: ResponseError) -> bool:
    """Whether the key is of another type than the command's: damage, which its writer puts right."""
    return str(error).startswith("WRONGTYPE")


def position_key(position: str) -> tuple[int, int]:
    """Positions compare as these do."""
    milliseconds, _, sequence = position.partition("-")
    return int(milliseconds), int(sequence or "0")
