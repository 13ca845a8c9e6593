"""How much an engine gets at a time: enough to stay busy, the rest waits where it can be reordered and moved."""

from __future__ import annotations

import sys
from dataclasses import dataclass

UNBOUNDED = sys.maxsize
"""Room of an engine that prefills nothing: a request of any size may enter."""


@dataclass(frozen=True, slots=True)
class FeedRule:
    """Limits on what is released to the engine: uncached prefill tokens and sequences (design: feed)."""

    feed_tokens: int = 8_192
    max_sequences: int = 256
    block_tokens: int = 128

    def charge(self, miss_tokens: int) -> int:
        """Tokens a request counts for while staged: its miss, but at least one routing block."""
        return max(self.block_tokens, miss_tokens)

    def room_tokens(self, staged_tokens: int, staged: int, running: int) -> int:
        """Largest charge that may be released now; UNBOUNDED when nothing prefills, 0 when nothing may.

        ``staged`` is released and not yet past its first token, ``staged_tokens`` the sum of their charges,
        ``running`` those past it.
        """
        if staged + running >= self.max_sequences:
            return 0
        if staged == 0:
            return UNBOUNDED
        return max(0, self.feed_tokens - staged_tokens)

    def admits(self, miss_tokens: int, staged_tokens: int, staged: int, running: int) -> bool:
        """Whether a request of ``miss_tokens`` uncached tokens may be released now."""
        return self.charge(miss_tokens) <= self.room_tokens(staged_tokens, staged, running)
