"""The last ring in a small local file, so that a router can start when Redis does not answer. Written whole, atomically."""

from __future__ import annotations

import os
from pathlib import Path

from dualmap.core.membership import RingSnapshot
from dualmap.runtime.logs import get_log
from dualmap.store.packing import UnreadableValueError, pack_ring, unpack_ring

_log = get_log("ring_file")


class RingFile:
    """One router's file; two routers must not share one."""

    def __init__(self, path: Path, pool: str) -> None:
        self._path = path
        self._pool = pool
        self._saved_epoch = 0

    def load(self) -> RingSnapshot | None:
        """The ring saved last, without its grace period; None when there is no readable one of this pool."""
        try:
            # How long ago it was saved is not known, so its grace period is over.
            ring = unpack_ring(self._path.read_bytes(), age_ms=1 << 62)
        except FileNotFoundError:
            return None
        except (OSError, UnreadableValueError) as error:
            _log.warning("ring_file_unreadable", path=str(self._path), error=type(error).__name__)
            return None
        if ring.pool != self._pool:
            _log.warning("ring_file_of_another_pool", path=str(self._path), pool=ring.pool)
            return None
        self._saved_epoch = ring.epoch
        return ring

    def save(self, ring: RingSnapshot) -> bool:
        """Save a ring whose epoch is not the saved one; False when nothing was to do. Raises OSError. Blocks."""
        if ring.epoch == self._saved_epoch:
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        fresh.write_bytes(pack_ring(ring))
        fresh.replace(self._path)
        self._saved_epoch = ring.epoch
        return True
