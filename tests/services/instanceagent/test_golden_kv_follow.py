"""Over real sockets: replay before live frames, gaps filled, restarts and lost continuity drop what was known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from dualmap.engines.event_publisher import EventPublisher, PublisherOptions
from dualmap.engines.event_wire import Dialect, EventWire, Removed, Stored, parse_version
from services.instanceagent.block_map import BlockMap, MapLimits
from services.instanceagent.engine import KvCleared, KvRemoved, KvStored
from services.instanceagent.kv_events import EventSource, FollowTimes, KvEventFollower
from services.instanceagent.kv_wire import Batch
from services.instanceagent.learnt_scopes import ScopeBook
from tests.waiting import until

TIMES = FollowTimes(replay_silence_s=1.0, verify_s=0.1, reconnect_ms=20, reconnect_most_ms=50, heartbeat_ms=200)
QUIET = FollowTimes(replay_silence_s=0.2, verify_s=60.0, reconnect_ms=20, reconnect_most_ms=50, heartbeat_ms=200)
WIRES: list[tuple[Dialect, str]] = [
    ("vllm", "0.9.3"), ("vllm", "0.24.0"), ("vllm", "0.25.0"), ("sglang", "0.5.9"), ("sglang", "0.5.23"),
]  # fmt: skip


class Known:
    """A sink that keeps what a follower tells, as an agent does."""

    def __init__(self) -> None:
        self.map = BlockMap(ScopeBook("m"), 16, self.kv_dropped, MapLimits())
        self.held: set[int] = set()
        self.lost: list[str] = []
        self.dropped: list[str] = []
        self.replays: list[str] = []
        self.batches = 0

    def kv_batch(self, batch: Batch) -> None:
        self.batches += 1
        for change in self.map.apply(batch.events, 0.0):
            match change:
                case KvStored():
                    self.held |= set(change.hashes)
                case KvRemoved():
                    self.held -= set(change.hashes)
                case KvCleared():
                    self.held.clear()

    def kv_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.map.clear()
        self.held.clear()

    def kv_dropped(self, reason: str) -> None:
        self.dropped.append(reason)

    def kv_replayed(self, outcome: str) -> None:
        self.replays.append(outcome)


class Publisher:
    """A publisher that can die and come back on its ports, and events of one growing prompt a block each."""

    def __init__(self, dialect: Dialect = "vllm", version: str = "0.25.0", *, replay: bool = True, kept: int = 1000):
        self.wire = EventWire(dialect, parse_version(version))
        self._options = PublisherOptions(self.wire, replay=replay, buffer_steps=kept)
        self.open()

    def open(self, port: int = 0, replay_port: int = 0) -> None:
        self.now = EventPublisher(self._options)
        self.now.port, self.now.replay_port = port, replay_port
        self.now.open()

    async def restart(self) -> None:
        old = self.now
        await old.close()
        self.open(old.port, old.replay_port)

    def store(self, number: int, parent: int | None = None) -> None:
        tokens = tuple(range(16 * number, 16 * number + 16))
        self.now.publish([Stored((1_000 + number,), parent, tokens, 16)])

    def remove(self, number: int) -> None:
        self.now.publish([Removed((1_000 + number,))])

    async def until_heard(self, known: Known, number: int) -> None:
        """Say it until it is heard: a subscription takes effect some time after its connection stands."""
        while not known.held:
            self.store(number)
            await asyncio.sleep(0.005)

    def source(self, rank: int | None = None) -> EventSource:
        replay = f"tcp://127.0.0.1:{self.now.replay_port}" if self._options.replay else None
        sglang = self.wire.dialect == "sglang"
        return EventSource(f"tcp://127.0.0.1:{self.now.port}", replay, rank, sglang)


@asynccontextmanager
async def following(
    publisher: Publisher, times: FollowTimes = TIMES, rank: int | None = None
) -> AsyncIterator[tuple[KvEventFollower, Known]]:
    known, stop = Known(), asyncio.Event()
    follower = KvEventFollower(publisher.source(rank), known, times)
    task = asyncio.create_task(follower.run(stop))
    try:
        async with asyncio.timeout(5):
            await follower.connected.wait()
        yield follower, known
    finally:
        stop.set()
        await task
        await publisher.now.close()


@pytest.mark.parametrize(("dialect", "version"), WIRES)
async def test_a_late_joiner_gets_the_buffer_first_and_then_goes_on_live(dialect: Dialect, version: str) -> None:
    """Replay frames with and without topic are understood, and live frames follow them in order."""
    publisher = Publisher(dialect, version)
    for number in range(100):
        publisher.store(number)
    publisher.remove(0)

    async with following(publisher) as (_, known):
        assert (known.batches, len(known.held)) == (101, 99)
        publisher.store(100)
        await until(lambda: len(known.held) == 100)
        assert not known.lost
        assert not known.dropped


@pytest.mark.parametrize(("dialect", "version"), WIRES)
async def test_a_gap_is_filled_by_replay_before_the_frame_that_showed_it(dialect: Dialect, version: str) -> None:
    """A store lost on the way is applied before the removal that follows it: nothing is resurrected."""
    publisher = Publisher(dialect, version)
    async with following(publisher, QUIET) as (_, known):
        publisher.store(0)
        await until(lambda: len(known.held) == 1)
        publisher.now.drop_live = 1
        publisher.store(1)
        publisher.remove(1)
        publisher.store(2)

        await until(lambda: known.batches == 4)

        assert len(known.held) == 2
        assert not known.lost


async def test_a_lost_last_frame_is_found_while_the_engine_is_silent() -> None:
    """Silence is normal, so the publisher is asked for its last batch now and then."""
    publisher = Publisher()
    async with following(publisher) as (_, known):
        publisher.store(0)
        publisher.now.drop_live = 1
        publisher.store(1)

        await until(lambda: len(known.held) == 2)

        assert not known.lost


async def test_a_gap_that_replay_cannot_fill_drops_the_index_and_rebuilds_it_from_the_buffer() -> None:
    """Continuity that cannot be shown is not pretended; what the buffer still has is learnt again."""
    publisher = Publisher()
    async with following(publisher, QUIET) as (_, known):
        publisher.store(0)
        await until(lambda: len(known.held) == 1)
        publisher.now.drop_all = 1
        publisher.store(1)
        publisher.store(2)

        await until(lambda: bool(known.lost))
        await until(lambda: known.batches >= 2 and len(known.held) >= 1)

        assert len(known.held) < 3


async def test_a_buffer_that_was_trimmed_past_what_we_have_is_a_new_beginning() -> None:
    """The oldest batch kept does not join on to ours: drop, then take what there is."""
    publisher = Publisher(kept=3)
    async with following(publisher, QUIET) as (_, known):
        publisher.store(0)
        await until(lambda: len(known.held) == 1)
        publisher.now.drop_live = 10
        for number in range(1, 11):
            publisher.store(number)
        publisher.store(11)

        await until(lambda: known.lost == ["not_continued"] and len(known.held) == 3)


@pytest.mark.parametrize("lives", [1, 30])
async def test_a_restart_drops_what_the_old_life_held(lives: int) -> None:
    """Also when the new sequence has passed the old one by the time we hear of it: payloads tell the lives apart."""
    publisher = Publisher()
    async with following(publisher) as (_, known):
        for number in range(10):
            publisher.store(number)
        await until(lambda: len(known.held) == 10)

        await publisher.restart()
        for number in range(100, 100 + lives):
            publisher.store(number)

        await until(lambda: len(known.held) == lives)
        assert known.lost
        assert known.batches == 10 + lives


async def test_a_restart_without_replay_drops_the_index_at_once() -> None:
    """Nobody can show that the publisher which comes back is the same."""
    publisher = Publisher(replay=False)
    async with following(publisher, QUIET) as (_, known):
        await publisher.until_heard(known, 0)

        await publisher.restart()
        await until(lambda: known.lost == ["disconnected"])
        assert not known.held
        await publisher.until_heard(known, 7)


async def test_a_gap_without_replay_drops_the_index() -> None:
    """No live frame is applied on top of what its missing predecessors may have changed."""
    publisher = Publisher(replay=False)
    async with following(publisher, QUIET) as (_, known):
        await publisher.until_heard(known, 0)
        publisher.now.drop_all = 1
        publisher.remove(0)
        publisher.store(2)

        await until(lambda: known.lost == ["gap"] and len(known.held) == 1)


async def test_a_replay_that_never_ends_is_given_up_and_counted() -> None:
    """A router that does not answer costs its silence once; live frames still build an index."""
    publisher = Publisher(replay=False)
    context = zmq.asyncio.Context()
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    known, stop = Known(), asyncio.Event()
    source = EventSource(f"tcp://127.0.0.1:{publisher.now.port}", f"tcp://127.0.0.1:{port}")
    follower = KvEventFollower(source, known, QUIET)
    task = asyncio.create_task(follower.run(stop))

    await until(lambda: known.replays == ["failed"])
    await publisher.until_heard(known, 0)

    stop.set()
    await task
    mute.close(linger=0)
    context.destroy(linger=0)
    await publisher.now.close()


async def test_children_of_a_parent_unknown_to_a_late_joiner_wait_for_it() -> None:
    """Orphans are neither dropped nor taken for roots; the parent's next announcement adopts them."""
    publisher = Publisher(replay=False)
    publisher.store(0)
    async with following(publisher, QUIET) as (_, known):
        while not known.map.orphans:
            publisher.store(1, parent=1_000)
            await asyncio.sleep(0.005)
        assert not known.held
        publisher.store(0)

        await until(lambda: len(known.held) == 2)
        assert known.map.orphans == 0


