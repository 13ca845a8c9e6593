"""Tells a dead instance from a blind observer: when most of a pool vanishes at once, it is the observer that failed.

So the only member of a pool is never skipped for being unreachable: nobody else could take its work, and if it is dead
its lease ends within seconds. Of two, one may be.
"""

from __future__ import annotations

from collections.abc import Collection


class Reachability:
    """Who can be reached, as the collectors say, and when to stop believing them (design: three facts, not one)."""

    def __init__(self, lease_ms: float = 3_000.0) -> None:
        self._lease_ms = lease_ms
        self._turned_at_ms: dict[str, float] = {}
        self._disbelieved = False

    @property
    def disbelieved(self) -> bool:
        """Whether more than half of the pool turned unreachable within a lease, and more than half still is."""
        return self._disbelieved

    def say(self, instance_id: str, reachable: bool, now_ms: float) -> bool:
        """Take in what a collector said: whether it is news, after which all must be judged anew. O(1)."""
        known = instance_id not in self._turned_at_ms
        if reachable:
            self._turned_at_ms.pop(instance_id, None)
        else:
            self._turned_at_ms.setdefault(instance_id, now_ms)
        return known is not reachable

    def forget(self, instance_id: str) -> None:
        """The instance left."""
        self._turned_at_ms.pop(instance_id, None)

    def judge(self, pool: Collection[str], now_ms: float) -> bool:
        """Decide anew over the members of the pool; True when the answer to `disbelieved` changed to true now."""
        before = self._disbelieved
        half = len(pool) / 2
        unreachable = [at_ms for name, at_ms in self._turned_at_ms.items() if name in pool]
        lately = sum(now_ms - at_ms <= self._lease_ms for at_ms in unreachable)
        self._disbelieved = len(unreachable) > half and (before or lately > half)
        return self._disbelieved and not before

    def usable(self, instance_id: str) -> bool:
        """Whether new work may go there as far as reachability is concerned."""
        return self._disbelieved or instance_id not in self._turned_at_ms
