"""A copy of one agent's index, kept only to catch an agent whose changes do not lead to the digest it claims."""

from __future__ import annotations

from dualmap.core.kv_index import KvIndex
from dualmap.core.state import KvSnapshot, StateUpdate


class CheckedIndex:
    """The index at a version. Lost with the process without harm: a whole state brings it back."""

    def __init__(self, update: StateUpdate) -> None:
        """From a whole update. Raises InvalidRequest for a snapshot that is none."""
        self._index = KvIndex()
        self._index.replace(update.snapshot or KvSnapshot())
        self.version = update.version

    @property
    def digest(self) -> int:
        """Digest of what was really told."""
        return self._index.digest

    @property
    def blocks(self) -> int:
        """Blocks of what was really told."""
        return len(self._index)

    def agrees(self, update: StateUpdate) -> bool:
        """Whether digest and number of blocks are those that the update claims."""
        return update.kv_digest == self.digest and update.kv_blocks == self.blocks

    def advance(self, update: StateUpdate) -> bool:
        """Apply changes that start at or before this version; False when they do not lead where the agent says."""
        self._index.apply(update.changes)
        if update.version < self.version:
            return True
        self.version = update.version
        return self.agrees(update)
