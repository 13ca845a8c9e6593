"""Every Redis key of DualMap and the bounds of what they hold. No other module spells a key."""

from __future__ import annotations

import re
from dataclasses import dataclass

import xxhash

SHARDS = 8
"""State shards of a pool. Fixed: all processes must agree."""

SHARD_STREAM_ENTRIES = 4_096
"""Entries a shard stream holds at least: about 100 s of 4 instances at 10 polls a second."""

ENTRIES_AN_INSTANCE = 32
"""For each instance of a large pool: at 10 polls a second a packed index is then rewritten each 13 s, not oftener for
having more neighbours. With 1,000 instances it would be each 1.6 s."""

RING_STREAM_ENTRIES = 256
"""Epoch entries kept: a follower needs only to learn that a newer one exists."""

_POOL_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class PoolKeys:
    """Key names of one pool. Keys that a script touches together share one hash tag.

    Raises ValueError for a pool name that is not 1 to 64 of letters, digits, dot, underscore, hyphen.
    """

    pool: str

    def __post_init__(self) -> None:
        if not _POOL_NAME.fullmatch(self.pool):
            raise ValueError(f"pool name {self.pool!r}: 1 to 64 letters, digits, '.', '_' or '-'")

    @property
    def _ring_tag(self) -> str:
        return f"{{dm:{self.pool}:ring}}"

    def _shard_tag(self, shard: int) -> str:
        return f"{{dm:{self.pool}:s{shard}}}"

    @property
    def ring(self) -> str:
        """Hash: the ring now (epoch, fencing_epoch, published_at_ms, snapshot)."""
        return f"{self._ring_tag}:ring"

    @property
    def epochs(self) -> str:
        """Stream: one entry for each epoch published."""
        return f"{self._ring_tag}:epochs"

    def lease(self, name: str) -> str:
        """String with a time to live: holder of a leadership."""
        return f"{self._ring_tag}:lease:{name}"

    def fence(self, name: str) -> str:
        """String: highest fencing epoch given with that leadership. Never expires."""
        return f"{self._ring_tag}:fence:{name}"

    @property
    def collectors(self) -> str:
        """Sorted set: live collectors by the end of their registration, in milliseconds of the server's clock."""
        return f"{self._ring_tag}:collectors"

    def state(self, instance_id: str) -> str:
        """Hash: state of one instance."""
        return f"{self._shard_tag(shard_of(instance_id))}:instance:{instance_id}"

    def stream(self, shard: int) -> str:
        """Stream: changes of all instances of a shard."""
        return f"{self._shard_tag(shard)}:stream"

    def added(self, shard: int) -> str:
        """String: entries ever added to the shard's stream, to tell how far a snapshot lies behind."""
        return f"{self._shard_tag(shard)}:added"

    def instances(self, shard: int) -> str:
        """Set: instances of the shard that have a state."""
        return f"{self._shard_tag(shard)}:instances"


def shard_of(instance_id: str) -> int:
    """Shard that holds an instance's state."""
    return xxhash.xxh3_64_intdigest(instance_id.encode()) % SHARDS
