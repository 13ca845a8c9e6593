"""Which rebalancer is listened to: the one of the highest fencing epoch heard lately. Knows no lease."""

from __future__ import annotations

from dualmap.core.errors import StaleLeader

FENCE_MS = 60_000.0
"""How long a lower epoch is refused after a higher one spoke: twenty leases, and thirty times what a list lasts.

Not for ever, or one wrong epoch far above all that leases give would lock every true leader out.
"""


class Fence:
    """The highest epoch heard; times are monotonic milliseconds."""

    def __init__(self) -> None:
        self._epoch = 0
        self._heard_ms = 0.0

    def pass_in(self, epoch: int, now_ms: float) -> None:
        """Take an order's epoch; 0 is an operator's and fences nobody. Raises StaleLeader."""
        if not epoch:
            return
        if epoch < self._epoch and now_ms - self._heard_ms < FENCE_MS:
            raise StaleLeader(epoch, self._epoch)
        self._epoch = epoch
        self._heard_ms = now_ms
