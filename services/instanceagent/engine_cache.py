"""What is known of one engine's cache: by its events where they are trusted, by belief elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.state import Tier
from dualmap.rpc.submission import Submission
from dualmap.runtime.clock import Clock
from dualmap.runtime.logs import get_log
from services.instanceagent.block_map import BlockMap, MapLimits
from services.instanceagent.engine import KvChange, KvCleared
from services.instanceagent.engine_metrics import InstanceEngineMetrics
from services.instanceagent.kv_wire import Batch
from services.instanceagent.learnt_scopes import ScopeBook
from services.instanceagent.modelled_index import Belief, ModelledIndex

BLOCKS_PER_DEVICE_BLOCK = 4
"""Engine blocks kept at most for each of the device's: host and remote tiers are larger."""

_log = get_log("engine_cache")


@dataclass(frozen=True, slots=True)
class CacheRules:
    """``block_tokens``: the ring's, asked whenever an index begins. ``tiers``: those whose blocks count as held."""

    block_tokens: Callable[[], int]
    tiers: frozenset[Tier] = frozenset(Tier)


class EngineCache:
    """Takes events (`EventSink`) and first tokens, tells changes. BYTES and CALLER chains are always a belief."""

    def __init__(
        self,
        scopes: ScopeBook,
        rules: CacheRules,
        metrics: InstanceEngineMetrics,
        clock: Clock,
        tell: Callable[[Sequence[KvChange]], None],
    ) -> None:
        self.scopes = scopes
        self.modelled = ModelledIndex(0)
        self.trusts_events = False
        """Whether the index of TOKENS chains is the engine's own word."""

        self.batches = 0
        self.heard = asyncio.Event()
        """Set with each batch; who waits clears it."""

        self._rules = rules
        self._metrics = metrics
        self._clock = clock
        self._tell = tell
        self._max_blocks = 1
        self._map = self._new_map()

    def resize(self, kv_tokens: int, engine_block_tokens: int) -> None:
        """The engine said how large its cache is; takes effect on what is new."""
        self.modelled.capacity_tokens = kv_tokens
        self._max_blocks = max(1, BLOCKS_PER_DEVICE_BLOCK * kv_tokens // engine_block_tokens)

    def begin_anew(self) -> None:
        """Forget all, and go by the ring's block size from now on."""
        self._map = self._new_map()
        self.modelled.clear()
        self._tell([KvCleared()])

    def _new_map(self) -> BlockMap:
        limits = MapLimits(max_blocks=self._max_blocks, tiers=self._rules.tiers)
        return BlockMap(self.scopes, self._rules.block_tokens(), self._metrics.kv_dropped, limits)

    def tier_by_events(self, block_hash: int) -> int:
        """Tier of a routing block as events have it, trusted or not; 0: not held."""
        return self._map.tier_of(block_hash)

    # Events

    def kv_batch(self, batch: Batch) -> None:
        """Events of the engine."""
        changes = self._map.apply(batch.events, self._clock.now_s())
        if not batch.partial:
            self.batches += 1
            self.heard.set()
            self._metrics.kv_applied(self._map.orphans)
        if any(isinstance(change, KvCleared) for change in changes):
            _log.info("engine_cleared_cache")
            self.modelled.clear()
        if self.trusts_events and changes:
            self._tell(changes)

    def kv_lost(self, reason: str) -> None:
        """Continuity cannot be shown."""
        self._metrics.kv_reset(reason)
        self.begin_anew()

    def kv_dropped(self, reason: str) -> None:
        """Left out of the index."""
        self._metrics.kv_dropped(reason)

    def kv_replayed(self, outcome: str) -> None:
        """A replay ended."""
        self._metrics.kv_replayed(outcome)

    # Requests

    def sent(self, submission: Submission) -> Belief | None:
        """A request goes to the engine; gives what is believed of it, None where events will tell."""
        message = submission.message
        self.scopes.learn(message.lora, message.cache_salt, submission.token_ids)
        if self.trusts_events and submission.chain.kind is ChainKind.TOKENS:
            return None
        return self.modelled.believe(submission.chain)

    def computed(self, chain: Chain) -> None:
        """The first token of a request with a belief is out: its prompt is cached now."""
        changes = self.modelled.fill(chain)
        if changes:
            self._tell(changes)

    def reported(self, belief: Belief, cached_tokens: int) -> None:
        """The engine said how much of a prompt it had."""
        changes = self.modelled.correct(belief, cached_tokens)
        if changes:
            self._tell(changes)
