"""A routing block is held exactly while every overlapping engine block is, whatever sizes and order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.blocks import root_hash, token_chain
from dualmap.core.state import Tier
from services.instanceagent.block_map import BlockMap, MapLimits
from services.instanceagent.engine import KvChange, KvCleared, KvRemoved, KvStored
from services.instanceagent.kv_wire import AllCleared, BlocksRemoved, BlocksStored
from services.instanceagent.learnt_scopes import ScopeBook

ROOT = root_hash("m")
MEDIA = ("GPU", "CPU", "OBJ")
TIERS = {"GPU": Tier.DEVICE, "CPU": Tier.HOST, "OBJ": Tier.REMOTE}


def tokens_of(branch: int, count: int) -> bytes:
    """Two branches share their first 200 tokens."""
    return b"".join((at if at < 200 else at + 1_000 * branch).to_bytes(4, "little") for at in range(count))


class Engine:
    """Two prompts in blocks of one size; says what it does, and what must be held by definition."""

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self.block_tokens = block_tokens
        self.prompts = [tokens_of(branch, block_tokens * blocks) for branch in range(2)]
        step = 4 * block_tokens
        self.keys = [
            [hash(prompt[: end * step]) % (1 << 64) for end in range(1, blocks + 1)] for prompt in self.prompts
        ]
        self.media: dict[int, set[str]] = {}

    def store(self, branch: int, first: int, count: int, medium: str) -> BlocksStored:
        keys = self.keys[branch][first : first + count]
        for key in keys:
            self.media.setdefault(key, set()).add(medium)
        step = 4 * self.block_tokens
        data = self.prompts[branch][first * step : (first + len(keys)) * step]
        parent = self.keys[branch][first - 1] if first else None
        return BlocksStored(tuple(keys), parent, data, self.block_tokens, medium=medium)

    def remove(self, branch: int, at: int, medium: str | None) -> BlocksRemoved:
        key = self.keys[branch][at]
        held = self.media.get(key, set())
        held.difference_update(MEDIA if medium is None else (medium,))
        return BlocksRemoved((key,), medium)

    def expected(self) -> dict[int, Tier]:
        held: dict[int, Tier] = {}
        for prompt, keys in zip(self.prompts, self.keys, strict=True):
            for number, block in enumerate(token_chain(ROOT, prompt, 128)):
                first, last = number * 128 // self.block_tokens, (number * 128 + 127) // self.block_tokens
                media = [self.media.get(key) for key in keys[first : last + 1]]
                if all(media):
                    tier = max(min(TIERS[name] for name in names) for names in media if names)
                    # Large blocks of two branches may begin with the same block of ours: either will do.
                    held[block] = min(tier, held.get(block, tier))
        return held


Step = tuple[str, int, int, int, str | None]


def follow(held: dict[int, Tier], changes: list[KvChange]) -> None:
    for change in changes:
        match change:
            case KvStored():
                held |= dict.fromkeys(change.hashes, change.tier)
            case KvRemoved():
                for block in change.hashes:
                    del held[block]
            case KvCleared():
                held.clear()


STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(0, 1), st.integers(0, 30), st.integers(1, 31), st.sampled_from(MEDIA)),
        st.tuples(
            st.just("remove"), st.integers(0, 1), st.integers(0, 30), st.just(0), st.sampled_from([*MEDIA, None])
        ),
    ),
    max_size=30,
)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([16, 24, 48, 100, 128, 256]), STEPS)
def test_what_is_held_is_what_the_definition_says(block_tokens: int, steps: list[Step]) -> None:
    """Stores in any order, on any medium, of blocks that divide ours or not; the parents all known."""
    engine = Engine(block_tokens, 31)
    scopes = ScopeBook("m")
    block_map = BlockMap(scopes, 128, lambda _reason: None)
    held: dict[int, Tier] = {}
    for branch in (0, 1):
        # All nodes are there once, so that no event is about a block whose ancestors were never told.
        follow(held, block_map.apply([engine.store(branch, 0, 31, "GPU")], 0.0))
    assert held == engine.expected()

    for kind, branch, at, count, medium in steps:
        # Engines announce a whole chain from its root, or what follows blocks they hold.
        event = (
            engine.store(branch, 0, at + count, medium or "GPU")
            if kind == "store"
            else engine.remove(branch, at, medium)
        )
        follow(held, block_map.apply([event], 0.0))
        assert held == engine.expected()


@given(st.sampled_from([16, 48, 100, 256]), st.permutations(range(16)))
def test_children_that_come_before_their_parents_are_adopted(block_tokens: int, order: list[int]) -> None:
    """Whatever the order of arrival, the end is the same, and nothing is taken for a root meanwhile."""
    engine = Engine(block_tokens, 16)
    block_map = BlockMap(ScopeBook("m"), 128, lambda _reason: None)
    held: dict[int, Tier] = {}

    for at in order:
        follow(held, block_map.apply([engine.store(0, at, 1, "GPU")], 0.0))
        assert held.keys() <= engine.expected().keys()

    assert held == engine.expected()
    assert block_map.orphans == 0


def test_orphans_expire_and_are_bounded() -> None:
    """A parent that never comes costs a bounded place for a bounded time, and is counted."""
    counts: Counter[str] = Counter()
    limits = MapLimits(max_orphans=10, orphan_ttl_s=60.0)
    block_map = BlockMap(ScopeBook("m"), 128, lambda reason: counts.update([reason]), limits)
    engine = Engine(16, 31)

    block_map.apply([engine.store(0, 1, 30, "GPU")], 0.0)
    assert (block_map.orphans, len(block_map), counts["too_many_orphans"]) == (10, 10, 20)
    block_map.apply([], 59.9)
    assert block_map.orphans == 10
    block_map.apply([], 60.0)

    assert (block_map.orphans, len(block_map), counts["orphan_expired"]) == (0, 0, 10)


def test_an_orphan_that_is_removed_is_not_adopted() -> None:
    """A late parent must not resurrect a block that is gone."""
    engine = Engine(128, 2)
    block_map = BlockMap(ScopeBook("m"), 128, lambda _reason: None)
    held: dict[int, Tier] = {}

    follow(held, block_map.apply([engine.store(0, 1, 1, "GPU"), engine.remove(0, 1, None)], 0.0))
    follow(held, block_map.apply([engine.store(0, 0, 1, "GPU")], 0.0))

    assert held == engine.expected()
    assert len(held) == 1


def test_churn_leaves_nothing_behind() -> None:
    """Stored and removed again and again, the map is as small as what is held."""
    block_map = BlockMap(ScopeBook("m"), 128, lambda _reason: None)
    for _ in range(20):
        engine = Engine(16, 31)
        block_map.apply([engine.store(0, 0, 31, "GPU"), engine.store(1, 0, 31, "GPU")], 0.0)
        for branch in range(2):
            for at in reversed(range(31)):
                block_map.apply([engine.remove(branch, at, "GPU")], 0.0)

    assert (len(block_map), len(block_map._entries), len(block_map._pending)) == (0, 0, 0)


def test_blocks_over_the_bound_are_left_out_and_counted() -> None:
    """The bound holds whatever the engine says."""
    counts: Counter[str] = Counter()
    block_map = BlockMap(ScopeBook("m"), 128, lambda reason: counts.update([reason]), MapLimits(max_blocks=20))
    engine = Engine(16, 31)

    changes = block_map.apply([engine.store(0, 0, 31, "GPU")], 0.0)

    assert len(block_map) == 20
    assert counts == {"too_many_blocks": 1}
    assert changes == [KvStored(token_chain(ROOT, engine.prompts[0], 128)[:2], Tier.DEVICE)]


@pytest.mark.parametrize("event", [AllCleared(), None])
def test_cleared_or_lost_is_a_new_life(event: AllCleared | None) -> None:
    """What was held is forgotten in one step."""
    block_map = BlockMap(ScopeBook("m"), 128, lambda _reason: None)
    block_map.apply([Engine(16, 31).store(0, 0, 31, "GPU")], 0.0)

    changes = block_map.clear() if event is None else block_map.apply([event], 0.0)

    assert changes == [KvCleared()]
    assert len(block_map) == 0
