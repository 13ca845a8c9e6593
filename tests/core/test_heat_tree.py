"""When prefixes are split, how deep, and when splits are taken back (design: heat)."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.heat_tree import HeatOptions, HeatTree
from dualmap.core.keys import SplitTable, key_of
from dualmap.core.membership import Split

FRESH = count(1 << 40)
N = 8


def chain(*ids: int) -> list[int]:
    """Cumulative hashes of a chain of block ids."""
    hashes, prefix = [], 0
    for block in ids:
        prefix = hash((prefix, block)) & 0xFFFF_FFFF_FFFF_FFFF
        hashes.append(prefix)
    return hashes


def fresh(*shared: int, blocks: int = 20) -> list[int]:
    """A chain that shares its first blocks and nothing after them."""
    return chain(*shared, *(next(FRESH) for _ in range(blocks)))


def new_tree(**options: float) -> HeatTree:
    tree = HeatTree(HeatOptions(**options))  # type: ignore[arg-type]
    tree.plan(N, 0.0)
    return tree


def feed(tree: HeatTree, chains: list[list[int]], start_s: float, end_s: float) -> None:
    for number, hashes in enumerate(chains):
        tree.observe(hashes, 1, 1, 100, start_s + (end_s - start_s) * number / len(chains))


@pytest.mark.parametrize(("samples", "found"), [(17, False), (20, True)])
def test_a_block_every_request_shares_is_split_within_seconds_of_a_cold_start(samples: int, found: bool) -> None:
    """Twenty samples at 4.5 a second are enough; fewer prove nothing."""
    tree = new_tree()
    feed(tree, [fresh(1) for _ in range(samples)], 0.0, samples / 4.5)

    splits = tree.plan(N, samples / 4.5)

    assert splits == ((Split(chain(1)[0], 1, 2),) if found else ())


def test_a_group_sharing_twelve_blocks_changes_its_pair_once() -> None:
    """The split jumps to the depth where the group diverges, instead of one level at a time."""
    shared = range(12)
    tree = new_tree()
    feed(tree, [fresh(*shared) for _ in range(30)], 0.0, 3.0)

    first = tree.plan(N, 3.0)
    feed(tree, [fresh(*shared) for _ in range(300)], 3.0, 60.0)

    assert first == (Split(chain(0)[0], 1, 13),)
    assert tree.plan(N, 60.0) == first


def test_each_branch_is_split_to_its_own_depth() -> None:
    """A hot branch below a hot prefix has an entry of its own; cold branches beside it have none."""
    tree = new_tree()
    chains = []
    for _ in range(60):
        chains += [fresh(1, 2, 3), fresh(1, 2, 7, 8, 9), fresh(1, 2)]
    feed(tree, chains, 0.0, 20.0)

    table = tree.plan(N, 20.0)

    assert set(table) == {
        Split(chain(1)[0], 1, 3),
        Split(chain(1, 2, 3)[-1], 3, 4),
        Split(chain(1, 2, 7)[-1], 3, 6),
    }


def test_after_the_split_no_key_is_above_the_threshold() -> None:
    """Whatever mix of shared prefixes: every key that can be divided further stays below 2/n of the traffic."""
    rng = random.Random(3)
    tree = new_tree()
    heads = [tuple(rng.choices(range(3), k=rng.randint(1, 6))) for _ in range(6)]
    chains = [fresh(0, *rng.choice(heads)) for _ in range(3_000)]
    feed(tree, chains, 0.0, 60.0)

    table = SplitTable.build(tree.plan(N, 60.0))
    keys = Counter(key_of(hashes, 1, table)[0] for hashes in chains)

    assert max(keys.values()) / len(chains) <= 2.1 / N


def test_a_branch_that_leaves_a_little_aside_is_passed_by_the_jump() -> None:
    """A cold exception on the way does not make the group change its pair twice."""
    tree = new_tree()
    feed(tree, [fresh(*range(12)) for _ in range(200)] + [fresh(0, 1, 99), fresh(0, 1, 2, 98)], 0.0, 20.0)

    assert tree.plan(N, 20.0) == (Split(chain(0)[0], 1, 13),)


def test_identical_prompts_are_not_split_for_nothing() -> None:
    """No depth divides equal chains: their key stays."""
    tree = new_tree()
    feed(tree, [chain(*range(10))] * 100, 0.0, 10.0)

    assert tree.plan(N, 10.0) == ()


def test_short_prompts_do_not_heat_what_only_longer_ones_share() -> None:
    """Most requests end after two blocks: the few that go on are told apart from them, and not split further."""
    tree = new_tree()
    feed(tree, [fresh(1, 2, 3, 4) if number % 10 == 0 else chain(1, 2) for number in range(200)], 0.0, 20.0)

    assert tree.share(chain(1, 2)[-1]) == pytest.approx(1.0)
    assert tree.share(chain(1, 2, 3)[-1]) == pytest.approx(0.1, abs=0.01)
    assert tree.plan(N, 20.0) == (Split(chain(1)[0], 1, 3),)


def test_what_is_shared_beyond_the_look_is_followed_in_steps() -> None:
    """A prefix of 100 blocks is split to the end of the look, and from there to where it diverges."""
    shared = range(100)
    tree = new_tree()
    feed(tree, [fresh(*shared)[:65] for _ in range(30)], 0.0, 3.0)
    first = tree.plan(N, 3.0)
    for number in range(30):
        tree.observe(fresh(*shared)[64:129], 65, 1, 100, 3.0 + number / 10)

    assert first == (Split(chain(0)[0], 1, 65),)
    assert tree.plan(N, 6.0) == (*first, Split(chain(*range(65))[-1], 65, 101))


def test_a_pool_of_two_splits_nothing() -> None:
    """A share cannot exceed 2/2: both instances are in every pair already."""
    tree = new_tree()
    feed(tree, [fresh(1) for _ in range(100)], 0.0, 3.0)

    assert tree.plan(2, 3.0) == ()
    assert tree.plan(0, 3.0) == ()


def test_one_sample_may_stand_for_many_requests() -> None:
    """Shares are of requests, not of samples."""
    tree = new_tree()
    for number in range(25):
        tree.observe(fresh(1), 1, 30, 0, number / 10)
        tree.observe(fresh(2), 1, 1, 0, number / 10)

    assert [split.prefix for split in tree.plan(N, 2.5)] == [chain(1)[0]]
    assert tree.share(chain(2)[0]) == pytest.approx(1 / 31)
    assert tree.share(12345) == 0.0


def test_heat_can_be_weighed_by_miss_tokens() -> None:
    """A prefix whose requests cost nothing is not hot when misses are what is weighed."""
    tree = HeatTree(HeatOptions(weigh_by="miss_tokens"))
    assert tree.plan(N, 0.0) == ()
    for number in range(25):
        tree.observe(fresh(1), 1, 1, 0, number / 10)
        tree.observe(fresh(2), 1, 1, 9_000, number / 10)

    assert [split.prefix for split in tree.plan(N, 2.5)] == [chain(2)[0]]


def heated(**options: float) -> tuple[HeatTree, tuple[Split, ...]]:
    tree = new_tree(**options)
    feed(tree, [fresh(1) for _ in range(100)], 0.0, 10.0)
    return tree, tree.plan(N, 10.0)


def cool(tree: HeatTree, start_s: float, end_s: float) -> None:
    feed(tree, [fresh() for _ in range(int(end_s - start_s) * 5)], start_s, end_s)


def test_a_cold_split_is_merged_after_its_dwell_only() -> None:
    """Below 1/n it stays for 300 s, so that warm caches are not abandoned for a lull."""
    tree, splits = heated()
    cool(tree, 10.0, 310.0)

    assert tree.plan(N, 309.0) == splits
    assert tree.plan(N, 310.0) == ()


def test_a_split_that_is_still_warm_is_kept() -> None:
    """Between 1/n and 2/n nothing changes, however long."""
    tree, splits = heated()
    chains = [fresh(1) if number % 6 == 0 else fresh() for number in range(3_000)]
    feed(tree, chains, 10.0, 610.0)

    assert tree.plan(N, 610.0) == splits


def test_merges_rekey_at_most_a_tenth_of_the_traffic_a_minute() -> None:
    """Splits of 6 % each are merged one a minute, not at once."""
    tree = new_tree(min_samples=1, split_above=0.1, merge_below=1.0)
    chains = [fresh(number % 16) for number in range(4_000)]
    feed(tree, chains, 0.0, 100.0)
    before = len(tree.plan(N, 100.0))
    feed(tree, chains, 100.0, 400.0)

    left = [len(tree.plan(N, 400.0)), len(tree.plan(N, 430.0)), len(tree.plan(N, 460.0))]

    assert before == 16
    assert left == [15, 15, 14]


def test_a_prefix_split_again_within_a_dwell_waits_for_the_allowance() -> None:
    """Splitting and merging in turns would re-key a hot prefix again and again; the first split is never held back."""
    tree, splits = heated(dwell_s=100.0)
    cool(tree, 10.0, 300.0)
    assert tree.plan(N, 300.0) == ()
    feed(tree, [fresh(1) for _ in range(2_000)], 300.0, 340.0)

    assert tree.plan(N, 340.0) == ()
    assert tree.plan(N, 400.0) == splits


def test_offered_splits_are_adopted_and_rest_for_a_dwell() -> None:
    """A restarted manager takes the table a router offers; what it knows itself is not overwritten."""
    tree, splits = heated()
    offered = Split(777, 4, 9)
    tree.adopt([Split(splits[0].prefix, 1, 50), offered, Split(778, 3, 3), Split(779, 0, 3)], 10.0)

    assert tree.plan(N, 10.0) == (*splits, offered)
    cool(tree, 10.0, 311.0)
    assert tree.plan(N, 311.0) == ()


def test_samples_from_below_an_adopted_split_keep_it() -> None:
    """Samples begin at the present key: whose prefix was never seen may belong to the split, so it is not cold."""
    tree = new_tree()
    offered = Split(chain(1)[0], 1, 3)
    tree.adopt([offered], 0.0)
    for number in range(2_000):
        tree.observe(fresh(1, 2)[2:], 3, 1, 100, number / 5)

    assert tree.plan(N, 400.0) == (offered,)


def test_an_adopted_split_that_leads_back_ends_the_walk() -> None:
    """A table offered with wrong depths cannot send the plan in circles."""
    tree = new_tree()
    wrong = Split(chain(1, 2, 3)[-1], 1, 2)
    tree.adopt([wrong], 0.0)
    for _ in range(30):
        tree.observe(fresh(1, 2, 3)[2:], 3, 1, 100, 1.0)

    assert tree.plan(N, 1.0) == (wrong,)


def test_branches_first_seen_alone_find_their_place() -> None:
    """What was sampled from a deeper key on is joined to its prefix once a whole chain shows it, with its weight."""
    tree = new_tree()
    for _ in range(10):
        tree.observe(fresh(1, 2)[1:], 2, 1, 100, 0.0)
    assert tree.share(chain(1)[0]) == 0.0
    tree.observe(fresh(1, 2), 1, 1, 100, 0.0)
    assert tree.share(chain(1)[0]) == 1.0
    tree.observe(fresh(1, 2)[1:], 2, 1, 100, 0.0)

    assert tree.share(chain(1)[0]) == 1.0


def test_hashes_that_are_not_cumulative_do_no_harm() -> None:
    """A caller's ids may repeat or turn round: the tree stays a tree, and time stays bounded."""
    tree = new_tree(max_nodes=200)
    rng = random.Random(5)
    for number in range(3_000):
        ids = [rng.randrange(30) for _ in range(rng.randint(0, 12))]
        tree.observe(ids, rng.randint(1, 4), 1, 100, number / 50)
        if number % 50 == 0:
            tree.plan(N, number / 50)

    assert len(tree) <= 200


