"""Which prefixes are too hot for one pair: a bounded, decayed radix tree over sampled chains (design §9).

It is told time and samples and answers with a split table; it neither samples nor publishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dualmap.core.membership import Split

_RESCALE_HALF_LIVES = 512.0
"""Weights grow by 2 each half-life instead of all shrinking; a double holds 2^1023."""

_COLLECTING_TOLERANCE = 0.9
"""Samples fade while they are collected: 20 of them over 9 s weigh 19."""


@dataclass(frozen=True, slots=True)
class HeatOptions:
    """Bounds and thresholds; shares are of all observed weight, n is the number of ACTIVE instances."""

    max_nodes: int = 65_536
    """Blocks remembered at most."""
    half_life_s: float = 60.0
    dwell_s: float = 300.0
    """A split is not merged before this age, nor a merged prefix split again freely."""
    min_samples: int = 20
    """On Conversation with a cold tree, attainment was 0.98 at 20 and 0.35 to 0.56 at 200."""
    split_above: float = 2.0
    """Split where the share exceeds this / n."""
    merge_below: float = 1.0
    """Merge where the share falls below this / n."""
    children_above: float = 0.25
    """A node may have children while its share exceeds this / n."""
    look_blocks: int = 64
    """Blocks beyond the present key that a sample shows."""
    rekey_share_per_minute: float = 0.1
    """Traffic that merges and repeated splits may re-key a minute."""
    weigh_by: Literal["requests", "miss_tokens"] = "requests"


class _Node:
    """A run of blocks that every remembered request below shares, and the branches after it."""

    __slots__ = ("children", "depth", "parent", "run", "samples", "weight")

    def __init__(self, parent: _Node | None, depth: int, run: list[int]):
        self.parent = parent
        self.depth = depth
        self.run = run
        self.children: dict[int, _Node] = {}
        self.weight = 0.0
        self.samples = 0.0

    @property
    def end(self) -> int:
        """Depth in blocks of the last block of the run."""
        return self.depth + len(self.run) - 1


@dataclass(slots=True)
class _Entry:
    split: Split
    since_s: float


class HeatTree:
    """Heat of one pool's prefixes and the split table that follows from it. Times are one monotonic clock's seconds."""

    def __init__(self, options: HeatOptions | None = None):
        self.options = options or HeatOptions()
        self._roots: dict[int, _Node] = {}
        self._where: dict[int, _Node] = {}
        self._total = 0.0
        self._n_active = 1
        self._scale_from_s: float | None = None
        self._entries: dict[int, _Entry] = {}
        self._merged_s: dict[int, float] = {}
        # (when, share) of what was re-keyed in the last minute.
        self._rekeyed: list[tuple[float, float]] = []

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._where)

    def share(self, prefix: int) -> float:
        """Share of the observed weight whose chain holds this prefix; 0 where it is not remembered."""
        node = self._where.get(prefix)
        return node.weight / self._total if node is not None and self._total else 0.0

    def observe(self, hashes: Sequence[int], first_depth: int, requests: int, miss_tokens: int, now_s: float) -> None:
        """Count one sample: the chain from its first shown depth on, root side first, and what it stands for.

        A first hash already remembered counts for all its ancestors too (hashes are cumulative). O(hashes).
        """
        if not hashes:
            return
        scale = self._scale(now_s)
        weight = scale * (max(requests, 1) if self.options.weigh_by == "requests" else max(miss_tokens, 0))
        self._total += weight
        node = self._where.get(hashes[0])
        if node is None:
            node = self._roots[hashes[0]] = _Node(None, first_depth, [hashes[0]])
            self._where[hashes[0]] = node
        ancestor = node.parent
        while ancestor is not None:
            ancestor.weight += weight
            ancestor.samples += scale
            ancestor = ancestor.parent
        self._descend(node, node.run.index(hashes[0]), hashes, weight, scale)
        if len(self._where) > self.options.max_nodes:
            self._prune()

    def plan(self, n_active: int, now_s: float) -> tuple[Split, ...]:
        """The split table as it should now be, for ``n_active`` instances.

        Hot prefixes are split at once, each branch to its own depth; merges wait for the dwell and, like a split
        repeated within it, for the re-key allowance.
        """
        self._n_active = max(n_active, 1)
        self._scale(now_s)
        self._rekeyed = [(at_s, share) for at_s, share in self._rekeyed if now_s - at_s < 60.0]
        if self._total:
            self._merge(now_s)
            pending = [(node, node.depth, node.run[0]) for node in self._roots.values()]
            while pending:
                node, depth, prefix = pending.pop()
                pending += self._split(node, depth, prefix, now_s)
        return tuple(sorted((e.split for e in self._entries.values()), key=lambda split: (split.depth, split.prefix)))

    def adopt(self, splits: Iterable[Split], now_s: float) -> None:
        """Take over offered splits not known here, for a full dwell at least; those that lead nowhere are left out."""
        for split in splits:
            if 0 < split.depth < split.next_depth and split.prefix not in self._entries:
                self._entries[split.prefix] = _Entry(split, now_s)

    def _descend(self, node: _Node, offset: int, hashes: Sequence[int], weight: float, scale: float) -> None:
        position = 0
        while True:
            node.weight += weight
            node.samples += scale
            run = node.run
            while offset < len(run) and position < len(hashes) and run[offset] == hashes[position]:
                offset += 1
                position += 1
            if position == len(hashes):
                if offset < len(run) and self._may_branch(node):
                    # It ends inside the run: the rest is the longer chains' alone.
                    self._cut(node, offset, weight, scale)
                return
            if offset < len(run):
                # The sample leaves inside the run: the rest of it is a branch, or too cold to be remembered.
                if self._may_branch(node):
                    self._cut(node, offset, weight, scale)
                else:
                    self._forget_below(node, offset)
            child = node.children.get(hashes[position])
            if child is None:
                if self._may_branch(node):
                    self._grow(node, hashes[position:], weight, scale)
                return
            node, offset = child, 0

    def _may_branch(self, node: _Node) -> bool:
        return node.weight * self._n_active > self.options.children_above * self._total

    def _cut(self, node: _Node, offset: int, weight: float, scale: float) -> None:
        """Make the run from ``offset`` on a child; the sample just counted is not part of it."""
        lower = _Node(node, node.depth + offset, node.run[offset:])
        lower.weight = max(node.weight - weight, 0.0)
        lower.samples = max(node.samples - scale, 0.0)
        lower.children = node.children
        for child in lower.children.values():
            child.parent = lower
        for block in lower.run:
            self._where[block] = lower
        del node.run[offset:]
        node.children = {lower.run[0]: lower}

    def _grow(self, node: _Node, rest: Sequence[int], weight: float, scale: float) -> None:
        """A new branch, as long as the sample while there is room: divergence shortens it later."""
        room = len(self._where) + len(rest) <= self.options.max_nodes // 2
        child = _Node(node, node.end + 1, [])
        for block in rest if room else rest[:1]:
            if block in self._where:
                break
            child.run.append(block)
            self._where[block] = child
        if child.run:
            child.weight, child.samples = weight, scale
            node.children[rest[0]] = child
        else:
            self._attach(node, rest[0], weight, scale)

    def _attach(self, node: _Node, block: int, weight: float, scale: float) -> None:
        """The next block was first seen at the head of other samples: now its place is known."""
        orphan = self._roots.get(block)
        # Depth rises along every path: hashes that are not cumulative can build no loop.
        if orphan is None or orphan.depth != node.end + 1:
            return
        del self._roots[block]
        ancestor: _Node | None = node
        while ancestor is not None:
            ancestor.weight += orphan.weight
            ancestor.samples += orphan.samples
            ancestor = ancestor.parent
        orphan.parent = node
        orphan.weight += weight
        orphan.samples += scale
        node.children[block] = orphan

    def _forget_below(self, node: _Node, offset: int) -> None:
        for block in node.run[offset:]:
            del self._where[block]
        del node.run[offset:]
        for child in node.children.values():
            for gone in _subtree(child):
                for block in gone.run:
                    del self._where[block]
        node.children = {}

    def _prune(self) -> None:
        """Down to a quarter of the bound: first what hangs below cold nodes, then the coldest leaves."""
        for root in list(self._roots.values()):
            for node in _subtree(root):
                if not self._may_branch(node):
                    self._forget_below(node, 1)
        target = self.options.max_nodes // 4
        while len(self._where) > target:
            leaves = [node for root in self._roots.values() for node in _subtree(root) if not node.children]
            leaves.sort(key=lambda node: node.weight)
            for leaf in leaves:
                if len(self._where) <= target:
                    break
                siblings = self._roots if leaf.parent is None else leaf.parent.children
                del siblings[leaf.run[0]]
                self._forget_below(leaf, 0)

    def _split(self, node: _Node, depth: int, prefix: int, now_s: float) -> list[tuple[_Node, int, int]]:
        """Split the key ``prefix`` where it is hot; the keys that then follow, to be looked at in turn."""
        entry = self._entries.get(prefix)
        if entry is None:
            entry = self._new_entry(node, depth, prefix, now_s)
            if entry is None:
                return []
            self._entries[prefix] = entry
        if entry.split.next_depth <= depth:
            return []
        return list(_keys_at(node, entry.split.next_depth))

    def _new_entry(self, node: _Node, depth: int, prefix: int, now_s: float) -> _Entry | None:
        options = self.options
        if not self._is_hot(node, now_s):
            return None
        last = self._last_shared(node, now_s)
        if last.children:
            next_depth = last.end + 1
        elif last.end - depth >= options.look_blocks:
            # All alike as far as samples show: a key at the end of the look lets them show more.
            next_depth = last.end
        else:
            return None
        merged_s = self._merged_s.get(prefix)
        if merged_s is not None and now_s - merged_s < options.dwell_s and not self._may_rekey(node.weight, now_s):
            return None
        self._merged_s.pop(prefix, None)
        return _Entry(Split(prefix, depth, next_depth), now_s)

    def _is_hot(self, node: _Node, now_s: float) -> bool:
        enough = self.options.min_samples * _COLLECTING_TOLERANCE * self._scale(now_s)
        return node.samples >= enough and node.weight * self._n_active > self.options.split_above * self._total

    def _last_shared(self, node: _Node, now_s: float) -> _Node:
        """Where the requests of a hot node part: past branches that leave out less than a node may branch at."""
        aside = self.options.children_above * self._total / self._n_active
        while node.children:
            heaviest = max(node.children.values(), key=lambda child: child.weight)
            others = sum(child.weight for child in node.children.values()) - heaviest.weight
            if others > aside or not self._is_hot(heaviest, now_s):
                break
            node = heaviest
        return node

    def _merge(self, now_s: float) -> None:
        """Undo splits that have been cold for long enough, the coldest first, while the allowance lasts."""
        options = self.options
        for prefix in [p for p, since_s in self._merged_s.items() if now_s - since_s >= options.dwell_s]:
            del self._merged_s[prefix]
        limit = options.merge_below * self._total / self._n_active
        cold = []
        for prefix, entry in self._entries.items():
            if now_s - entry.since_s >= options.dwell_s:
                node = self._where.get(prefix)
                weight = node.weight if node is not None else 0.0
                if weight + self._unplaced(entry.split) < limit:
                    cold.append((weight, prefix))
        for weight, prefix in sorted(cold):
            if not self._may_rekey(weight, now_s):
                break
            del self._entries[prefix]
            self._merged_s[prefix] = now_s

    def _unplaced(self, split: Split) -> float:
        """Weight of samples that began at a depth this split leads to and whose ancestors were never seen.

        They may belong to it, so it is not cold while they are not.
        """
        return sum(n.weight for n in self._roots.values() if split.depth < n.depth <= split.next_depth)

    def _may_rekey(self, weight: float, now_s: float) -> bool:
        share = weight / self._total
        if share + sum(spent for _, spent in self._rekeyed) > self.options.rekey_share_per_minute:
            return False
        if share:
            self._rekeyed.append((now_s, share))
        return True

    def _scale(self, now_s: float) -> float:
        """What a weight of 1 seen now counts against older weights."""
        if self._scale_from_s is None:
            self._scale_from_s = now_s
        half_lives = (now_s - self._scale_from_s) / self.options.half_life_s
        if half_lives > _RESCALE_HALF_LIVES:
            faded = 2.0**-half_lives if half_lives < 1_000 else 0.0
            for root in self._roots.values():
                for node in _subtree(root):
                    node.weight *= faded
                    node.samples *= faded
            self._total *= faded
            self._scale_from_s, half_lives = now_s, 0.0
        return float(2.0**half_lives)


def _subtree(node: _Node) -> Iterator[_Node]:
    """The node and all below it; the caller may cut off the branches of a node it was given."""
    pending = [node]
    while pending:
        current = pending.pop()
        yield current
        pending += current.children.values()


def _keys_at(node: _Node, depth: int) -> Iterator[tuple[_Node, int, int]]:
    """Blocks at exactly ``depth`` at or below the node, with the node that holds each."""
    pending = [node]
    while pending:
        current = pending.pop()
        if depth <= current.end:
            yield current, depth, current.run[depth - current.depth]
        else:
            pending += current.children.values()
