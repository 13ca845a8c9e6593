"""Poll results on their way to Redis: what is written within one gathering travels together, each judged by itself.

Nobody waits for another's size: a big update goes alone. Nothing is kept once it was sent.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from redis.asyncio import Redis
from redis.exceptions import RedisError

from dualmap.core.state import KvSnapshot, StateUpdate
from dualmap.store.keys import PoolKeys, shard_of
from dualmap.store.packing import pack_change, pack_load
from dualmap.store.script import Answer, Script, number

TOGETHER = 16
"""Updates of one script call: the server serves nobody else for half a millisecond."""

ALONE_BYTES = 64 * 1024
"""From here on an update travels alone: the others' time-out is not for its bytes."""

_STRIDE = 4
"""Values that the script answers for each update."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a delta starts from: the two lives of an instance and the version stored."""

    incarnation: int
    agent_epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """Whether a write was taken. ``behind``: entries the packed index lies behind. ``stored``: what refused it."""

    written: bool
    behind: int = 0
    stored: Base | None = None

    def __bool__(self) -> bool:
        return self.written


@dataclass(frozen=True, slots=True)
class _Waiting:
    update: StateUpdate
    outcome: asyncio.Future[WriteOutcome]


class StateWriter:
    """Writes of one process to one pool. ``gather_s``: how long the first waits for others to come along."""

    def __init__(self, client: Redis, keys: PoolKeys, max_entries: int, gather_s: float = 0.0) -> None:
        self._client = client
        self._keys = keys
        self.max_entries = max_entries
        self._gather_s = gather_s
        self._script = Script(client, "state_write")
        self._waiting: list[_Waiting] = []
        self._gathering = False
        self._sending: set[asyncio.Task[None]] = set()

    async def write(self, update: StateUpdate) -> WriteOutcome:
        """Write one update, together with what else comes within the gathering. Raises StoreError."""
        outcome: asyncio.Future[WriteOutcome] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(update, outcome)
        if _size(update) >= ALONE_BYTES:
            await self._send([waiting])
        else:
            self._waiting.append(waiting)
            if not self._gathering:
                self._gathering = True
                task = asyncio.create_task(self._gather(), name="state writes")
                self._sending.add(task)
                task.add_done_callback(self._sending.discard)
        return await outcome

    async def close(self) -> None:
        """Return when nothing is on its way any more."""
        while self._sending:
            await asyncio.wait(self._sending)

    async def _gather(self) -> None:
        await asyncio.sleep(self._gather_s)
        waiting, self._waiting = self._waiting, []
        # Whoever comes from now on is of the next, which does not wait for this one's answer.
        self._gathering = False
        await self._send(waiting)

    async def _send(self, waiting: list[_Waiting]) -> None:
        by_shard: defaultdict[int, list[_Waiting]] = defaultdict(list)
        for one in waiting:
            # Who was cancelled meanwhile has no use for it.
            if not one.outcome.done():
                by_shard[shard_of(one.update.instance_id)].append(one)
        calls = [
            (shard, of_shard[first : first + TOGETHER])
            for shard, of_shard in by_shard.items()
            for first in range(0, len(of_shard), TOGETHER)
        ]
        try:
            answers = await self._script.run_each([self._call(shard, these) for shard, these in calls])
        except BaseException as error:
            # Sent perhaps, answered not: the same for each, as if it had gone alone.
            for one in waiting:
                _fail(one, error)
            if not isinstance(error, RedisError):
                raise
            return
        for (_, these), answer in zip(calls, answers, strict=True):
            _tell(these, answer)

    def _call(self, shard: int, waiting: list[_Waiting]) -> tuple[list[str], list[str | bytes | int]]:
        keys = [self._keys.stream(shard), self._keys.added(shard), self._keys.instances(shard)]
        arguments: list[str | bytes | int] = [self.max_entries]
        for one in waiting:
            update = one.update
            keys.append(self._keys.state(update.instance_id))
            load = pack_load(update.load) if update.load is not None else b""
            snapshot = update.snapshot or KvSnapshot()
            numbers = (
                f"{update.incarnation} {update.agent_epoch} {update.since} {update.version} "
                f"{update.kv_digest} {update.kv_blocks} {update.full:d} {bool(update.changes):d}"
            )
            entry = pack_change(update, load)
            arguments += (update.instance_id, numbers, load, entry, snapshot.hashes, snapshot.tiers)
        return keys, arguments


def _size(update: StateUpdate) -> int:
    return len(update.changes) + (len(update.snapshot.hashes) if update.snapshot is not None else 0)


def _tell(waiting: list[_Waiting], answer: Answer | RedisError) -> None:
    if isinstance(answer, RedisError):
        for one in waiting:
            _fail(one, answer)
        return
    for place, one in enumerate(waiting):
        if not one.outcome.done():
            one.outcome.set_result(_outcome(answer[place * _STRIDE : (place + 1) * _STRIDE]))


def _outcome(answer: Answer) -> WriteOutcome:
    taken, first, second, third = answer
    if taken == 1:
        return WriteOutcome(written=True, behind=number(first))
    if not first:
        return WriteOutcome(written=False)
    return WriteOutcome(written=False, stored=Base(number(first), number(second), number(third)))


def _fail(waiting: _Waiting, error: BaseException) -> None:
    if not waiting.outcome.done():
        waiting.outcome.set_exception(error if isinstance(error, RedisError) else RedisError(type(error).__name__))
