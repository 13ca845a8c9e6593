"""What a reader holds of an instance: updates in order, gaps refused, lives kept apart."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from dualmap.core.instance_view import InstanceView
from dualmap.core.kv_index import KvIndex, pack_change
from dualmap.core.membership import InstanceState, Member
from dualmap.core.state import KvSnapshot, LoadReport, StateUpdate, TicketsSeen
from tests.core.pool import BLOCK, chain, run_of

HASHES = run_of(3, 8)


def _index(hashes: list[int]) -> KvIndex:
    index = KvIndex()
    index.replace(KvSnapshot(array("Q", sorted(hashes)).tobytes(), bytes([1]) * len(hashes)))
    return index


def _full(hashes: list[int], version: int = 5, incarnation: int = 1, agent_epoch: int = 1) -> StateUpdate:
    index = _index(hashes)
    return StateUpdate(
        "a/0", incarnation, agent_epoch, version, 0, LoadReport(), index.snapshot(), b"", index.digest, len(index)
    )


def _change(base: list[int], added: int, since: int, version: int) -> StateUpdate:
    digest = _index([*base, added]).digest
    return StateUpdate("a/0", 1, 1, version, since, None, None, pack_change(added, 1), digest, len(base) + 1)


def test_a_snapshot_then_changes_give_hits() -> None:
    """State is whole once, then changes; the load survives an update that brings none."""
    view = InstanceView("a/0")
    assert view.apply(replace(_full(HASHES[:4]), load=LoadReport(rest_s=2.0)), 10.0)
    assert view.apply(_change(HASHES[:4], HASHES[4], 5, 6), 20.0)

    assert view.hit_tokens(chain(*HASHES)) == (5 * BLOCK, 5 * BLOCK)
    assert (view.version, view.heard_at_ms, view.age_ms(25.0)) == (6, 20.0, 5.0)
    assert view.load.rest_s == 2.0


def test_slower_tiers_are_worth_what_their_discount_leaves() -> None:
    """Of five blocks two are on the host at half and one is far away for nothing: worth three; all five are held."""
    view = InstanceView("a/0", load=LoadReport(host_discount=0.5, remote_discount=1.0))
    for block, tier in zip(HASHES, (1, 1, 2, 2, 3), strict=False):
        view.kv.set(block, tier)

    assert view.hit_tokens(chain(*HASHES)) == (5 * BLOCK, 3 * BLOCK)
    view.load = LoadReport()
    assert view.hit_tokens(chain(*HASHES)) == (5 * BLOCK, 5 * BLOCK)


@pytest.mark.parametrize(
    "update",
    [
        _change(HASHES[:4], HASHES[4], 6, 7),
        replace(_change(HASHES[:4], HASHES[4], 5, 6), incarnation=2),
        replace(_change(HASHES[:4], HASHES[4], 5, 6), agent_epoch=2),
    ],
    ids=["later base", "other cache life", "other agent life"],
)
def test_a_gap_is_refused_and_changes_nothing(update: StateUpdate) -> None:
    """Changes on a base that is not held are not applied."""
    view = InstanceView("a/0")
    view.apply(_full(HASHES[:4]), 10.0)

    assert not view.apply(update, 20.0)
    assert (view.version, view.heard_at_ms, len(view.kv)) == (5, 10.0, 4)


def test_changes_before_any_snapshot_are_refused() -> None:
    """Even those that start at version 0: nothing is held yet."""
    assert not InstanceView("a/0", incarnation=1, agent_epoch=1).apply(_change([], HASHES[0], 0, 1), 1.0)


def test_what_is_held_already_is_ignored() -> None:
    """An older entry of the stream is no gap; one that overlaps is applied, being idempotent."""
    view = InstanceView("a/0")
    view.apply(_full(HASHES[:5], version=6), 10.0)

    assert view.apply(_change(HASHES[:3], HASHES[3], 3, 4), 20.0)
    assert view.version == 6
    assert view.apply(_change(HASHES[:5], HASHES[5], 4, 7), 20.0)
    assert (view.version, len(view.kv)) == (7, 6)


def test_a_differing_digest_asks_for_the_whole_state() -> None:
    """Same version, other digest: counted, and healed by a snapshot of the same version."""
    view = InstanceView("a/0")
    view.apply(_full(HASHES[:4]), 10.0)

    assert not view.apply(replace(_change(HASHES[:4], HASHES[4], 5, 6), kv_digest=1), 20.0)
    assert view.diverged == 1
    assert view.apply(_full(HASHES[:5], version=6), 30.0)


def test_a_new_cache_life_replaces_the_index() -> None:
    """After a restart of the engine nothing of the old cache is promised."""
    view = InstanceView("a/0")
    view.apply(_full(HASHES, version=900), 10.0)

    assert view.apply(_full([], version=1, incarnation=2), 20.0)
    assert view.hit_tokens(chain(*HASHES)) == (0, 0)


def test_a_new_agent_life_voids_the_bookings() -> None:
    """Tickets of the old life count for nothing and sequences start at 1 again."""
    view = InstanceView("a/0", router_id=9)
    view.apply(_full([]), 10.0)
    view.bookings.add(view.bookings.next_sequence(), 1.0, 5, 1, HASHES, 1_000, 10.0)

    view.apply(_full([], agent_epoch=2), 20.0)

    assert len(view.bookings) == 0
    assert view.bookings.next_sequence() == 1


def test_a_report_covers_exactly_this_routers_bookings() -> None:
    """What the agent saw of our tickets is taken out of the bookings; other routers' tickets do nothing."""
    view = InstanceView("a/0", router_id=9)
    view.apply(_full([]), 10.0)
    for _ in range(3):
        view.bookings.add(view.bookings.next_sequence(), 1.0, 5, 1, [], 1_000, 10.0)

    seen = (TicketsSeen(8, 3), TicketsSeen(9, 1, 0b10))
    view.apply(replace(_full([], version=6), load=LoadReport(tickets=seen)), 20.0)

    assert view.bookings.booked_s == pytest.approx(1.0)
    view.apply(replace(_full([], version=7), load=LoadReport()), 5_000.0)
    assert len(view.bookings) == 0


def test_only_the_reachable_and_active_are_eligible() -> None:
    """No member, another state, unreachable or reported stuck: not eligible."""
    member = Member("a/0", "x:1", state=InstanceState.ACTIVE)
    assert InstanceView("a/0", member=member).eligible
    assert not InstanceView("a/0").eligible
    assert not InstanceView("a/0", member=member, reachable=False).eligible
    assert not InstanceView("a/0", member=member, load=LoadReport(suspect=True)).eligible
    assert not InstanceView("a/0", member=replace(member, state=InstanceState.SUSPECT)).eligible
    assert InstanceView("a/0").age_ms(5.0) < 0
