"""Tickets and bookings: an instance's load is never undercounted by what has not arrived and is young."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.bookings import Bookings
from dualmap.core.state import EMPTY_WAITING, TicketsSeen
from dualmap.core.tickets import MAX_AHEAD, TicketLedger, covers

TTL_MS = 2_000.0


def book(bookings: Bookings, now_ms: float = 0.0, hashes: tuple[int, ...] = (), work_s: float = 1.0) -> int:
    sequence = bookings.next_sequence()
    bookings.add(sequence, work_s, 2, 1, hashes, 100, now_ms)
    return sequence


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 300, allow_nan=False), st.one_of(st.none(), st.floats(0, 6_000, allow_nan=False))),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ARRIVALS, st.lists(st.floats(0, 12_000), max_size=8))
def test_what_has_not_arrived_and_is_young_stays_booked(
    plan: list[tuple[float, float | None]], reports: list[float]
) -> None:
    """Tickets come late, out of order or never: no report releases a young one that is still on its way.

    And what a report shows is gone from the bookings, so nothing is counted twice.
    """
    bookings, ledger = Bookings(), TicketLedger(TTL_MS)
    events: list[tuple[float, int, int]] = []
    booked_at, arrives_at = {}, {}
    now = 0.0
    for sequence, (wait, delay) in enumerate(plan, start=1):
        now += wait
        booked_at[sequence] = now
        arrives_at[sequence] = float("inf") if delay is None else now + delay
        events.append((now, 0, sequence))
        if delay is not None:
            events.append((now + delay, 1, sequence))
    events += [(at, 2, 0) for at in reports]

    held: set[int] = set()
    for at, kind, sequence in sorted(events):
        if kind == 0:
            assert book(bookings, at) == sequence
            held.add(sequence)
        elif kind == 1:
            ledger.saw(7, sequence, at)
        else:
            for seen in ledger.report(at):
                bookings.cover(seen)
                held = {s for s in held if not covers(seen, s)}
            must_stay = {s for s in held if arrives_at[s] > at and at - booked_at[s] < TTL_MS}
            assert must_stay == {s for s in booked_at if booked_at[s] <= at < min(arrives_at[s], booked_at[s] + TTL_MS)}
            assert len(bookings) == len(held)
            assert bookings.booked_s == pytest.approx(len(held))


def test_the_map_shows_arrivals_above_a_gap() -> None:
    """Ticket 2 is on its way: 1 is below the watermark, 3 and 4 are in the map."""
    ledger = TicketLedger(TTL_MS)
    for sequence in (1, 3, 4, 4):
        assert ledger.saw(7, sequence, 0.0)

    assert ledger.report(1.0) == (TicketsSeen(7, 1, 0b110),)


def test_a_gap_ages_from_the_next_ticket_on() -> None:
    """A lost ticket is given up its ttl after a later one came, not before."""
    ledger = TicketLedger(TTL_MS)
    ledger.saw(7, 1, 0.0)
    ledger.saw(7, 3, 5_000.0)

    assert ledger.report(5_000.0 + TTL_MS) == (TicketsSeen(7, 1, 0b10),)
    assert ledger.report(5_001.0 + TTL_MS) == (TicketsSeen(7, 3, 0),)
    ledger.saw(7, 2, 9_000.0)
    assert ledger.report(9_000.0) == (TicketsSeen(7, 3, 0),)


def test_giving_up_an_older_gap_keeps_younger_arrivals() -> None:
    """Only gaps older than the ttl close; what came above them stays in the map."""
    ledger = TicketLedger(TTL_MS)
    ledger.saw(7, 2, 0.0)
    ledger.saw(7, 5, 1_500.0)

    assert ledger.report(2_500.0) == (TicketsSeen(7, 2, 0b100),)


def test_arrivals_beyond_the_map_are_told_later() -> None:
    """What lies more than 256 above the watermark waits until the watermark rises."""
    ledger = TicketLedger(TTL_MS)
    ledger.saw(7, 300, 0.0)

    assert ledger.report(1.0) == (TicketsSeen(7, 0, 0),)
    assert ledger.report(TTL_MS + 1) == (TicketsSeen(7, 300, 0),)


def test_unbelievable_sequences_are_refused() -> None:
    """A forged ticket neither grows the ledger nor releases honest bookings."""
    ledger = TicketLedger(TTL_MS)
    ledger.saw(7, 1, 0.0)

    assert not ledger.saw(7, 0, 0.0)
    assert not ledger.saw(7, MAX_AHEAD + 2, 0.0)
    assert not ledger.saw(8, -1, 0.0)
    assert ledger.report(TTL_MS * 2) == (TicketsSeen(7, 1, 0),)


def test_silent_routers_are_forgotten_and_may_return() -> None:
    """After a minute without tickets a router is dropped; its next one starts a new record."""
    ledger = TicketLedger(TTL_MS)
    ledger.saw(7, 1, 0.0)
    ledger.saw(8, 1, 50_000.0)

    assert [seen.router_id for seen in ledger.report(60_001.0)] == [8]
    assert ledger.saw(7, 100_000, 60_002.0)
    assert ledger.report(70_000.0)[0] == TicketsSeen(7, 100_000, 0)


@pytest.mark.parametrize(
    ("sequence", "covered"), [(1, True), (5, True), (6, False), (7, True), (261, True), (262, False), (2**63, False)]
)
def test_covers_reads_watermark_and_map(sequence: int, covered: bool) -> None:
    """Up to the watermark all, above it what the map says, beyond it nothing."""
    assert covers(TicketsSeen(7, 5, 0b10 | 1 << 255 | 1 << 256), sequence) is covered


def test_a_report_removes_exactly_what_it_covers() -> None:
    """Watermark and map bits go, the ticket between them stays."""
    bookings = Bookings()
    for _ in range(5):
        book(bookings)

    assert bookings.cover(TicketsSeen(7, 2, 0b110)) == 4
    assert bookings.cover(TicketsSeen(7, 2, 0b110)) == 0
    assert len(bookings) == 1
    assert bookings.release(3)


def test_bookings_are_flat_like_a_load_report_and_end_at_zero() -> None:
    """Seconds stand at class x buckets + bucket; when the last is gone, no rounding error is left."""
    bookings = Bookings()
    for work_s in (0.1, 0.2, 0.3):
        book(bookings, work_s=work_s)

    assert bookings.waiting_s[1 * 8 + 2] == pytest.approx(0.6)
    assert sum(bookings.waiting_s) == bookings.booked_s
    assert bookings.miss_tokens == 300
    for sequence in (1, 2, 3):
        assert bookings.release(sequence)
    assert not bookings.release(3)
    assert tuple(bookings.waiting_s) == EMPTY_WAITING
    assert bookings.booked_s == 0.0
    assert bookings.miss_tokens == 0


def test_expiry_takes_what_is_older_than_its_ttl_only() -> None:
    """A booking of exactly the ttl still counts."""
    bookings = Bookings()
    for now_ms in (0.0, 1.0, 500.0):
        book(bookings, now_ms)

    assert bookings.expire(2_001.0, TTL_MS) == 1
    assert bookings.expire(9_000.0, TTL_MS) == 2
    assert bookings.expire(9_000.0, TTL_MS) == 0


def test_booked_blocks_continue_a_hit_while_anyone_books_them() -> None:
    """Two requests with one new prefix: the second sees a hit, until both bookings are gone."""
    bookings = Bookings()
    first, second = book(bookings, hashes=(3, 4, 5)), book(bookings, hashes=(3, 4))

    assert bookings.extra_blocks([1, 2, 3, 4, 5, 6], 2) == 3
    assert bookings.extra_blocks([1, 2, 3, 4], 2) == 2
    assert bookings.extra_blocks([1, 2, 3], 1) == 0
    bookings.release(first)
    assert bookings.extra_blocks([1, 2, 3, 4, 5, 6], 2) == 2
    bookings.release(second)
    assert bookings.extra_blocks([1, 2, 3], 2) == 0


def test_a_repeated_sequence_replaces_its_booking() -> None:
    """Booking twice does not count twice."""
    bookings = Bookings()
    bookings.add(1, 1.0, 0, 0, (), 10, 0.0)
    bookings.add(1, 2.0, 0, 0, (), 10, 0.0)

    assert (len(bookings), bookings.booked_s, bookings.miss_tokens) == (1, 2.0, 10)


def test_a_new_life_of_the_agent_starts_again() -> None:
    """Its bookings are void and its tickets count from 1."""
    bookings = Bookings()
    book(bookings, hashes=(1,))
    bookings.clear()

    assert (len(bookings), bookings.booked_s, bookings.extra_blocks([1], 0)) == (0, 0.0, 0)
    assert bookings.next_sequence() == 1
