"""The last decisions, for Explain: numbers and hashes only, newest attempt of a request first."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dualmap.core.choose import Decision

CAPACITY = 10_000


class Decided(NamedTuple):
    """A decision that was booked, and when (monotonic milliseconds)."""

    request_id: str
    attempt: int
    decision: Decision
    prompt_tokens: int
    ttft_slo_s: float
    ring_epoch: int
    at_ms: float


class History:
    """Bounded; not safe by itself: the decider locks."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._order: deque[Decided] = deque()
        self._by_id: dict[str, Decided] = {}

    def __len__(self) -> int:
        return len(self._order)

    def add(self, decided: Decided) -> None:
        """Keep a decision and drop the oldest beyond the capacity."""
        if len(self._order) >= self._capacity:
            oldest = self._order.popleft()
            if self._by_id.get(oldest.request_id) is oldest:
                del self._by_id[oldest.request_id]
        self._order.append(decided)
        self._by_id[decided.request_id] = decided

    def find(self, request_id: str) -> Decided | None:
        """The newest decision of the request, or None."""
        return self._by_id.get(request_id)
