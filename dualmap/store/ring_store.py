"""The published ring of a pool: written by the leader only, whole each time, under its fencing epoch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from dualmap.core.membership import RingSnapshot
from dualmap.store.keys import RING_STREAM_ENTRIES, PoolKeys
from dualmap.store.packing import pack_ring, unpack_ring
from dualmap.store.script import Script, number
from dualmap.store.streams import START, is_wrong_type, read_streams


class PublishResult(IntEnum):
    """What became of a publication; numbers equal those of ring_publish.lua."""

    PUBLISHED = 1
    FENCED = 2
    """A later leader has published: stop leading."""
    EPOCH_MOVED = 3
    """The stored epoch is not the expected one: load, then decide again."""
    NOT_RISING = 4
    """The epoch is not above the stored one: take a higher."""


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """Result of a publication and what is stored after it (0: nothing)."""

    result: PublishResult
    stored_epoch: int
    stored_fencing_epoch: int

    @property
    def published(self) -> bool:
        """Whether the ring is now the stored one."""
        return self.result is PublishResult.PUBLISHED


@dataclass(frozen=True, slots=True)
class LoadedRing:
    """The ring now (None: none is stored), its age, and the stream position to follow from."""

    ring: RingSnapshot | None
    age_ms: int
    position: str


class RingStore:
    """One pool's ring. Every method raises StoreError when the server does not answer."""

    def __init__(self, client: Redis, pool: str) -> None:
        self.keys = PoolKeys(pool)
        self._client = client
        self._publish = Script(client, "ring_publish")
        self._load = Script(client, "ring_load")

    async def load(self) -> RingSnapshot | None:
        """The ring now, its grace period shortened by its age. Raises UnreadableValueError."""
        return (await self.load_with_position()).ring

    async def load_with_position(self) -> LoadedRing:
        """The ring now with where to follow from, in one step. Raises UnreadableValueError."""
        found, packed, age_ms, _, position = await self._load.run([self.keys.ring, self.keys.epochs], [])
        after = position.decode() if isinstance(position, bytes) else START
        if not found or not isinstance(packed, bytes):
            return LoadedRing(None, 0, after)
        age = number(age_ms)
        return LoadedRing(unpack_ring(packed, age), age, after)

    async def epoch(self) -> int:
        """The stored epoch; 0 when there is none, and for a key that is no ring."""
        try:
            return int(await self._client.hget(self.keys.ring, "epoch") or 0)
        except ResponseError as error:
            if is_wrong_type(error):
                return 0
            raise

    async def publish(
        self, snapshot: RingSnapshot, fencing_epoch: int, expected_epoch: int | None = None
    ) -> PublishOutcome:
        """Store the ring and tell the followers, unless a later leader did or the epoch does not rise.

        ``expected_epoch``: the epoch this one was made from, 0 for an empty store; None skips that check.
        Sent twice (a lost answer), the second is EPOCH_MOVED or NOT_RISING with ``stored_epoch`` the snapshot's own.
        """
        answer = await self._publish.run(
            [self.keys.ring, self.keys.epochs],
            [
                str(fencing_epoch),
                "" if expected_epoch is None else str(expected_epoch),
                str(snapshot.epoch),
                pack_ring(snapshot),
                RING_STREAM_ENTRIES,
            ],
        )
        return PublishOutcome(PublishResult(number(answer[0])), number(answer[1]), number(answer[2]))

    async def follow(self, position: str, block_ms: int) -> tuple[str, bool]:
        """Wait up to ``block_ms`` for a publication after ``position``: the new position, and whether there was one.

        ``block_ms`` must be below the client's timeout. The ring itself is then read with `load`.
        """
        entries = await read_streams(self._client, {self.keys.epochs: position}, block_ms)
        return (entries[-1].position, True) if entries else (position, False)
