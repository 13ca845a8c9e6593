"""The first answer of Redis at a service's start: there within a bound, or one line that says what to do."""

from __future__ import annotations

import asyncio
import time

from redis.asyncio import Redis

from dualmap.runtime.lifetime import StartError
from dualmap.runtime.logs import get_log
from dualmap.runtime.settings import RedisSettings
from dualmap.store.connection import StoreError

_PAUSE_S = 0.1

_log = get_log("redis")


async def require_redis(client: Redis, settings: RedisSettings) -> None:
    """Return once Redis answers. Raises StartError when it does not within ``start_timeout_s``."""
    problem = await first_problem(client, settings.start_timeout_s)
    if problem is not None:
        raise StartError(
            f"Redis at {settings.where} does not answer within {settings.start_timeout_s:g} s ({problem}); "
            "start it, or set DUALMAP_REDIS__URL"
        )


async def first_problem(client: Redis, timeout_s: float) -> str | None:
    """None as soon as Redis answers; after ``timeout_s`` the last failure in a few words. Asks once at least."""
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            await client.ping()
        except (StoreError, OSError) as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            if time.monotonic() + _PAUSE_S >= until_s:
                return problem
            _log.debug("redis_awaited", error=type(error).__name__)
            await asyncio.sleep(_PAUSE_S)
        else:
            return None
