"""The last ring on the local disk, so that a router can start while Redis is away. Holds no prompt and no secret."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dualmap.core.membership import RingSnapshot
from dualmap.store.packing import UnreadableValueError, pack_ring, unpack_ring

_GRACE_IS_OVER_MS = 2**62


class RingFile:
    """One file, replaced as a whole: a reader never sees half of it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, ring: RingSnapshot) -> None:
        """Write the ring in place of the last one. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pack_ring(ring))
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def load(self, pool: str) -> RingSnapshot | None:
        """The ring of the pool without a grace period, None when there is no file.

        Raises UnreadableValueError for a damaged file or another pool's, OSError when it cannot be read.
        """
        try:
            packed = self.path.read_bytes()
        except FileNotFoundError:
            return None
        ring = unpack_ring(packed, age_ms=_GRACE_IS_OVER_MS)
        if ring.pool != pool:
            raise UnreadableValueError(f"the ring file is of pool {ring.pool!r}, not {pool!r}")
        return ring
