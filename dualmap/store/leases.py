"""Leadership leases with a fencing epoch, and the register of live collectors. Both end by the server's own clock."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash
from redis.asyncio import Redis

from dualmap.store.keys import PoolKeys
from dualmap.store.script import Script, number


class RedisLeases:
    """The LeaseStore of `dualmap.runtime.leadership`: at most one owner a name, each time with a higher epoch.

    Every method raises StoreError when the server does not answer.
    """

    def __init__(self, client: Redis, pool: str) -> None:
        self.keys = PoolKeys(pool)
        self._client = client
        self._acquire = Script(client, "lease_acquire")
        self._renew = Script(client, "lease_renew")
        self._release = Script(client, "lease_release")

    async def acquire(self, name: str, owner: str, ttl_ms: int) -> int | None:
        """Take a free lease, or one's own anew: its fencing epoch, higher than any before; None while another holds it.

        The epoch is at least the server's clock in milliseconds, so it rises even when the server lost its data.
        """
        answer = await self._acquire.run([self.keys.lease(name), self.keys.fence(name)], [owner, ttl_ms])
        return number(answer[1]) if answer[0] == 1 else None

    async def renew(self, name: str, owner: str, epoch: int, ttl_ms: int) -> bool:
        """Prolong a lease; False when it is no longer this owner's at this epoch."""
        answer = await self._renew.run([self.keys.lease(name)], [owner, str(epoch), ttl_ms])
        return answer[0] == 1

    async def release(self, name: str, owner: str, epoch: int) -> None:
        """Give a lease back at once; nothing when it is no longer this owner's."""
        await self._release.run([self.keys.lease(name)], [owner, str(epoch)])

    async def holder(self, name: str) -> str | None:
        """Who holds the lease now."""
        held = await self._client.get(self.keys.lease(name))
        return held.decode().partition(" ")[2] if isinstance(held, bytes) else None


class CollectorRegister:
    """Who collects now. A collector that stops beating is forgotten after its time to live."""

    def __init__(self, client: Redis, pool: str) -> None:
        self.key = PoolKeys(pool).collectors
        self._beat = Script(client, "collector_beat")

    async def beat(self, collector_id: str, ttl_ms: int) -> tuple[str, ...]:
        """Stay registered for ``ttl_ms`` (above 0): all live collectors by id, this one among them."""
        return self._ids(await self._beat.run([self.key], [collector_id, str(ttl_ms)]))

    async def leave(self, collector_id: str) -> None:
        """Give one's instances up to the others at once."""
        await self._beat.run([self.key], [collector_id, "0"])

    @staticmethod
    def _ids(answer: Iterable[object]) -> tuple[str, ...]:
        return tuple(sorted(item.decode() for item in answer if isinstance(item, bytes)))


def share_owner(instance_id: str, collectors: Iterable[str]) -> str | None:
    """The one of the live collectors that polls an instance (highest hash wins), None when there is none.

    A collector that comes or goes moves only its own share.
    """
    return max(
        collectors, key=lambda name: (xxhash.xxh3_64_intdigest(f"{name}\0{instance_id}".encode()), name), default=None
    )
