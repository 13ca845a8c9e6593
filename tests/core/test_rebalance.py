"""Which waiting requests move: to where they meet their deadline, once, and together where they share a cold prefix."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.blocks import Chain
from dualmap.core.membership import InstanceState
from dualmap.core.rebalance import Cause, Move, QueueItem, QueuePicture, RebalanceOptions, plan
from tests.core.pool import BLOCK, NOW_MS, Pool, chain, run_of

OPTIONS = RebalanceOptions()


def _item(pool: Pool, name: int, blocks: int = 50, deadline_s: float = 5.0) -> QueueItem:
    """A cold request of its own prefix: 50 blocks are 1.044 s."""
    hashes = run_of(name, blocks)
    return QueueItem(
        str(name),
        1,
        deadline_s * 1_000,
        chain(*hashes),
        blocks * BLOCK,
        candidates=pool.pair(hashes[0]),
        key=hashes[0],
    )


def _names_of(pool: Pool, source: str, count: int) -> list[int]:
    """Names whose pair holds the source."""
    return list(islice((name for name in range(1, 5_000) if source in pool.pair(run_of(name, 1)[0])), count))


def _queue(pool: Pool, source: str, count: int, deadline_s: float = 5.0) -> list[QueueItem]:
    return [_item(pool, name, deadline_s=deadline_s) for name in _names_of(pool, source, count)]


def _plan(pool: Pool, *sources: QueuePicture, options: RebalanceOptions = OPTIONS) -> list[Move]:
    return plan(sources, pool.views, pool.picture, options, NOW_MS)


def _other(item: QueueItem, source: str) -> str:
    return next(i for i in item.candidates if i != source)


def test_who_would_miss_here_and_meet_there_moves() -> None:
    """Ten requests of about a second, five seconds each: four fit here, the others move inside their pairs."""
    pool = Pool(8)
    items = _queue(pool, "a0/0", 10)

    moves = _plan(pool, QueuePicture("a0/0", tuple(items)))

    by_id = {item.request_id: item for item in items}
    assert {m.request_id for m in moves} <= {item.request_id for item in items[4:]}
    assert moves
    for move in moves:
        assert (move.source, move.cause) == ("a0/0", Cause.OVERLOAD)
        assert move.gain_s > 0
        assert move.target == _other(by_id[move.request_id], "a0/0")


def test_nobody_moves_who_meets_here_or_misses_there() -> None:
    """No threat, no move; no hope, no move."""
    pool = Pool(8)
    items = _queue(pool, "a0/0", 4)
    assert _plan(pool, QueuePicture("a0/0", tuple(items))) == []

    pool.busy(60.0, *pool.views)
    assert _plan(pool, QueuePicture("a0/0", tuple(items), rest_s=10.0)) == []


def test_outside_the_pair_the_next_hash_candidate_takes_it() -> None:
    """The other of the pair is full: the next of the rings, never an arbitrary instance."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    pool.busy(9.0, _other(item, "a0/0"))

    (move,) = _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0))

    assert move.target in pool.escapes(item.key)


@pytest.mark.parametrize("how", ["unreachable", "SUSPECT", "DRAINING", "not admitting"])
def test_an_ineligible_instance_is_no_target(how: str) -> None:
    """Work is not moved to where it could not have been sent."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    other = _other(item, "a0/0")
    if how == "unreachable":
        pool.views[other].reachable = False
    elif how == "not admitting":
        pool.load(other, admitting=False)
    else:
        pool.state(other, InstanceState[how])

    (move,) = _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0))

    assert move.target != other


@pytest.mark.parametrize(("stalled_ms", "suspect", "cause"), [(600, False, "stalled"), (0, True, "suspect")])
def test_a_stalled_or_suspect_instance_gives_its_waiting_work_away(
    stalled_ms: float, suspect: bool, cause: str
) -> None:
    """All that waits there moves, also what would have met, and nothing moves to it."""
    pool = Pool(8)
    items = _queue(pool, "a0/0", 3)
    elsewhere = [item for item in _queue(pool, "a1/0", 40) if "a0/0" in item.candidates][:3]

    moves = _plan(
        pool,
        QueuePicture("a0/0", tuple(items), stalled_ms=stalled_ms, suspect=suspect),
        QueuePicture("a1/0", tuple(elsewhere), rest_s=9.0),
    )

    assert {m.request_id for m in moves if m.source == "a0/0"} == {item.request_id for item in items}
    assert {m.cause.value for m in moves if m.source == "a0/0"} == {cause}
    assert "a0/0" not in {m.target for m in moves}


def test_a_short_silence_is_no_stall() -> None:
    """Below 500 ms only deadlines move work."""
    pool = Pool(8)

    assert _plan(pool, QueuePicture("a0/0", tuple(_queue(pool, "a0/0", 2)), stalled_ms=400)) == []


def test_nobody_moves_twice_within_a_second() -> None:
    """What has just moved stays, what moved long ago may move."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    just = replace(item, moved_ago_ms=400.0)
    long_ago = replace(item, moved_ago_ms=1_500.0)

    assert _plan(pool, QueuePicture("a0/0", (just,), rest_s=9.0)) == []
    assert len(_plan(pool, QueuePicture("a0/0", (long_ago,), rest_s=9.0))) == 1