def test_the_tree_is_bounded_and_still_sees_what_is_hot() -> None:
    """Endless fresh prompts do not grow it, nor push out the prefix that matters."""
    tree = new_tree(max_nodes=2_000)
    worst = 0
    for number in range(6_000):
        tree.observe(fresh(*range(5)) if number % 3 == 0 else fresh(), 1, 1, 100, number / 100)
        worst = max(worst, len(tree))
        if number % 100 == 0:
            tree.plan(N, number / 100)

    assert worst <= 2_000
    assert tree.plan(N, 60.0) == (Split(chain(0)[0], 1, 6),)


def test_hot_branches_give_way_when_there_is_no_other_room() -> None:
    """Even a tree of hot nodes only stays in its bound."""
    tree = new_tree(max_nodes=40)
    for number in range(400):
        tree.observe(chain(number % 5, *range(100 * (number % 5), 100 * (number % 5) + 30)), 1, 1, 100, number / 100)

    assert len(tree) <= 40


def test_a_cold_branch_is_remembered_only_as_far_as_it_is_shared() -> None:
    """Divergence below 1/(4n) of the traffic costs no memory."""
    tree = new_tree()
    tree.observe(fresh(1, 2, 3), 1, 1, 100, 0.0)
    feed(tree, [chain(9)] * 100, 0.0, 1.0)
    before = len(tree)
    tree.observe(fresh(1, 2, 3), 1, 1, 100, 1.0)

    assert before == 1 + 23
    assert len(tree) == 1 + 3


