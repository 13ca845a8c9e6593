"""State of the instances of a pool: one hash an instance, one stream of changes a shard.

A write is taken only on its base (or, whole, when newer), so collectors that overlap do no harm. It keeps nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate
from dualmap.store.keys import ENTRIES_AN_INSTANCE, SHARD_STREAM_ENTRIES, SHARDS, PoolKeys, shard_of
from dualmap.store.packing import (
    FORMAT,
    PackedChange,
    UnreadableValueError,
    unpack_change,
    unpack_load,
)
from dualmap.store.script import Script, number
from dualmap.store.state_writer import Base, StateWriter, WriteOutcome
from dualmap.store.streams import START, StreamEntry, last_position, read_streams

_HEAD_FIELDS = (
    "f",
    "incarnation",
    "agent_epoch",
    "version",
    "kv_digest",
    "kv_blocks",
    "reachable",
    "written_at_ms",
    "load",
)
_Row = list[bytes | None]
_SNAPSHOT_FIELDS = ("snapshot_hashes", "snapshot_tiers", "snapshot_version", "snapshot_position")


@dataclass(frozen=True, slots=True)
class StateHead:
    """All that is stored of an instance but its index. ``age_ms`` since the last write, by the server's clock."""

    instance_id: str
    base: Base
    load: LoadReport
    kv_digest: int
    kv_blocks: int
    reachable: bool
    age_ms: float