def test_one_ledger_keeps_a_target_from_being_flooded() -> None:
    """Two sources see the same idle target: what one gives counts against the other."""
    pool = Pool(3)
    pool.busy(100.0, "a0/0", "a1/0")
    sources = [QueuePicture(source, tuple(_queue(pool, source, 20)), rest_s=9.0) for source in ("a0/0", "a1/0")]

    moves = _plan(pool, *sources)

    # Each costs 1.044 s and all are due in 5 s: no more than four can meet at the one idle instance.
    assert len(moves) == len({m.request_id for m in moves}) == 4
    assert {m.target for m in moves} == {"a2/0"}


def test_each_move_relieves_those_behind_it() -> None:
    """Once enough have left, the rest meets here: no more moves than needed."""
    pool = Pool(8)
    items = _queue(pool, "a0/0", 5)

    moves = _plan(pool, QueuePicture("a0/0", tuple(items)))

    assert len(moves) == 1


def test_the_queue_order_of_the_target_places_it() -> None:
    """Work due after the moved request does not count; work due before does."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    other = _other(item, "a0/0")
    waiting = [0.0] * 24
    waiting[8 + 7] = 60.0
    pool.load(other, waiting_s=tuple(waiting))

    (move,) = _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0))
    assert move.target == other

    waiting[8 + 3] = 60.0
    pool.load(other, waiting_s=tuple(waiting))
    (move,) = _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0))
    assert move.target != other


def _sharing(pool: Pool, count: int, shared: int, own: int, deadline_s: float) -> list[QueueItem]:
    prefix = run_of(77, shared)
    items = []
    for number in range(count):
        hashes = prefix + run_of(500 + number, own)
        made: Chain = chain(*hashes)
        pair = pool.pair(prefix[0])
        items.append(QueueItem(str(number), 1, deadline_s * 1_000, made, own * BLOCK, candidates=pair, key=prefix[0]))
    return items


def test_requests_sharing_a_prefix_cold_at_the_target_move_together() -> None:
    """One moves, all move: the prefix is filled there once, and each next one is cheap."""
    pool = Pool(8)
    items = _sharing(pool, 3, shared=60, own=2, deadline_s=5.0)
    source = items[0].candidates[0]

    moves = _plan(pool, QueuePicture(source, tuple(items), rest_s=9.0))

    assert sorted(m.request_id for m in moves) == ["0", "1", "2"]
    assert len({m.target for m in moves}) == 1


def test_or_not_at_all() -> None:
    """One of them may not move, so none does: a part would compute the prefix twice."""
    pool = Pool(8)
    items = _sharing(pool, 3, shared=60, own=2, deadline_s=5.0)
    items[2] = replace(items[2], moved_ago_ms=100.0)
    source = items[0].candidates[0]

    assert _plan(pool, QueuePicture(source, tuple(items), rest_s=9.0)) == []


def test_where_the_prefix_is_warm_they_move_one_by_one() -> None:
    """The target holds the prefix: nothing ties them together."""
    pool = Pool(8)
    items = _sharing(pool, 3, shared=60, own=2, deadline_s=5.0)
    items[2] = replace(items[2], moved_ago_ms=100.0)
    source, target = items[0].candidates
    pool.warm(target, run_of(77, 60))

    moves = _plan(pool, QueuePicture(source, tuple(items), rest_s=9.0))

    assert sorted(m.request_id for m in moves) == ["0", "1"]
    assert {m.target for m in moves} == {target}


def test_an_unknown_source_and_an_empty_queue_plan_nothing() -> None:
    """Nothing to read, nothing to move; a bound on moves is kept."""
    pool = Pool(8)
    items = tuple(_queue(pool, "a0/0", 10))

    assert _plan(pool, QueuePicture("gone/0", items), QueuePicture("a1/0", ())) == []
    few = RebalanceOptions(max_moves=2)
    assert len(_plan(pool, QueuePicture("a0/0", items, suspect=True), options=few)) == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.data())
def test_a_plan_moves_each_request_at_most_once_and_only_for_the_better(n: int, data: st.DataObject) -> None:
    """Whatever the queues: distinct requests of the queues given, another target, eligible, with a gain."""
    pool = Pool(n)
    pictures: list[QueuePicture] = []
    taken: set[int] = set()
    for source in pool.views:
        pool.busy(data.draw(st.floats(0, 10)), source)
        names = [n for n in _names_of(pool, source, 12) if n not in taken]
        taken.update(names)
        items = [_item(pool, name, data.draw(st.integers(1, 80)), data.draw(st.floats(-1, 9))) for name in names]
        rest = pool.views[source].load.rest_s
        pictures.append(QueuePicture(source, tuple(items), rest, suspect=data.draw(st.booleans())))
    waiting = {(p.instance_id, item.request_id) for p in pictures for item in p.items}
    suspects = {p.instance_id for p in pictures if p.suspect}

    moves = _plan(pool, *pictures)

    assert len({m.request_id for m in moves}) == len(moves)
    for move in moves:
        assert (move.source, move.request_id) in waiting
        assert move.target != move.source
        assert move.target not in suspects
        assert move.gain_s > 0


def _sequence_of(pool: Pool, items: Sequence[QueueItem]) -> QueuePicture:
    return QueuePicture("a0/0", tuple(items), rest_s=9.0)


def test_a_thousand_waiting_are_planned_in_bounded_time() -> None:
    """A whole list of 1,024 is planned without quadratic work."""
    pool = Pool(8)
    items = [_item(pool, name, 20) for name in range(1, 1_025)]
    started = time.perf_counter()

    moves = _plan(pool, _sequence_of(pool, items))

    assert moves
    assert time.perf_counter() - started < 10


def test_a_prompt_wholly_cached_at_the_target_moves_alone() -> None:
    """It has no cold block to share with anybody."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    pool.warm(_other(item, "a0/0"), item.chain.hashes)

    (move,) = _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0))

    assert move.target == _other(item, "a0/0")


