"""State of one instance since any recent version: the KV index, its last changes, who waits for the next. No load."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from dualmap.core.kv_index import KvIndex
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate

CHANGES_KEPT = 65_536
RECORD_BYTES = 9
_GONE = 0


class ChangeLog:
    """The last changes of an index in one fixed block of memory (17 bytes a change)."""

    def __init__(self, kept: int = CHANGES_KEPT) -> None:
        self._kept = kept
        self._records = bytearray(kept * RECORD_BYTES)
        self._versions = array("Q", bytes(8 * kept))
        self._first = 0
        self._count = 0
        self._forgotten_version = 0

    def add(self, version: int, record: bytes) -> None:
        """One change; versions never fall. O(1)."""
        if self._count == self._kept:
            self._forgotten_version = self._versions[self._first]
            self._first = (self._first + 1) % self._kept
            self._count -= 1
        slot = (self._first + self._count) % self._kept
        self._versions[slot] = version
        self._records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record
        self._count += 1

    def clear(self, version: int) -> None:
        """Forget all; nothing before ``version`` can be asked for any more."""
        self._first = self._count = 0
        self._forgotten_version = version

    def since(self, version: int) -> bytes | None:
        """Packed changes after ``version``, in order; None when some of them are forgotten. O(log n + answer)."""
        if version < self._forgotten_version:
            return None
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self._versions[(self._first + middle) % self._kept] <= version:
                low = middle + 1
            else:
                high = middle
        start, end = self._first + low, self._first + self._count
        if start >= self._kept:
            start, end = start - self._kept, end - self._kept
        if end <= self._kept:
            return bytes(self._records[start * RECORD_BYTES : end * RECORD_BYTES])
        wrapped = end - self._kept
        return bytes(self._records[start * RECORD_BYTES :]) + bytes(self._records[: wrapped * RECORD_BYTES])


class StateLog:
    """Version, incarnation and index of one instance in one life of its agent."""

    def __init__(self, instance_id: str, agent_epoch: int, incarnation: int, kept: int = CHANGES_KEPT) -> None:
        self.instance_id = instance_id
        self.agent_epoch = agent_epoch
        self.incarnation = incarnation
        self.version = 1
        self.kv = KvIndex()
        self._log = ChangeLog(kept)
        self._changed = asyncio.Event()
        self._waiters = 0

    def advance(self) -> None:
        """Something but the index changed."""
        self.version += 1
        self._tell()

    def store(self, hashes: Sequence[int], tier: int) -> None:
        """Blocks now held in ``tier``. Those already there change nothing."""
        self._record([(block, tier) for block in hashes if self.kv.tier_of(block) != tier])

    def remove(self, hashes: Sequence[int]) -> None:
        """Blocks no longer held."""
        self._record([(block, _GONE) for block in hashes if self.kv.tier_of(block) != _GONE])

    def renew(self, incarnation: int) -> None:
        """A new life of the cache, empty: who has the old one gets everything anew."""
        self.incarnation = incarnation
        self.kv = KvIndex()
        self.version += 1
        self._log.clear(self.version)
        self._tell()

    def has(self, incarnation: int, agent_epoch: int, version: int) -> bool:
        """Whether the caller's state is this very life and version."""
        return (incarnation, agent_epoch, version) == (self.incarnation, self.agent_epoch, self.version)

    def update(self, base: tuple[int, int, int], load: LoadReport, *, full: bool) -> StateUpdate:
        """State since ``base`` (incarnation, agent epoch, version), whole where that is not known or ``full``."""
        incarnation, agent_epoch, since = base
        same_life = (incarnation, agent_epoch) == (self.incarnation, self.agent_epoch)
        changes = self._log.since(since) if same_life and not full and since <= self.version else None
        snapshot: KvSnapshot | None = self.kv.snapshot() if changes is None else None
        return StateUpdate(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            agent_epoch=self.agent_epoch,
            version=self.version,
            since=since if changes is not None else 0,
            load=load,
            snapshot=snapshot,
            changes=changes or b"",
            kv_digest=self.kv.digest,
            kv_blocks=len(self.kv),
        )

    async def wait_for_change(self, base: tuple[int, int, int], timeout_s: float) -> None:
        """Return at the first change after ``base``, or when the time is over."""
        self._waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self.has(*base):
                    await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self._waiters -= 1

    def _record(self, changes: Sequence[tuple[int, int]]) -> None:
        if not changes:
            return
        self.version += 1
        for block, tier in changes:
            if tier == _GONE:
                self.kv.discard(block)
            else:
                self.kv.set(block, tier)
            self._log.add(self.version, block.to_bytes(8, "little") + bytes((tier,)))
        self._tell()

    def _tell(self) -> None:
        if self._waiters:
            # A fresh event for each change: whoever waits for the old one wakes, who comes later waits for the next.
            self._changed.set()
            self._changed = asyncio.Event()