async def test_batches_of_another_rank_are_left_out_and_counted() -> None:
    """A port that belongs to another data-parallel rank never fills this one's index."""
    publisher = Publisher()
    async with following(publisher, TIMES, rank=1) as (_, known):
        publisher.store(0)

        await until(lambda: "other_rank" in known.dropped)
        assert not known.held


async def test_frames_that_are_no_frames_are_counted() -> None:
    """Whatever else comes out of the port does not stop the following."""
    publisher = Publisher()
    async with following(publisher, QUIET) as (_, known):
        for parts in ([b"alone"], [b"topic", b"short", b"x"], [b"topic", bytes(8), b"\xc1"]):
            publisher.now._live.send_multipart(parts)
        await until(lambda: len(known.dropped) >= 3)
        publisher.now.next_sequence = 1
        publisher.store(1)

        await until(lambda: len(known.held) == 1)
        assert set(known.dropped) >= {"bad_frame", "not_msgpack"}


async def test_a_resync_takes_everything_anew() -> None:
    """For a ring with another block size: same events, other blocks."""
    publisher = Publisher()
    async with following(publisher, QUIET) as (follower, known):
        for number in range(5):
            publisher.store(number)
        await until(lambda: len(known.held) == 5)
        known.kv_lost("parameters")

        follower.resync()

        await until(lambda: len(known.held) == 5)
        assert known.batches == 10


async def test_a_large_batch_leaves_the_loop_to_others_between_its_parts() -> None:
    """Thousands of tokens in one batch are applied over several turns of the loop, and completely."""
    publisher = Publisher()
    async with following(publisher) as (_, known):
        await publisher.until_heard(known, 0)
        before = known.batches
        tokens = tuple(range(100_000, 100_000 + 16 * 1_024))
        publisher.now.publish([Stored(tuple(range(5_000, 6_024)), None, tokens, 16)])
        turns = 0
        async with asyncio.timeout(5):
            while len(known.held) < 1_024:
                await asyncio.sleep(0)
                turns += known.batches > before
    assert known.batches - before >= 16
    assert turns >= 8
    await publisher.now.close()