def test_only_the_pair_when_no_further_look_is_allowed() -> None:
    """Without further looks a full partner means staying."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    pool.busy(9.0, _other(item, "a0/0"))

    assert _plan(pool, QueuePicture("a0/0", (item,), rest_s=9.0), options=RebalanceOptions(further_looks=0)) == []


def test_from_a_stalled_instance_the_lost_moves_only_where_it_is_sooner() -> None:
    """Past its deadline anywhere it still moves to an earlier first token, not to a later one."""
    pool = Pool(8)
    (item,) = _queue(pool, "a0/0", 1)
    lost = replace(item, deadline_ms=-1.0)
    pool.busy(10.0, *pool.views)
    assert len(_plan(pool, QueuePicture("a0/0", (lost,), rest_s=10.0, suspect=True))) == 1

    pool.busy(50.0, *pool.views)
    assert _plan(pool, QueuePicture("a0/0", (lost,), rest_s=1.0, suspect=True)) == []


def test_a_target_taken_in_the_round_sends_the_next_one_on() -> None:
    """The first target has no more room: the next hash candidate gets it, or nobody."""
    pool = Pool(8)
    first, *others = _queue(pool, "a0/0", 40)
    other = _other(first, "a0/0")
    second = next(item for item in others if _other(item, "a0/0") == other)
    pool.busy(3.5, other)

    moves = _plan(pool, QueuePicture("a0/0", (first, second), rest_s=9.0))

    assert len(moves) == 2
    assert {m.target for m in moves} != {other}
    assert other in {m.target for m in moves}
