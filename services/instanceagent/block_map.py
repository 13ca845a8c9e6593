"""From an engine's blocks to ours: chains rebuilt from token ids, held where every overlapping engine block is held.

One map for one KV cache. It knows no socket and no clock; it reproduces no engine hash and guesses no parent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from dualmap.core.blocks import TOKEN_BYTES
from dualmap.core.state import Tier
from services.instanceagent.block_nodes import Entry, Node, RoutingBlock, ancestors
from services.instanceagent.engine import KvChange, KvCleared, KvRemoved, KvStored
from services.instanceagent.kv_wire import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from services.instanceagent.learnt_scopes import Scope, ScopeBook, Unmatched

MEDIA = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "CPU_TIER2": Tier.HOST,
    "FS": Tier.REMOTE,
    "OBJ": Tier.REMOTE,
    "DISK": Tier.REMOTE,
    "EXTERNAL": Tier.REMOTE,
    "STORAGE": Tier.REMOTE,
}
"""Media that engines name; another one is taken for remote."""

MAX_MEDIA = 16
OTHER_MEDIUM = "other"
_PARTIAL_KINDS = ("sliding", "mamba", "chunked", "cross", "linear")
"""Cache groups that keep a window or a state, not the whole prefix: they say nothing about prefix hits."""

MAX_GROUPS = 64

Count = Callable[[str], None]
"""Told a reason each time something is left out."""


@dataclass(frozen=True, slots=True)
class MapLimits:
    """Bounds. ``tiers``: those worth indexing; a block whose worst tier is another one counts as not held."""

    max_blocks: int = 1_000_000
    max_orphans: int = 16_384
    orphan_ttl_s: float = 60.0
    tiers: frozenset[Tier] = frozenset(Tier)


class BlockMap:
    """Blocks of one engine and what they make of ours. Give it events in order; it gives changes of the index."""

    def __init__(self, scopes: ScopeBook, block_tokens: int, count: Count, limits: MapLimits | None = None) -> None:
        self._scopes = scopes
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._count = count
        self.limits = limits or MapLimits()
        self._media: dict[str, int] = {}
        self._media_tiers: list[Tier] = []
        self._fastest: dict[int, int] = {}
        self._groups: set[int] = set()
        self._start()

    def _start(self) -> None:
        self._nodes: dict[int, Node] = {}
        self._pending: dict[int, dict[int, Node]] = {}
        self._orphans: OrderedDict[int, float] = OrderedDict()
        self._entries: dict[int, Entry] = {}
        self._dirty: dict[int, None] = {}

    def __len__(self) -> int:
        """Engine blocks known, with those held nowhere that a child still needs."""
        return len(self._nodes)

    @property
    def orphans(self) -> int:
        """Engine blocks whose parent is not known yet."""
        return len(self._orphans)

    def tier_of(self, block_hash: int) -> int:
        """Tier of a routing block as last told, 0: not held."""
        entry = self._entries.get(block_hash)
        return entry.shown if entry is not None else 0

    def apply(self, events: Sequence[KvEvent], now_s: float) -> list[KvChange]:
        """Events of one batch in order; gives what changed. O(tokens stored + blocks removed)."""
        changes: list[KvChange] = []
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event, now_s)
                case BlocksRemoved():
                    self._remove(event)
                case AllCleared():
                    self._start()
                    changes = [KvCleared()]
        self._expire(now_s)
        changes.extend(self._told())
        return changes

    def clear(self) -> list[KvChange]:
        """Forget everything: continuity cannot be shown."""
        self._start()
        return [KvCleared()]

    # Storing

    def _store(self, event: BlocksStored, now_s: float) -> None:
        if not self._indexed_group(event):
            self._count("other_cache_group")
            return
        if event.group is not None and len(self._groups) < MAX_GROUPS:
            self._groups.add(event.group)
        bit = self._bit(event.medium)
        step = event.block_tokens * TOKEN_BYTES
        nodes = self._nodes
        above_key = event.parent
        above = nodes.get(above_key) if above_key is not None else None
        root_scope = self._root_scope(event) if above_key is None else None
        start = 0
        for number, key in enumerate(event.hashes):
            node = nodes.get(key)
            if node is None:
                if len(nodes) >= self.limits.max_blocks:
                    self._count("too_many_blocks")
                    return
                leaves = event.extra_keys[number] if number < len(event.extra_keys) else ()
                node = nodes[key] = Node(key, above_key, event.token_ids[start : start + step], leaves)
                self._place(node, above, root_scope, now_s)
            if not node.media & bit:
                self._hold(node, node.media | bit)
            above, above_key = node, key
            start += step

    @staticmethod
    def _indexed_group(event: BlocksStored) -> bool:
        if event.spec_kind:
            kind = event.spec_kind.lower()
            return not any(partial in kind for partial in _PARTIAL_KINDS)
        return event.group in (None, 0)

    def _root_scope(self, event: BlocksStored) -> Scope | None:
        try:
            return self._scopes.of_root(event)
        except Unmatched as unmatched:
            self._count(unmatched.reason)
            return None

    def _place(self, node: Node, parent: Node | None, root_scope: Scope | None, now_s: float) -> None:
        """Give a new node its place under its parent, or file it until that one shows up."""
        if node.parent_key is None:
            self._resolve(node, None, root_scope)
        elif parent is not None and parent.resolved:
            self._resolve(node, parent, self._scope_under(parent, node))
        else:
            self._pending.setdefault(node.parent_key, {})[node.key] = node
            self._orphans[node.key] = now_s
            if len(self._orphans) > self.limits.max_orphans:
                self._count("too_many_orphans")
                self._forget_orphan(next(iter(self._orphans)))

    def _scope_under(self, parent: Node, child: Node) -> Scope | None:
        scope = parent.scope
        if scope is not None and child.leaves and not scope.covers(child.leaves):
            self._count("extra_keys_unmatched")
            return None
        return scope

    def _resolve(self, node: Node, parent: Node | None, scope: Scope | None) -> None:
        """Compute a node's chain, and then those of all that waited for it."""
        self._extend(node, parent, scope)
        if node.key not in self._pending:
            return
        todo = [node]
        while todo:
            above = todo.pop()
            for child in self._pending.pop(above.key, {}).values():
                del self._orphans[child.key]
                self._extend(child, above, self._scope_under(above, child))
                todo.append(child)

    def _extend(self, node: Node, parent: Node | None, scope: Scope | None) -> None:
        """Put a node under its parent and make the routing blocks that end in it."""
        node.resolved = True
        node.scope = scope
        node.leaves = ()
        data = node.tail
        chain = scope.root if scope is not None else 0
        before = 0
        if parent is not None:
            node.parent = parent
            parent.children += 1
            chain = parent.chain
            before = len(parent.tail)
            data = parent.tail + data
        if scope is None:
            node.tail = b""
            return
        size = self._block_bytes
        start = 0
        while len(data) - start >= size:
            chain = xxh3_64_intdigest(chain.to_bytes(8, "little") + data[start : start + size])
            # Only the first block of several can begin before this node.
            self._end(chain, (node, *ancestors(node, before)) if start == 0 else (node,))
            start += size
        node.chain = chain
        node.tail = data[start:] if start else data

    def _end(self, chain: int, parts: tuple[Node, ...]) -> None:
        """A routing block ends in the first of these nodes."""
        block = RoutingBlock(chain, parts)
        parts[0].ends += (block,)
        for part in parts:
            part.link(block)
        entry = self._entries.get(chain)
        if entry is None:
            entry = self._entries[chain] = Entry()
        entry.blocks.append(block)
        self._dirty[chain] = None

    def _hold(self, node: Node, media: int) -> None:
        step = bool(node.media) - bool(media)
        node.media = media
        for block in node.routing:
            block.missing += step
            self._dirty[block.hash] = None

    # Removing

    def _remove(self, event: BlocksRemoved) -> None:
        if event.group is not None and event.group not in self._groups:
            return
        kept = 0 if event.medium is None else ~self._bit(event.medium)
        for key in event.hashes:
            node = self._nodes.get(key)
            if node is None:
                continue
            if node.media & ~kept:
                self._hold(node, node.media & kept)
            self._prune(node)

    def _prune(self, node: Node | None) -> None:
        """Drop a node held nowhere and needed by no child, and then its parent likewise."""
        while node is not None and not node.media and not node.children:
            if not node.resolved:
                self._forget_orphan(node.key)
                return
            del self._nodes[node.key]
            for block in node.ends:
                for part in block.parts:
                    part.unlink(block)
                self._entries[block.hash].blocks.remove(block)
                self._dirty[block.hash] = None
            parent = node.parent
            if parent is not None:
                parent.children -= 1
            node = parent

    # Orphans

    def _forget_orphan(self, key: int) -> None:
        del self._orphans[key]
        node = self._nodes.pop(key)
        if node.parent_key is not None:
            siblings = self._pending[node.parent_key]
            del siblings[key]
            if not siblings:
                del self._pending[node.parent_key]

    def _expire(self, now_s: float) -> None:
        while self._orphans:
            key, filed_s = next(iter(self._orphans.items()))
            if now_s - filed_s < self.limits.orphan_ttl_s:
                return
            self._count("orphan_expired")
            self._forget_orphan(key)

    # Telling

    def _told(self) -> Iterator[KvChange]:
        removed: list[int] = []
        stored: dict[Tier, list[int]] = {}
        for block_hash in self._dirty:
            entry = self._entries[block_hash]
            tier = self._tier(entry)
            if not entry.blocks:
                del self._entries[block_hash]
            if tier == entry.shown:
                continue
            entry.shown = tier
            if tier:
                stored.setdefault(Tier(tier), []).append(block_hash)
            else:
                removed.append(block_hash)
        self._dirty = {}
        if removed:
            yield KvRemoved(removed)
        for tier_held, hashes in stored.items():
            yield KvStored(hashes, tier_held)

    def _tier(self, entry: Entry) -> int:
        """The best of the paths; of one path the worst of its parts."""
        best = 0
        for block in entry.blocks:
            if block.missing:
                continue
            tier = max([self._tier_of(media) for media in {part.media for part in block.parts}])
            best = min(best, tier) if best else tier
        return best if best in self.limits.tiers else 0

    def _tier_of(self, media: int) -> int:
        """The fastest of some media, given as bits."""
        tier = self._fastest.get(media)
        if tier is None:
            tiers = self._media_tiers
            tier = self._fastest[media] = min(tiers[bit] for bit in range(len(tiers)) if media >> bit & 1)
        return tier

    def _bit(self, medium: str | None) -> int:
        name = "GPU" if medium is None else medium.upper()
        bit = self._media.get(name)
        if bit is None:
            if name not in MEDIA:
                self._count("unknown_medium")
                if len(self._media_tiers) >= MAX_MEDIA:
                    name = OTHER_MEDIUM
            bit = self._media.setdefault(name, 1 << len(self._media_tiers))
            if bit == 1 << len(self._media_tiers):
                self._media_tiers.append(MEDIA.get(name, Tier.REMOTE))
        return bit
