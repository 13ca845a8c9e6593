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

Count = Callable[[str], None]
"""Told a reason each time something is left out."""


@dataclass(frozen=True, slots=True)
class MapLimits:
    """Bounds. ``tiers``: those worth indexing; a block whose worst tier is another one counts as not held."""

    max_blocks: int = 1_000_000
    max_orphans: int = 16_384
    orphan_ttl_s: float = 60.0
    tiers: frozenset[Tier] = frozenset(Tier)


class _RoutingBlock:
    """One block of ours on one path of engine blocks: held while ``missing`` of its parts is 0."""

    __slots__ = ("hash", "missing", "parts")

    def __init__(self, block_hash: int, parts: tuple[_Node, ...]) -> None:
        self.hash = block_hash
        self.parts = parts
        self.missing = sum(not part.media for part in parts)


class _Node:
    """An engine block. Resolved: ``chain`` is our hash up to the last boundary, ``tail`` the tokens after it.

    ``media`` is a bit for each medium that holds it. A node held nowhere stays while a child needs it.
    """

    __slots__ = (
        "chain", "children", "ends", "key", "leaves", "media", "parent", "parent_key", "resolved", "routing", "scope",
        "size", "tail",
    )  # fmt: skip

    def __init__(self, key: int, parent_key: int | None, token_ids: bytes, leaves: tuple[str, ...]) -> None:
        self.key = key
        self.parent_key = parent_key
        self.leaves = leaves
        self.tail = token_ids
        self.size = len(token_ids)
        self.media = 0
        self.children = 0
        self.resolved = False
        self.scope: Scope | None = None
        self.chain = 0
        self.parent: _Node | None = None
        self.routing: dict[_RoutingBlock, None] = {}
        self.ends: list[_RoutingBlock] = []


class _Entry:
    """All paths that end in one of our hashes, and the tier last told for it (0: none)."""

    __slots__ = ("blocks", "shown")

    def __init__(self) -> None:
        self.blocks: list[_RoutingBlock] = []
        self.shown = 0


class BlockMap:
    """Blocks of one engine and what they make of ours. Give it events in order; it gives changes of the index."""

    def __init__(self, scopes: ScopeBook, block_tokens: int, count: Count, limits: MapLimits | None = None) -> None:
        self._scopes = scopes
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._count = count
        self.limits = limits or MapLimits()
        self._media: dict[str, int] = {}
        self._media_tiers: list[Tier] = []
        self._start()

    def _start(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self._pending: dict[int, dict[int, _Node]] = {}
        self._orphans: OrderedDict[int, float] = OrderedDict()
        self._entries: dict[int, _Entry] = {}
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
        bit = self._bit(event.medium)
        step = event.block_tokens * TOKEN_BYTES
        parent_key = event.parent
        root_scope = self._root_scope(event) if parent_key is None else None
        for number, key in enumerate(event.hashes):
            node = self._nodes.get(key)
            if node is None:
                if len(self._nodes) >= self.limits.max_blocks:
                    self._count("too_many_blocks")
                    return
                leaves = event.extra_keys[number] if number < len(event.extra_keys) else ()
                node = _Node(key, parent_key, event.token_ids[number * step : (number + 1) * step], leaves)
                self._nodes[key] = node
                self._place(node, root_scope, now_s)
            self._hold(node, node.media | bit)
            parent_key = key

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

    def _place(self, node: _Node, root_scope: Scope | None, now_s: float) -> None:
        """Give a new node its place under its parent, or file it until that one shows up."""
        if node.parent_key is None:
            chain = root_scope.root if root_scope is not None else 0
            self._resolve(node, None, root_scope, chain)
            return
        parent = self._nodes.get(node.parent_key)
        if parent is not None and parent.resolved:
            self._resolve(node, parent, self._scope_under(parent, node), parent.chain)
            return
        self._pending.setdefault(node.parent_key, {})[node.key] = node
        self._orphans[node.key] = now_s
        if len(self._orphans) > self.limits.max_orphans:
            self._count("too_many_orphans")
            self._forget_orphan(next(iter(self._orphans)))

    def _scope_under(self, parent: _Node, child: _Node) -> Scope | None:
        scope = parent.scope
        if scope is not None and child.leaves and not scope.covers(child.leaves):
            self._count("extra_keys_unmatched")
            return None
        return scope

    def _resolve(self, first: _Node, parent: _Node | None, scope: Scope | None, chain: int) -> None:
        """Compute a node's chain, and then those of all that waited for it."""
        todo = [(first, parent, scope, chain)]
        while todo:
            node, parent, scope, chain = todo.pop()
            node.resolved = True
            node.scope = scope
            node.leaves = ()
            node.parent = parent
            tail = b""
            if parent is not None:
                parent.children += 1
                tail = parent.tail
            self._extend(node, chain, tail)
            for child in self._pending.pop(node.key, {}).values():
                del self._orphans[child.key]
                todo.append((child, node, self._scope_under(node, child), node.chain))

    def _extend(self, node: _Node, chain: int, tail: bytes) -> None:
        """Make the routing blocks that end in this node."""
        if node.scope is None:
            node.tail = b""
            return
        size = self._block_bytes
        data = tail + node.tail
        start = 0
        while len(data) - start >= size:
            chain = xxh3_64_intdigest(chain.to_bytes(8, "little") + data[start : start + size])
            # Only the first block of several can begin before this node.
            parts = (node, *_ancestors(node, len(tail))) if start == 0 else (node,)
            block = _RoutingBlock(chain, parts)
            node.ends.append(block)
            for part in parts:
                part.routing[block] = None
            self._entries.setdefault(chain, _Entry()).blocks.append(block)
            self._dirty[chain] = None
            start += size
        node.chain = chain
        node.tail = data[start:]

    def _hold(self, node: _Node, media: int) -> None:
        before, node.media = node.media, media
        if before == media:
            return
        step = bool(before) - bool(media)
        for block in node.routing:
            block.missing += step
            self._dirty[block.hash] = None

    # Removing

    def _remove(self, event: BlocksRemoved) -> None:
        if event.group not in (None, 0):
            return
        kept = 0 if event.medium is None else ~self._bit(event.medium)
        for key in event.hashes:
            node = self._nodes.get(key)
            if node is None:
                continue
            self._hold(node, node.media & kept)
            self._prune(node)

    def _prune(self, node: _Node | None) -> None:
        """Drop a node held nowhere and needed by no child, and then its parent likewise."""
        while node is not None and not node.media and not node.children:
            if not node.resolved:
                self._forget_orphan(node.key)
                return
            del self._nodes[node.key]
            for block in node.ends:
                for part in block.parts:
                    del part.routing[block]
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

    def _tier(self, entry: _Entry) -> int:
        """The best of the paths; of one path the worst of its parts."""
        whole = [max(self._tier_of(part) for part in block.parts) for block in entry.blocks if not block.missing]
        tier = min(whole, default=0)
        return tier if tier in self.limits.tiers else 0

    def _tier_of(self, node: _Node) -> int:
        media, tiers = node.media, self._media_tiers
        return min(tiers[bit] for bit in range(len(tiers)) if media >> bit & 1)

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


def _ancestors(node: _Node, tail_bytes: int) -> Iterator[_Node]:
    """The nodes that hold the last ``tail_bytes`` before this one, nearest first."""
    parent = node.parent
    while tail_bytes > 0 and parent is not None:
        yield parent
        tail_bytes -= parent.size
        parent = parent.parent
