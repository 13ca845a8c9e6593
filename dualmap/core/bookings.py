"""Router side of the bookings: work sent to one instance that its reports do not show yet (design §6)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from dualmap.core.state import EMPTY_WAITING, SLACK_BUCKETS, TicketsSeen


class _Booking(NamedTuple):
    slot: int
    work_s: float
    miss_hashes: Sequence[int]
    miss_tokens: int
    booked_ms: float


EXPECTED_MS = 5_000.0
"""Blocks of a covered booking still count as future hits until this long after the booking: the request waits there,
and its blocks enter the index at its first token only. Worth 1 % of goodput on both traces."""


class Bookings:
    """Bookings of one router on one instance and one life of its agent, in order of sequence and time."""

    __slots__ = ("_blocks", "_booked", "_expected", "_last_sequence", "booked_s", "miss_tokens", "waiting_s")

    def __init__(self) -> None:
        self._last_sequence = 0
        self._booked: dict[int, _Booking] = {}
        self.waiting_s: list[float] = list(EMPTY_WAITING)
        """Booked seconds of prefill, flat as ``LoadReport.waiting_s``: to be read at once, not to be kept."""
        self.booked_s = 0.0
        """Booked seconds of prefill in all."""
        self._blocks: dict[int, int] = {}
        self._expected: deque[tuple[float, Sequence[int]]] = deque()
        self.miss_tokens: int = 0
        """Uncached prefill tokens booked."""

    def next_sequence(self) -> int:
        """The next ticket's sequence, from 1 without gaps for this life of the agent."""
        self._last_sequence += 1
        return self._last_sequence

    def add(  # noqa: PLR0917 - one booking, told flat: this is on the path of every decision
        self,
        sequence: int,
        work_s: float,
        slack_bucket: int,
        priority_class: int,
        miss_hashes: Sequence[int],
        miss_tokens: int,
        now_ms: float,
    ) -> None:
        """Book ``work_s`` seconds of prefill; ``miss_hashes`` count as future hits. A repeated sequence replaces."""
        if sequence in self._booked:
            self.release(sequence)
        slot = priority_class * SLACK_BUCKETS + slack_bucket
        self._booked[sequence] = _Booking(slot, work_s, miss_hashes, miss_tokens, now_ms)
        self.waiting_s[slot] += work_s
        self.booked_s += work_s
        self.miss_tokens += miss_tokens
        blocks = self._blocks
        for block in miss_hashes:
            blocks[block] = blocks.get(block, 0) + 1

    def release(self, sequence: int) -> bool:
        """Take one booking back; False when it is not held (covered, expired or never made)."""
        booking = self._settle(sequence)
        if booking is None:
            return False
        self._drop(booking.miss_hashes)
        return True

    def _settle(self, sequence: int) -> _Booking | None:
        """The work is booked no more; its blocks are the caller's to keep or drop."""
        booking = self._booked.pop(sequence, None)
        if booking is None:
            return None
        if self._booked:
            self.waiting_s[booking.slot] = max(0.0, self.waiting_s[booking.slot] - booking.work_s)
            self.booked_s = max(0.0, self.booked_s - booking.work_s)
        else:
            # Empty is exactly zero: no rounding error outlives the bookings that made it.
            self.waiting_s = list(EMPTY_WAITING)
            self.booked_s = 0.0
        self.miss_tokens -= booking.miss_tokens
        return booking

    def _drop(self, hashes: Sequence[int]) -> None:
        for block in hashes:
            left = self._blocks[block] - 1
            if left:
                self._blocks[block] = left
            else:
                del self._blocks[block]

    def cover(self, seen: TicketsSeen) -> int:
        """Remove exactly what the agent's report shows; how many that were. Its blocks stay expected for a while."""
        covered = []
        for sequence in self._booked:
            if sequence > seen.watermark:
                break
            covered.append(sequence)
        bits = seen.seen
        while bits:
            lowest = bits & -bits
            covered.append(seen.watermark + lowest.bit_length())
            bits ^= lowest
        count = 0
        for sequence in covered:
            booking = self._settle(sequence)
            if booking is not None:
                count += 1
                self._expected.append((booking.booked_ms, booking.miss_hashes))
        return count

    def expire(self, now_ms: float, ttl_ms: float) -> int:
        """Remove bookings older than ``ttl_ms``, and blocks expected for too long; how many bookings that were."""
        while self._expected and now_ms - self._expected[0][0] > EXPECTED_MS:
            self._drop(self._expected.popleft()[1])
        oldest_ms = now_ms - ttl_ms
        expired = []
        for sequence, booking in self._booked.items():
            if booking.booked_ms >= oldest_ms:
                break
            expired.append(sequence)
        for sequence in expired:
            self.release(sequence)
        return len(expired)

    def clear(self) -> None:
        """A new life of the agent: every ticket is void and sequences start again at 1."""
        self._last_sequence = 0
        self._booked = {}
        self.waiting_s = list(EMPTY_WAITING)
        self.booked_s = 0.0
        self._blocks = {}
        self._expected.clear()
        self.miss_tokens = 0

    def __len__(self) -> int:
        return len(self._booked)

    @property
    def expects(self) -> bool:
        """Whether any block is booked or expected."""
        return bool(self._blocks)

    def extra_blocks(self, hashes: Sequence[int], from_block: int) -> int:
        """Blocks booked or expected without a gap from ``from_block`` on: hits to come."""
        blocks = self._blocks
        if not blocks:
            return 0
        count = 0
        for block in islice(hashes, from_block, None):
            if block not in blocks:
                break
            count += 1
        return count
