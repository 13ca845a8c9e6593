"""The belief about a silent engine: an LRU of its capacity, corrected by what it reports."""

from __future__ import annotations

from dualmap.core.blocks import Chain, ChainKind
from dualmap.core.state import Tier
from services.instanceagent.engine import KvRemoved, KvStored
from services.instanceagent.modelled_index import ModelledIndex


def chain(*hashes: int) -> Chain:
    return Chain(ChainKind.TOKENS, hashes, 128, 128 * len(hashes) + 5)


def test_a_prompt_is_stored_root_first_and_once() -> None:
    """What is held already changes nothing."""
    index = ModelledIndex(1_280)

    assert index.fill(chain(1, 2)) == [KvStored([1, 2], Tier.DEVICE)]
    assert index.fill(chain(1, 2, 3)) == [KvStored([3], Tier.DEVICE)]
    assert index.fill(chain(1, 2, 3)) == []


def test_the_longest_unused_goes_first_and_leaves_before_roots() -> None:
    """A parent is never dropped before its child."""
    index = ModelledIndex(4 * 128)
    index.fill(chain(1, 2))
    index.fill(chain(3, 4))

    assert index.fill(chain(5)) == [KvRemoved([2]), KvStored([5], Tier.DEVICE)]
    assert index.fill(chain(1, 6)) == [KvRemoved([4]), KvStored([6], Tier.DEVICE)]


def test_a_prompt_larger_than_the_cache_keeps_its_beginning() -> None:
    """Blocks dropped while they are filled are never told as stored."""
    index = ModelledIndex(2 * 128)

    assert index.fill(chain(1, 2, 3, 4)) == [KvRemoved([4, 3]), KvStored([1, 2], Tier.DEVICE)]


def test_where_less_was_cached_than_believed_all_as_old_is_gone() -> None:
    """One missing block dates the engine's eviction."""
    index = ModelledIndex(100 * 128)
    index.fill(chain(1, 2))
    index.fill(chain(3, 4, 5))
    index.fill(chain(6, 7))
    belief = index.believe(chain(3, 4, 5))
    index.fill(chain(3, 4, 5))

    assert index.correct(belief, cached_tokens=128) == [KvRemoved([2, 1])]
    assert len(index) == 5


def test_a_report_within_a_block_of_the_belief_corrects_nothing() -> None:
    """Engines count in blocks of their own and always compute the last token."""
    index = ModelledIndex(100 * 128)
    index.fill(chain(1, 2, 3))
    belief = index.believe(chain(1, 2, 3))

    assert index.correct(belief, cached_tokens=2 * 128 + 100) == []
    assert index.correct(belief, cached_tokens=10_000) == []


def test_cleared_is_empty() -> None:
    """A new life believes nothing."""
    index = ModelledIndex(1_280)
    index.fill(chain(1, 2))
    index.clear()

    assert len(index) == 0
    assert index.believe(chain(1, 2)).used_at == ()
    assert index.fill(chain(1)) == [KvStored([1], Tier.DEVICE)]
