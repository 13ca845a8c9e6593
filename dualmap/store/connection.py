"""The one way to a Redis or Valkey server, and the check that it is configured as this store needs.

Refuses to guess: a server that evicts keys or is older than 7.0 is reported, not worked around.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

OLDEST_VERSION = (7, 0)
"""Only commands of this version are used."""

FOLLOWING_TIMEOUT_S = 1.0
"""Ten blocking reads: a busy machine is not taken for a lost server, and a lost one is noticed within a lease."""

StoreError = RedisError
"""What every store method raises when the server does not answer or answers with an error: the caller may try again."""


@dataclass(frozen=True, slots=True)
class SentinelOptions:
    """The sentinels that know where the master is: (host, port) of each, the master's name, their own credentials."""

    sentinels: tuple[tuple[str, int], ...]
    master: str
    username: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How to reach the server. ``socket_timeout_s`` bounds each answer, blocking reads included.

    With ``sentinel`` the URL's host and port are not used; its scheme, user, password and database are the master's.
    """

    url: str = "redis://127.0.0.1:6379/0"
    socket_timeout_s: float = 0.3
    connect_timeout_s: float = 0.3
    retries: int = 1
    client_name: str = "dualmap"
    sentinel: SentinelOptions | None = None

    def for_following(self) -> RedisOptions:
        """The same server for a client that waits on streams: no one waits for it, so it is patient with a slow one."""
        return replace(self, socket_timeout_s=max(self.socket_timeout_s, FOLLOWING_TIMEOUT_S))


def connect(options: RedisOptions | str) -> Redis:
    """A client that connects on first use; close it with ``aclose()``. One a process is enough.

    Commands are sent again after a lost connection, so every write of this store is conditional or idempotent.
    """
    if isinstance(options, str):
        options = RedisOptions(url=options)
    arguments: dict[str, Any] = {
        "socket_timeout": options.socket_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "retry": Retry(ExponentialBackoff(cap=0.1, base=0.01), options.retries),
        "retry_on_error": [RedisConnectionError, RedisTimeoutError],
        "client_name": options.client_name,
        "legacy_responses": False,
    }
    if options.sentinel is not None:
        return _master_client(options, options.sentinel, arguments)
    client: Redis = Redis.from_url(options.url, **arguments)
    return client


class _MasterClient(Redis):
    """A client of whichever server the sentinels call master; closing it closes the clients of the sentinels too."""

    sentinels: Sentinel

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close the connections to master and sentinels."""
        await super().aclose(close_connection_pool)
        await self.sentinels.aclose()


def _master_client(options: RedisOptions, sentinel: SentinelOptions, arguments: dict[str, Any]) -> Redis:
    bounds: dict[str, Any] = {
        "socket_timeout": options.socket_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "username": sentinel.username or None,
        "password": sentinel.password or None,
    }
    of_url: dict[str, Any] = dict(parse_url(options.url))
    of_url.pop("host", None)
    of_url.pop("port", None)
    tls = of_url.pop("connection_class", None) is SSLConnection
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        list(sentinel.sentinels), sentinel_kwargs={**bounds, "ssl": tls}
    )
    client: _MasterClient = sentinels.master_for(
        sentinel.master, redis_class=_MasterClient, ssl=tls, **of_url, **arguments
    )
    client.sentinels = sentinels
    return client


async def server_problems(client: Redis) -> tuple[str, ...]:
    """What is wrong with the server's configuration, one line each; empty when it suits. Raises StoreError."""
    # INFO, not CONFIG GET: managed servers forbid the latter.
    info = await client.info()
    problems = []
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_VERSION:
        problems.append(f"server version {version} is older than 7.0: upgrade it")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        problems.append(f"maxmemory-policy is {policy}: set noeviction, or keys vanish under memory pressure")
    return tuple(problems)
