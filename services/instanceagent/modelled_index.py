"""What an engine that tells nothing is believed to hold: an LRU of its capacity, filled by what was sent to it.

It is a belief: corrected by the cached tokens that the engine reports, and marked as modelled wherever it travels.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dualmap.core.blocks import Chain
from dualmap.core.state import Tier
from services.instanceagent.engine import KvChange, KvRemoved, KvStored

SLACK_BLOCKS = 1
"""Engines count hits in blocks of their own and always compute the last token."""


@dataclass(frozen=True, slots=True)
class Belief:
    """What was believed held of a chain when its request was sent: when each leading block was last used."""

    block_tokens: int
    used_at: tuple[int, ...]


class ModelledIndex:
    """Blocks by last use, the oldest first. ``capacity_tokens`` may change; the next fill goes by it."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._blocks: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._tokens = 0
        self._now = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def believe(self, chain: Chain) -> Belief:
        """What is held of the chain now; changes nothing. O(blocks held)."""
        used_at: list[int] = []
        for block in chain.hashes:
            held = self._blocks.get(block)
            if held is None:
                break
            used_at.append(held[0])
        return Belief(chain.block_tokens, tuple(used_at))

    def fill(self, chain: Chain) -> list[KvChange]:
        """The engine has computed this prompt. O(blocks)."""
        stored: list[int] = []
        # Leaf to root, so that a parent is never older than its child.
        for block in reversed(chain.hashes):
            self._now += 1
            if self._blocks.pop(block, None) is None:
                stored.append(block)
                self._tokens += chain.block_tokens
            self._blocks[block] = (self._now, chain.block_tokens)
        removed = []
        while self._tokens > self.capacity_tokens and self._blocks:
            removed.append(self._drop_oldest())
        stored.reverse()
        gone = frozenset(removed)
        changes: list[KvChange] = [KvRemoved(removed)] if removed else []
        kept = [block for block in stored if block not in gone]
        return [*changes, KvStored(kept, Tier.DEVICE)] if kept else changes

    def correct(self, belief: Belief, cached_tokens: int) -> list[KvChange]:
        """The engine found ``cached_tokens``: where more was believed, all as old as the missing is gone too."""
        held = cached_tokens // belief.block_tokens
        if len(belief.used_at) - held <= SLACK_BLOCKS:
            return []
        missing_at = belief.used_at[held]
        removed = []
        while self._blocks and next(iter(self._blocks.values()))[0] <= missing_at:
            removed.append(self._drop_oldest())
        return [KvRemoved(removed)] if removed else []

    def clear(self) -> None:
        """Believe nothing."""
        self._blocks.clear()
        self._tokens = 0

    def _drop_oldest(self) -> int:
        block, (_, tokens) = self._blocks.popitem(last=False)
        self._tokens -= tokens
        return block
