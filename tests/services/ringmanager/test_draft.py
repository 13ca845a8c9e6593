"""The next ring: epochs that never fall, and the grace period of the last."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.membership import InstanceState, Member, RingParameters, RingSnapshot, Split
from services.ringmanager.draft import Draft, next_epoch

A = Member("a", "h:1", state=InstanceState.ACTIVE)
B = Member("b", "h:2", state=InstanceState.ACTIVE)
EMPTY = RingSnapshot("pool", 0, RingParameters())
NUMBERS = st.integers(0, 1 << 62)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_an_epoch_is_above_all_that_anybody_may_have_seen(stored: int, heard: int, wall_ms: int) -> None:
    """Neither a lost Redis, a lost memory nor a clock set back makes an epoch fall."""
    assert next_epoch(stored, heard, wall_ms) == max(stored, heard, wall_ms) + 1


def test_the_first_ring_has_no_previous_one() -> None:
    """There is nothing warm before the first instance."""
    draft = Draft(EMPTY).following((A,), (), 5, 0.0, 60.0)

    assert draft.snapshot.previous is None
    assert (draft.snapshot.epoch, draft.snapshot.members) == (5, (A,))


def test_a_change_of_owners_keeps_the_last_ring_for_the_grace_period() -> None:
    """The caches of the pairs of yesterday stay readable, and only so long."""
    first = Draft(EMPTY).following((A,), (), 5, 0.0, 60.0)
    second = first.following((A, B), (), 6, 10.0, 60.0)

    previous = second.snapshot.previous
    assert previous is not None
    assert (previous.epoch, previous.members, previous.grace_left_ms) == (5, (A,), 60_000)
    assert not second.differs((A, B), (), 69.9)
    assert second.differs((A, B), (), 70.0)
    assert second.following((A, B), (), 7, 70.0, 60.0).snapshot.previous is None


def test_a_change_of_the_split_table_keeps_the_last_one_too() -> None:
    """A longer key leads elsewhere: the old place stays readable."""
    draft = Draft(EMPTY).following((A, B), (), 5, 0.0, 60.0).following((A, B), (Split(1, 1, 2),), 6, 1.0, 60.0)

    assert draft.snapshot.previous is not None
    assert draft.snapshot.previous.splits == ()


def test_a_change_of_state_alone_moves_nothing() -> None:
    """SUSPECT, DRAINING and a warming newcomer leave every pair's owners: the running grace period goes on."""
    first = Draft(EMPTY).following((A,), (), 5, 0.0, 60.0).following((A, B), (), 6, 0.0, 60.0)
    suspect = replace(A, state=InstanceState.SUSPECT)
    warming = Member("c", "h:3")

    draft = first.following((suspect, B, warming), (), 7, 20.0, 60.0)

    assert not first.remaps((suspect, B, warming), ())
    assert draft.snapshot.previous is not None
    assert (draft.snapshot.previous.epoch, draft.snapshot.previous.grace_left_ms) == (5, 40_000)


def test_an_adopted_ring_runs_its_grace_to_the_end() -> None:
    """A new leader neither forgets nor restarts the grace period."""
    second = Draft(EMPTY).following((A,), (), 5, 0.0, 60.0).following((A, B), (), 6, 0.0, 30.0)

    draft = Draft.adopted(second.snapshot, 1_000.0)

    assert not draft.differs((A, B), (), 1_029.0)
    assert draft.differs((A, B), (), 1_030.0)
