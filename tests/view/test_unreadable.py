"""What a follower does with values that it cannot read: counts them, keeps what it has, goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dualmap.core.membership import Split
from dualmap.store.packing import UnreadableValueError
from dualmap.view.events import ViewEvent
from dualmap.view.ring_file import RingFile
from tests.view.conftest import FakeInstance, Pool, member, ring
from tests.view.test_follower import started


async def test_a_ring_of_an_unknown_format_leaves_the_held_one(pool: Pool) -> None:
    """A ring two formats ahead is counted; the view decides by the one it has."""
    await started(pool, "a/0")
    packed = msgspec.msgpack.encode({"f": 9, "pool": "p", "epoch": 2, "parameters": {}})
    await pool.client.hset(pool.rings.keys.ring, mapping={"snapshot": packed, "epoch": "2"})

    await pool.follow(1)

    assert pool.view.epoch == 1
    assert pool.view.counts[ViewEvent.UNREADABLE] >= 1


async def test_a_ring_that_contradicts_itself_leaves_the_held_one(pool: Pool) -> None:
    """A split that leads nowhere is no ring to decide with."""
    await started(pool, "a/0")
    await pool.rings.publish(ring(2, member("a/0"), splits=(Split(7, 3, 2),)), fencing_epoch=1)

    await pool.follow(1)

    assert pool.view.epoch == 1
    assert pool.view.counts[ViewEvent.UNREADABLE] >= 1


async def test_an_index_that_is_none_is_passed_over(pool: Pool) -> None:
    """A stored index whose hashes do not ascend is counted; the others are loaded."""
    await pool.rings.publish(ring(1, member("a/0"), member("b/0")), fencing_epoch=1)
    one, two = FakeInstance("a/0"), FakeInstance("b/0")
    for instance in (one, two):
        instance.step(10, 20)
        await pool.states.write(instance.whole())
    await pool.client.hset(pool.states.keys.state("a/0"), "snapshot_tiers", b"\1\1\1")

    await pool.follow()

    pool.assert_holds(two)
    assert pool.view.instances["a/0"].version == 0
    assert pool.view.counts[ViewEvent.UNREADABLE] >= 1


async def test_a_state_of_an_unknown_format_is_passed_over(pool: Pool) -> None:
    """A hash two formats ahead is counted and the instance stays unknown, eligible by hash alone."""
    await pool.rings.publish(ring(1, member("a/0")), fencing_epoch=1)
    await pool.states.write(FakeInstance("a/0").whole())
    await pool.client.hset(pool.states.keys.state("a/0"), "f", "9")

    await pool.follow()

    assert pool.view.instances["a/0"].heard_at_ms is None
    assert pool.view.instances["a/0"].eligible
    assert pool.view.counts[ViewEvent.UNREADABLE] >= 1


async def test_a_damaged_state_hides_no_other(pool: Pool) -> None:
    """Of those loaded in one round trip only the damaged one stays unknown."""
    await pool.rings.publish(ring(1, member("a/0"), member("b/0"), member("c/0")), fencing_epoch=1)
    one, two = FakeInstance("a/0"), FakeInstance("c/0")
    for instance in (one, two):
        instance.step(10, 20)
        await pool.states.write(instance.whole())
    await pool.client.set(pool.states.keys.state("b/0"), "nonsense")

    await pool.follow()

    pool.assert_holds(one)
    pool.assert_holds(two)
    assert pool.view.instances["b/0"].heard_at_ms is None
    assert pool.view.counts[ViewEvent.UNREADABLE] == 1


async def test_changes_that_are_none_reload_the_instance(pool: Pool) -> None:
    """Half a record in a step is counted, and the index ends as it was packed."""
    (one,) = await started(pool, "a/0")
    broken = one.step(40)
    await pool.states.write(
        type(broken)(
            broken.instance_id,
            broken.incarnation,
            broken.agent_epoch,
            broken.version,
            broken.since,
            None,
            None,
            b"\1" * 10,
            broken.kv_digest,
            broken.kv_blocks,
        )
    )
    await pool.follow(1)
    await pool.states.rewrite(one.whole())

    pool.follower._states._progress["a/0"].reload_at_ms = 0.0
    await pool.follow(4)

    pool.assert_holds(one)
    assert pool.view.counts[ViewEvent.UNREADABLE] >= 1


async def test_a_stored_digest_that_no_index_has_does_not_send_in_circles(pool: Pool) -> None:
    """A wrong digest in the store is counted at a bounded rate, and the view serves what it has."""
    (one,) = await started(pool, "a/0")
    await pool.client.hset(pool.states.keys.state("a/0"), "kv_digest", "1")

    pool.follower = pool.new_follower()
    await pool.follow(20)

    assert 1 <= pool.view.counts[ViewEvent.DIGEST] <= 2
    assert pool.view.instances["a/0"].kv.digest == one.index.digest


async def test_a_ring_file_that_cannot_be_written_is_counted(pool: Pool, tmp_path: Path) -> None:
    """A folder that is a file costs a count an epoch, not the view."""
    (tmp_path / "file").write_bytes(b"")
    pool.follower = pool.new_follower(RingFile(tmp_path / "file" / "ring"))

    await started(pool, "a/0")

    assert pool.view.ready
    assert pool.view.counts == {ViewEvent.RING_FILE_BROKEN: 1}


def test_a_failed_save_leaves_the_last_ring_and_nothing_else(tmp_path: Path) -> None:
    """Replacing is atomic: what cannot be moved into place leaves no half file behind."""
    target = tmp_path / "ring"
    target.mkdir()

    with pytest.raises(IsADirectoryError):
        RingFile(target).save(ring(1, member("a/0")))

    assert [path.name for path in tmp_path.iterdir()] == ["ring"]


def test_a_ring_file_of_another_pool_is_refused(tmp_path: Path) -> None:
    """A file that was moved between pools would give wrong pairs in silence."""
    file = RingFile(tmp_path / "ring")
    file.save(ring(1, member("a/0")))

    assert file.load("p") == ring(1, member("a/0"))
    with pytest.raises(UnreadableValueError, match="pool"):
        file.load("q")
    assert RingFile(tmp_path / "absent").load("p") is None


async def test_entries_of_strangers_are_ignored(pool: Pool) -> None:
    """An instance that is not a member, or not any more, changes nothing."""
    await started(pool, "a/0")
    stranger = FakeInstance("x/0")
    await pool.states.write(stranger.whole())
    await pool.states.write(stranger.step(4))

    await pool.follow()

    assert sorted(pool.view.instances) == ["a/0"]
    assert not pool.view.counts
