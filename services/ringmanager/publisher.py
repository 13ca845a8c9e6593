"""The ring in Redis as one ring manager sees it: what is stored, what epochs were heard, whether the store lost it.

Raises Unavailable when Redis does not answer, and counts nothing away: a change not stored is not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from dualmap.core.errors import Unavailable
from dualmap.core.membership import Member, RingSnapshot
from dualmap.runtime.health import Component
from dualmap.runtime.logs import get_log
from dualmap.store.connection import StoreError
from dualmap.store.packing import UnreadableValueError
from dualmap.store.ring_store import PublishResult, RingStore
from dualmap.store.state_store import StateStore
from services.ringmanager.draft import next_epoch

AUDIT_S = 1.0
"""How often a leader looks whether the stored ring is still its own."""

RETRY_MS = 300

_log = get_log("ring")


class Published(Enum):
    """What became of a ring."""

    YES = 1
    NO = 2


@dataclass(frozen=True, slots=True)
class Stores:
    """Where the ring is published, and where the first full state of an instance shows."""

    ring: RingStore
    state: StateStore
    health: Component


class Publisher:
    """One pool's ring in Redis."""

    def __init__(self, stores: Stores, wall_ms: Callable[[], int]) -> None:
        self._stores = stores
        self._wall_ms = wall_ms
        self._stored_epoch = 0
        self._heard_epoch = 0
        self._audit_due_s = 0.0
        self.must_publish = False

    def heard(self, epoch: int) -> None:
        """Somebody has seen this epoch: ours shall be above it."""
        self._heard_epoch = max(self._heard_epoch, epoch)

    def next_epoch(self, known: int) -> int:
        """An epoch above all that anybody may have seen."""
        return next_epoch(max(self._stored_epoch, known), self._heard_epoch, self._wall_ms())

    def publish_anyway(self) -> None:
        """Publish at the next chance also where neither members nor splits changed."""
        self.must_publish = True

    async def newer(self, known: int) -> RingSnapshot | None:
        """The stored ring, if its epoch is above the known one."""
        try:
            if await self._stores.ring.epoch() <= known:
                self._stores.health.ok()
                return None
            snapshot = await self._load()
        except StoreError as error:
            raise self._failed(error) from error
        self._stores.health.ok()
        return snapshot if snapshot is not None and snapshot.epoch > known else None

    async def begin(self, known: int) -> RingSnapshot | None:
        """A reign begins: the stored ring where it is newer than the known one, which is published again if not."""
        try:
            snapshot = await self._load()
            self._stored_epoch = snapshot.epoch if snapshot else await self._stores.ring.epoch()
        except StoreError as error:
            raise self._failed(error) from error
        self._stores.health.ok()
        self.must_publish = (snapshot.epoch if snapshot else 0) < known
        return snapshot if snapshot is not None and snapshot.epoch > known else None

    async def lost(self, known: int, now_s: float) -> bool:
        """Once a second: whether Redis no longer holds the ring we published. It is then published again."""
        if now_s < self._audit_due_s:
            return False
        self._audit_due_s = now_s + AUDIT_S
        try:
            stored = await self._stores.ring.epoch()
        except StoreError as error:
            raise self._failed(error) from error
        self._stores.health.ok()
        if stored >= known:
            return False
        _log.warning("ring_lost_by_redis", stored_epoch=stored, known_epoch=known)
        self._stored_epoch = stored
        self.must_publish = True
        return True

    async def publish(self, snapshot: RingSnapshot, fencing_epoch: int) -> Published:
        """Store a ring, made from the one we believe stored."""
        try:
            outcome = await self._stores.ring.publish(snapshot, fencing_epoch, self._stored_epoch)
        except StoreError as error:
            raise self._failed(error) from error
        self._stores.health.ok()
        # An answer lost on the way makes redis-py ask again: the stored epoch is then our own.
        ours = outcome.result is not PublishResult.FENCED and outcome.stored_epoch == snapshot.epoch
        if outcome.published or ours:
            self._stored_epoch = snapshot.epoch
            self.must_publish = False
            return Published.YES
        _log.warning("ring_not_published", result=outcome.result.name, stored_epoch=outcome.stored_epoch)
        self._stored_epoch = outcome.stored_epoch
        return Published.NO

    async def full_states(self, members: Iterable[Member]) -> tuple[Member, ...]:
        """Those of the members whose present life has a whole state stored and can be reached."""
        wanted = tuple(members)
        if not wanted:
            return ()
        try:
            heads = await self._stores.state.heads(member.instance_id for member in wanted)
        except StoreError as error:
            raise self._failed(error) from error
        return tuple(
            member
            for member in wanted
            if (head := heads.get(member.instance_id)) is not None
            and head.reachable
            and head.base.agent_epoch == member.agent_epoch
        )

    async def _load(self) -> RingSnapshot | None:
        try:
            return await self._stores.ring.load()
        except UnreadableValueError as error:
            # As good as lost: the members and the routers bring it back.
            _log.error("ring_unreadable", problem=str(error))
            return None

    def _failed(self, error: StoreError) -> Unavailable:
        self._stores.health.fail(f"Redis does not answer: {type(error).__name__}")
        return Unavailable("Redis", RETRY_MS)