@dataclass(frozen=True, slots=True)
class StoredState:
    """A head with the packed index: whole at ``snapshot_version``, to be followed from ``position`` of its stream.

    The index may lie behind the head's version or ahead of it; the entries after ``position`` lead on from either.
    """

    head: StateHead
    snapshot: KvSnapshot
    snapshot_version: int
    position: str


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of a shard stream: a change (then the instance can be reached), or a word on reachability alone.

    ``unreadable``: it was a change, in a format that this process does not know.
    """

    shard: int
    position: str
    instance_id: str
    reachable: bool
    change: PackedChange | None
    unreadable: bool = False


class StateStore:
    """States of one pool. Every method raises StoreError when the server does not answer."""

    def __init__(
        self, client: Redis, pool: str, max_entries: int = SHARD_STREAM_ENTRIES, gather_s: float = 0.0
    ) -> None:
        """``max_entries``: least length of each shard stream; a packed index is due for rewriting at half of it.

        ``gather_s``: how long a write waits for others to travel with.
        """
        self.keys = PoolKeys(pool)
        self.max_entries = self._least_entries = max_entries
        self._client = client
        self._writer = StateWriter(client, self.keys, max_entries, gather_s)
        self._rewrite = Script(client, "state_rewrite")
        self._mark = Script(client, "state_mark")
        self._streams = {self.keys.stream(shard): shard for shard in range(SHARDS)}

    def expect(self, instances: int) -> None:
        """Hold streams long enough for a pool of so many."""
        self.max_entries = self._writer.max_entries = max(self._least_entries, ENTRIES_AN_INSTANCE * instances)

    def rewrite_due(self, behind: int) -> bool:
        """Whether the packed index must be written anew before the stream's trim reaches it."""
        return behind >= self.max_entries // 2

    async def write(self, update: StateUpdate) -> WriteOutcome:
        """Store a poll result and append one entry; refused unless its base is the stored one or, whole, it is newer.

        Newer: a higher agent_epoch, within the same one another incarnation, within the same two a higher version.
        Sent twice (a lost answer), the second is refused with ``stored`` equal to the update's own version.
        """
        return await self._writer.write(update)

    async def close(self) -> None:
        """Return when no write is on its way any more; the client is its owner's."""
        await self._writer.close()

    async def rewrite(self, update: StateUpdate) -> bool:
        """Pack the index anew from a whole update of the same lives, at or past the stored version; appends nothing."""
        snapshot = update.snapshot or KvSnapshot()
        answer = await self._rewrite.run(
            self._keys_of(update.instance_id),
            [
                str(update.incarnation),
                str(update.agent_epoch),
                str(update.version),
                snapshot.hashes,
                snapshot.tiers,
            ],
        )
        return answer[0] == 1

    async def mark_unreachable(self, instance_id: str, base: Base) -> bool:
        """Say that an instance does not answer; False when it was said or another collector moved it on."""
        return await self._say_reachable(instance_id, base, reachable=False)

    async def mark_reachable(self, instance_id: str, base: Base) -> bool:
        """Say that an instance answers again; False when it was said or another collector moved it on."""
        return await self._say_reachable(instance_id, base, reachable=True)

    async def heads(self, instance_ids: Iterable[str]) -> dict[str, StateHead]:
        """Heads of those instances that have a state that can be read: for its writer no other counts.

        The ring manager takes an instance from WARMING to ACTIVE when its head shows the agent_epoch it joined with
        and is reachable: then its first whole state is stored.
        """
        ids = list(instance_ids)
        rows, now_ms = await self._rows(ids, _HEAD_FIELDS)
        heads = {}
        for name, row in zip(ids, rows, strict=True):
            try:
                head = _head(name, row, now_ms)
            except UnreadableValueError:
                continue
            if head is not None:
                heads[name] = head
        return heads

    async def load(self, instance_ids: Iterable[str]) -> dict[str, StoredState]:
        """Whole states of those instances that have one. Raises UnreadableValueError."""
        ids = list(instance_ids)
        rows, now_ms = await self._rows(ids, _HEAD_FIELDS + _SNAPSHOT_FIELDS)
        states = {}
        for name, row in zip(ids, rows, strict=True):
            head = _head(name, row, now_ms)
            if head is not None and isinstance(row, list):
                hashes, tiers, version, position = row[len(_HEAD_FIELDS) :]
                snapshot = KvSnapshot(hashes or b"", tiers or b"")
                states[name] = StoredState(head, snapshot, number(version), (position or START.encode()).decode())
        return states

    async def snapshot(self, instance_id: str) -> StoredState | None:
        """Whole state of one instance, None when there is none. Raises UnreadableValueError."""
        return (await self.load([instance_id])).get(instance_id)

    async def positions(self) -> dict[int, str]:
        """Position of the newest entry of each shard stream."""
        return {shard: await last_position(self._client, stream) for stream, shard in self._streams.items()}

    async def read_stream(
        self, positions: Mapping[int, str], block_ms: int, count: int | None = None
    ) -> list[StateEntry]:
        """Entries after each shard's position, at most ``count`` a shard, waiting up to ``block_ms`` for one.

        ``block_ms`` must be below the client's socket timeout.
        """
        after = {self.keys.stream(shard): position for shard, position in positions.items()}
        entries = await read_streams(self._client, after, block_ms, count)
        return [self.entry_of(entry) for entry in entries]

    def entry_of(self, entry: StreamEntry) -> StateEntry:
        """A shard stream's entry; one that cannot be read is told as such, for it must not stop those behind it."""
        packed = entry.fields.get(b"e")
        unreadable = False
        change = None
        if packed is not None:
            try:
                change = unpack_change(packed)
            except UnreadableValueError:
                unreadable = True
        return StateEntry(
            shard=self._streams[entry.stream],
            position=entry.position,
            instance_id=entry.fields.get(b"i", b"").decode(),
            reachable=entry.fields.get(b"r", b"1") != b"0",
            change=change,
            unreadable=unreadable,
        )

    async def known_instances(self) -> set[str]:
        """Every instance that has a state, members or not."""
        known: set[str] = set()
        async with self._client.pipeline(transaction=False) as pipeline:
            for shard in range(SHARDS):
                pipeline.smembers(self.keys.instances(shard))
            for members in await pipeline.execute(raise_on_error=False):
                # One of another type is put right with the next whole state.
                if not isinstance(members, ResponseError):
                    known.update(member.decode() for member in members)
        return known

    async def remove(self, instance_id: str) -> None:
        """Forget an instance that left; its entries go with the trim."""
        async with self._client.pipeline(transaction=True) as pipeline:
            pipeline.delete(self.keys.state(instance_id))
            pipeline.srem(self.keys.instances(shard_of(instance_id)), instance_id)
            await pipeline.execute()

    def _keys_of(self, instance_id: str) -> list[str]:
        shard = shard_of(instance_id)
        return [self.keys.state(instance_id), self.keys.stream(shard), self.keys.added(shard)]

    async def _say_reachable(self, instance_id: str, base: Base, *, reachable: bool) -> bool:
        answer = await self._mark.run(
            self._keys_of(instance_id),
            [
                instance_id,
                str(base.incarnation),
                str(base.agent_epoch),
                str(base.version),
                int(reachable),
                self.max_entries,
            ],
        )
        return answer[0] == 1

    async def _rows(self, ids: list[str], fields: tuple[str, ...]) -> tuple[list[_Row | ResponseError], float]:
        async with self._client.pipeline(transaction=False) as pipeline:
            for instance_id in ids:
                pipeline.hmget(self.keys.state(instance_id), list(fields))
            pipeline.time()
            *rows, (seconds, microseconds) = await pipeline.execute(raise_on_error=False)
        return rows, seconds * 1_000 + microseconds / 1_000


def _head(instance_id: str, row: _Row | ResponseError, now_ms: float) -> StateHead | None:
    if isinstance(row, ResponseError):
        raise UnreadableValueError(f"state of {instance_id}: {row}")
    form, incarnation, agent_epoch, version, digest, blocks, reachable, written_at_ms, load = row[: len(_HEAD_FIELDS)]
    if version is None:
        return None
    if number(form) > FORMAT + 1:
        raise UnreadableValueError(f"state of {instance_id} has format {number(form)}; upgrade this process")
    return StateHead(
        instance_id=instance_id,
        base=Base(number(incarnation), number(agent_epoch), number(version)),
        load=unpack_load(load) if load else LoadReport(),
        kv_digest=number(digest),
        kv_blocks=number(blocks),
        reachable=reachable != b"0",
        age_ms=max(0.0, now_ms - number(written_at_ms)),
    )
