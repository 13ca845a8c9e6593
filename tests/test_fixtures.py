"""Promises of the shared fixtures."""

from __future__ import annotations

import redis


def test_a_test_gets_an_empty_database_of_a_real_server(redis_url: str) -> None:
    """What an earlier test wrote is gone, and writes work."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        assert client.set("left", "over")


def test_the_next_test_does_not_see_it(redis_url: str) -> None:
    """Order of tests must not matter."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