@pytest.mark.parametrize("gap_s", [60.0 * 600, 60.0 * 5_000])
def test_after_hours_of_silence_the_tree_begins_anew(gap_s: float) -> None:
    """Weights of long ago vanish without overflow, and new heat is found as on a cold start."""
    tree, splits = heated()
    feed(tree, [fresh(2) for _ in range(30)], gap_s, gap_s + 3.0)

    table = tree.plan(N, gap_s + 3.0)

    assert Split(chain(2)[0], 1, 2) in table
    assert splits[0] not in table


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=80), st.integers(1, 16))
def test_no_prefix_seems_much_hotter_than_it_is(ids: list[list[int]], n: int) -> None:
    """The tree looks closely above 1/(4n) only: no prefix seems hotter than it is by more than that and one sample."""
    tree = HeatTree()
    tree.plan(n, 0.0)
    chains = [chain(*i) for i in ids if i]
    for hashes in chains:
        tree.observe(hashes, 1, 1, 100, 0.0)
    total = max(len(chains), 1)

    for prefix, seen in Counter(block for hashes in chains for block in hashes).items():
        assert tree.share(prefix) <= seen / total + 1 / (4 * n) + 1 / total
    for root, seen in Counter(hashes[0] for hashes in chains).items():
        assert tree.share(root) == pytest.approx(seen / total)
