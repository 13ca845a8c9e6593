"""Shares of pairs that a change moves: the quick way tells what building both rings would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.core.membership import InstanceState, Member, RingParameters
from services.ringmanager.moved import MovedShares

POOL = tuple(Member(f"i{number}", "address", state=InstanceState.ACTIVE) for number in range(9))


@pytest.mark.parametrize("gone", range(len(POOL)))
def test_what_one_departure_moves_is_what_the_rings_before_and_after_differ_in(gone: int) -> None:
    """Exactly the pairs that it was in change, and no other."""
    shares = MovedShares(RingParameters())
    members = (replace(POOL[0], weight=2.0), *POOL[1:])
    left = members[:gone] + members[gone + 1 :]

    assert shares.without(members, members[gone].instance_id) == shares.between(members, left) > 0


def test_who_owns_no_points_moves_nothing_by_leaving() -> None:
    """A WARMING instance is in no pair, nor is a stranger."""
    members = (*POOL, Member("new", "address", state=InstanceState.WARMING))
    shares = MovedShares(RingParameters())

    assert shares.without(members, "new") == shares.without(members, "stranger") == 0.0
    assert shares.between(members, POOL) == 0.0
