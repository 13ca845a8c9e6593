"""The packed index against a plain dictionary, its digest, and its memory."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.errors import InvalidRequest
from dualmap.core.kv_index import KvIndex, mix64, pack_change
from dualmap.core.state import KvSnapshot

HASH = st.one_of(st.integers(0, 12), st.integers(0, 2**64 - 1))
CHANGES = st.lists(st.tuples(HASH, st.integers(0, 3)), max_size=300)


def index_of(held: dict[int, int]) -> KvIndex:
    index = KvIndex()
    for block, tier in held.items():
        index.set(block, tier)
    return index


def assert_holds(index: KvIndex, held: dict[int, int]) -> None:
    assert len(index) == len(held)
    assert index.digest == sum(mix64(b, t) for b, t in held.items()) % 2**64
    snapshot = index.snapshot()
    assert struct.unpack(f"<{len(held)}Q", snapshot.hashes) == tuple(sorted(held))
    assert list(snapshot.tiers) == [held[b] for b in sorted(held)]
    assert index.slow == sum(tier > 1 for tier in held.values())


@settings(max_examples=150, deadline=None)
@given(CHANGES, CHANGES)
def test_changes_end_as_in_a_dictionary_in_batches_small_and_big(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """Big batches are merged, small ones inserted: content and digest are the same, and repeating changes nothing."""
    held: dict[int, int] = {}
    index, one_by_one = KvIndex(), KvIndex()
    for batch in (first, second):
        packed = b"".join(pack_change(b, t) for b, t in batch)
        index.apply(packed)
        for block, tier in batch:
            held.pop(block, None)
            if tier:
                held[block] = tier
                one_by_one.set(block, tier)
            else:
                one_by_one.discard(block)
        assert_holds(index, held)
        index.apply(packed)
    assert_holds(index, held)
    assert_holds(one_by_one, held)


@pytest.mark.parametrize("prefix_closed", [True, False])
@pytest.mark.parametrize("tiers", [(1, 1, 2, 2, 2, 3), (1, 1, 1), (3, 3), (2, 3), (1, 3)])
def test_slower_tiers_of_a_run_are_counted(tiers: tuple[int, ...], prefix_closed: bool) -> None:
    """Host and remote blocks apart, and what they lose at their discounts, in whole blocks."""
    chain = [number * 77 + 5 for number in range(8)]
    index = index_of(dict(zip(chain, tiers, strict=False)))

    host, remote = tiers.count(2), tiers.count(3)

    assert index.slow_blocks(chain, len(tiers), prefix_closed) == (host, remote)
    assert index.lost_blocks(chain, len(tiers), 0.0, 0.0, prefix_closed) == 0
    assert index.lost_blocks(chain, len(tiers), 0.5, 1.0, prefix_closed) == (host + 1) // 2 + remote


def test_a_snapshot_rebuilds_the_index() -> None:
    """What one process sends another holds, digest included, and whatever was there before is gone."""
    held = {2**64 - 1: 3, 0: 1, 77: 2}
    copy = index_of({5: 1})

    copy.replace(index_of(held).snapshot())

    assert_holds(copy, held)
    copy.replace(KvSnapshot())
    assert_holds(copy, {})


@pytest.mark.parametrize(
    "snapshot",
    [
        KvSnapshot(bytes(8), b""),
        KvSnapshot(bytes(7), b"\x01"),
        KvSnapshot(struct.pack("<QQ", 2, 1), b"\x01\x01"),
        KvSnapshot(struct.pack("<QQ", 2, 2), b"\x01\x01"),
        KvSnapshot(struct.pack("<Q", 2), b"\x00"),
        KvSnapshot(struct.pack("<Q", 2), b"\x04"),
    ],
)
def test_a_broken_snapshot_is_refused_and_changes_nothing(snapshot: KvSnapshot) -> None:
    """Lengths, order and tiers are checked before anything is taken over."""
    index = index_of({9: 1})

    with pytest.raises(InvalidRequest, match="snapshot"):
        index.replace(snapshot)

    assert_holds(index, {9: 1})


@pytest.mark.parametrize("changes", [b"x", pack_change(1, 1) + pack_change(2, 4), pack_change(2, 255) * 100])
def test_broken_changes_are_refused_and_change_nothing(changes: bytes) -> None:
    """Half a record or an unknown tier refuses the whole batch."""
    index = index_of({9: 1})

    with pytest.raises(InvalidRequest, match="changes"):
        index.apply(changes)

    assert_holds(index, {9: 1})


@pytest.mark.parametrize("tier", [0, 4, -1])
def test_an_unknown_tier_is_refused(tier: int) -> None:
    """Tiers are 1 to 3; to forget a block has a name of its own."""
    with pytest.raises(InvalidRequest, match="tier"):
        KvIndex().set(1, tier)


@given(st.integers(0, 90), st.integers(0, 90), st.booleans())
def test_a_leading_run_is_found_by_gallop_and_by_walk(length: int, held: int, closed: bool) -> None:
    """Where ancestors are held whenever a block is, both ways give the same run."""
    rng = random.Random(length)
    chain = [rng.getrandbits(64) for _ in range(length)]
    index = index_of(dict.fromkeys([*chain[:held], 1, 2**64 - 1], 1))

    assert index.leading_blocks(chain, prefix_closed=closed) == min(held, length)


def test_without_prefix_closure_a_hole_ends_the_run() -> None:
    """An engine that drops the root first must not be promised as a hit."""
    index = index_of({1: 1, 3: 1, 4: 1})

    assert index.leading_blocks([1, 2, 3, 4], prefix_closed=False) == 1
    assert index.leading_blocks([2, 3, 4], prefix_closed=False) == 0


def test_a_gallop_reads_few_blocks_of_a_long_chain() -> None:
    """A chain of 4,096 blocks costs a few dozen look-ups, however much of it is held."""
    reads = 0

    class Chain(list[int]):
        def __getitem__(self, item):  # type: ignore[no-untyped-def]
            nonlocal reads
            reads += 1
            return super().__getitem__(item)

    index = index_of(dict.fromkeys(range(3_000), 1))

    assert index.leading_blocks(Chain(range(4_096))) == 3_000
    assert reads <= 2 * 12 + 2


def test_tiers_of_a_run_are_listed() -> None:
    """One byte a block, 0 where it is not held."""
    index = index_of({1: 1, 2: 3})

    assert index.leading_tiers([1, 2, 3, 1], 3) == b"\x01\x03\x00"
    assert (index.tier_of(2), index.tier_of(3), index.tier_of(2**64 - 1)) == (3, 0, 0)


@pytest.mark.parametrize("batch", [1, 5_000])
def test_a_block_costs_at_most_sixteen_bytes_after_growth(batch: int) -> None:
    """Measured with what growth allocates in advance, at the worst moment along the way."""
    rng = random.Random(1)
    index = KvIndex()
    worst = 0.0
    for step in range(20_000 // batch):
        index.apply(b"".join(pack_change(rng.getrandbits(64), 1) for _ in range(batch)))
        if (step + 1) * batch > 1_000:
            worst = max(worst, index.nbytes / len(index))

    assert worst <= 16.0


def test_look_ups_stay_right_while_an_index_grows_and_shrinks_block_by_block() -> None:
    """The directory follows every single change: what is held is found, what is gone or never came is not."""
    draw = random.Random(3)
    index, held = KvIndex(), list[int]()
    for number in range(3_000):
        held.append(draw.getrandbits(64))
        index.set(held[-1], 1)
        if number % 97 == 0:
            assert index.leading_blocks([*held, draw.getrandbits(64)]) == len(held)
            assert index.leading_blocks([draw.getrandbits(64)]) == 0
    draw.shuffle(held)
    while held:
        gone = held.pop()
        index.discard(gone)
        if len(held) % 97 == 0:
            assert index.leading_blocks([*held, gone]) == len(held)
            assert index.leading_blocks([gone]) == 0
    assert len(index) == 0
