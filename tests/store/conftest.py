"""A client on the real server that a test was given."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from redis.asyncio import Redis

from dualmap.store.connection import connect


@pytest_asyncio.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty server."""
    client = connect(redis_url)
    yield client
    await client.aclose()
