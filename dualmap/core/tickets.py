"""Agent side of the bookings: which of each router's tickets have arrived or are too late to wait for (design §6)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dualmap.core.state import TicketsSeen

MAP_BITS = 256
"""Width of the map above the watermark."""

MAX_AHEAD = 65_536
"""A sequence further above the watermark than this is no honest ticket: hints are validated."""


def covers(seen: TicketsSeen, sequence: int) -> bool:
    """Whether the report says that this ticket arrived or is given up."""
    if sequence <= seen.watermark:
        return True
    ahead = sequence - seen.watermark - 1
    return ahead < MAP_BITS and bool(seen.seen >> ahead & 1)


@dataclass(slots=True)
class _RouterTickets:
    heard_ms: float
    watermark: int = 0
    highest: int = 0
    arrived: set[int] = field(default_factory=set)
    # (highest sequence, when it arrived): from then on every gap below it ages.
    highs: deque[tuple[int, float]] = field(default_factory=deque)

    def advance(self, oldest_ms: float) -> None:
        """Raise the watermark over what arrived and over gaps that opened before ``oldest_ms``."""
        given_up = self.watermark
        while self.highs and (self.highs[0][1] < oldest_ms or self.highs[0][0] <= self.watermark):
            given_up = max(given_up, self.highs.popleft()[0])
        if given_up > self.watermark:
            self.watermark = given_up
            self.arrived = {sequence for sequence in self.arrived if sequence > given_up}
        while self.watermark + 1 in self.arrived:
            self.watermark += 1
            self.arrived.discard(self.watermark)

    def map_above(self) -> int:
        """The map: bit i stands for ticket watermark + 1 + i."""
        bits = 0
        for sequence in self.arrived:
            ahead = sequence - self.watermark - 1
            if ahead < MAP_BITS:
                bits |= 1 << ahead
        return bits


class TicketLedger:
    """Tickets addressed to one instance and one life of its agent, by router. Times are the agent's monotonic clock."""

    __slots__ = ("_booking_ttl_ms", "_forget_ms", "_routers")

    def __init__(self, booking_ttl_ms: float = 2_000, forget_ms: float = 60_000):
        self._booking_ttl_ms = booking_ttl_ms
        self._forget_ms = forget_ms
        self._routers: dict[int, _RouterTickets] = {}

    def saw(self, router_id: int, sequence: int, now_ms: float) -> bool:
        """Note an arrived ticket, whichever call brought it; repeats are harmless.

        False: not a believable sequence (below 1, or more than ``MAX_AHEAD`` beyond the watermark of a known router).
        """
        router = self._routers.get(router_id)
        if sequence < 1 or (router is not None and sequence > router.watermark + MAX_AHEAD):
            return False
        if router is None:
            router = self._routers[router_id] = _RouterTickets(now_ms)
        router.heard_ms = now_ms
        if sequence > router.watermark:
            router.arrived.add(sequence)
        if sequence > router.highest:
            router.highest = sequence
            router.highs.append((sequence, now_ms))
        router.advance(now_ms - self._booking_ttl_ms)
        return True

    def report(self, now_ms: float) -> tuple[TicketsSeen, ...]:
        """What to tell the routers, by router id; routers unheard for ``forget_ms`` are dropped first."""
        for router_id in [i for i, r in self._routers.items() if now_ms - r.heard_ms > self._forget_ms]:
            del self._routers[router_id]
        seen = []
        for router_id, router in sorted(self._routers.items()):
            router.advance(now_ms - self._booking_ttl_ms)
            seen.append(TicketsSeen(router_id, router.watermark, router.map_above()))
        return tuple(seen)
