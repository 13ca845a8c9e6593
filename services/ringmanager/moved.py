"""How many pairs a change of the ring moves. Rings of a thousand instances take a third of a second: few are built.

Used from threads: whoever asks while one builds waits for that ring instead of building it again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from dualmap.core.membership import Member, RingParameters
from dualmap.core.ring import Ring, moved_share, pair_shares

_RINGS_KEPT = 2
"""The ring before a change and the one after it, which is before the next."""

_Owners = tuple[tuple[str, float], ...]


class MovedShares:
    """Shares of pairs, 0 to 1, measured on sampled keys."""

    def __init__(self, parameters: RingParameters) -> None:
        self._parameters = parameters
        self._lock = threading.Lock()
        self._rings: OrderedDict[_Owners, Ring] = OrderedDict()
        self._shares: tuple[_Owners, dict[str, float]] = ((), {})

    def between(self, before: tuple[Member, ...], after: tuple[Member, ...]) -> float:
        """Pairs that differ."""
        with self._lock:
            return moved_share(self._ring(before), self._ring(after))

    def without(self, members: tuple[Member, ...], instance_id: str) -> float:
        """Pairs that change when this one alone leaves: exactly those that it is in."""
        owners = _owners(members)
        with self._lock:
            if self._shares[0] != owners:
                self._shares = owners, pair_shares(self._ring(members))
            return self._shares[1].get(instance_id, 0.0)

    def _ring(self, members: tuple[Member, ...]) -> Ring:
        owners = _owners(members)
        ring = self._rings.get(owners)
        if ring is None:
            ring = self._rings[owners] = Ring.build(members, self._parameters)
        self._rings.move_to_end(owners)
        while len(self._rings) > _RINGS_KEPT:
            self._rings.popitem(last=False)
        return ring


def _owners(members: tuple[Member, ...]) -> _Owners:
    return tuple(sorted((member.instance_id, member.weight) for member in members if member.state.on_ring))
