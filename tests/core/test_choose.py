"""Truth table of the route decision (design section 5), and the promises it must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.choose import ChooseOptions, Reason, RouteQuery, book, choose
from dualmap.core.errors import NoInstance, Overloaded
from dualmap.core.keys import SplitTable, request_key
from dualmap.core.membership import InstanceState, Split
from dualmap.core.ring import Ring
from dualmap.core.state import PrefillCost
from tests.core.pool import BLOCK, NOW_MS, Pool, chain, run_of

HASHES = run_of(7, 20)
KEY = HASHES[0]
PUBLISHED = ChooseOptions(select="cache_first", escape_slo_fraction=0.7)
"""The published rule: the higher hit up to 0.9 x SLO, others looked at above 0.7."""


def test_the_longer_hit_wins_while_it_keeps_the_slo() -> None:
    """Cache first: the warm candidate is taken though it is slower, up to 0.9 x SLO."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(second, HASHES[:10])
    pool.busy(3.0, second)

    decision = pool.choose(HASHES, PUBLISHED)

    assert (decision.chosen.instance_id, decision.reason) == (second, Reason.CACHE_HIT)
    assert decision.chosen.hit_tokens == 10 * BLOCK
    assert decision.backup is not None
    assert decision.backup.instance_id == first
    assert (decision.key, decision.key_blocks) == (KEY, 1)


def test_a_threatened_slo_sends_it_to_the_lower_prediction() -> None:
    """Above 0.9 x SLO the cache no longer decides."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(second, HASHES[:10])
    pool.busy(4.5, second)

    decision = pool.choose(HASHES, PUBLISHED)

    assert (decision.chosen.instance_id, decision.reason) == (first, Reason.SLO_THREAT)


@pytest.mark.parametrize(("lead", "reason"), [(0, Reason.LESS_LOADED), (1, Reason.LESS_LOADED), (2, Reason.CACHE_HIT)])
def test_equal_within_one_block_is_equal(lead: int, reason: Reason) -> None:
    """Hits that differ by one block or less are equal: the lower prediction, on either ring."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(first, HASHES[: 4 + lead])
    pool.warm(second, HASHES[:4])
    pool.busy(1.0, first)

    decision = pool.choose(HASHES, PUBLISHED)

    assert decision.reason == reason
    assert decision.chosen.instance_id == (second if reason is Reason.LESS_LOADED else first)


@pytest.mark.parametrize(("wait_s", "warm_wins"), [(0.9, True), (1.1, False)])
def test_a_second_saved_outweighs_four_waited(wait_s: float, warm_wins: bool) -> None:
    """Work counts five times, once in the prediction: 0.2048 s saved is worth 1.024 s of waiting."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(second, HASHES[:10])
    pool.busy(wait_s, second)

    assert pool.choose(HASHES).chosen.instance_id == (second if warm_wins else first)


def test_beyond_the_slo_work_weighs_nothing() -> None:
    """Nobody keeps 0.9 x SLO: the first to answer is taken; a warm one that misses gives way to one that keeps."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.busy(4.6, *pool.views)
    pool.warm(second, HASHES)
    pool.busy(5.5, second)
    assert pool.choose(HASHES).chosen.instance_id != second

    pool.busy(1.0, first)
    decision = pool.choose(HASHES)
    assert (decision.chosen.instance_id, decision.reason) == (first, Reason.SLO_THREAT)


def test_others_than_the_pair_are_looked_at_only_when_both_wait() -> None:
    """Below 0.2 x SLO on one of the pair two looks are enough."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.busy(2.0, first)
    assert len(pool.choose(HASHES).candidates) == 2

    pool.busy(2.0, second)
    assert pool.choose(HASHES).reason is Reason.ESCAPE


def test_new_prefixes_balance_over_both_rings() -> None:
    """Without hits the less loaded of the two is taken, so two-choice balancing does happen."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.busy(0.5, first)
    assert pool.choose(HASHES).chosen.instance_id == second

    pool.busy(1.0, second)
    assert pool.choose(HASHES).chosen.instance_id == first


def test_both_over_the_escape_limit_look_at_two_more() -> None:
    """Above 0.7 x SLO on both the lowest of four predictions is taken, whatever the hits say."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    third, fourth = pool.escapes(KEY)
    pool.warm(second, HASHES)
    pool.busy(3.6, first, second)
    pool.busy(0.2, third)

    decision = pool.choose(HASHES, PUBLISHED)

    assert (decision.chosen.instance_id, decision.reason) == (fourth, Reason.ESCAPE)
    assert [c.role for c in decision.candidates] == ["pair_1", "pair_2", "escape_1", "escape_2"]
    assert [c.instance_id for c in decision.candidates] == [first, second, third, fourth]


def test_an_escape_may_stay_in_the_pair() -> None:
    """Looking further does not mean going further."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.busy(4.0, *pool.views)
    pool.warm(second, HASHES)

    decision = pool.choose(HASHES, PUBLISHED)

    assert (decision.chosen.instance_id, decision.reason) == (second, Reason.ESCAPE_STAYED)
    assert decision.backup is not None
    assert decision.backup.instance_id == first


def test_one_candidate_below_the_limit_is_no_escape() -> None:
    """Only both of the pair above the limit open the escape; and it can be switched off."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.busy(4.0, first)
    assert len(pool.choose(HASHES, PUBLISHED).candidates) == 2

    pool.busy(4.0, second)
    assert len(pool.choose(HASHES, PUBLISHED).candidates) == 4
    assert len(pool.choose(HASHES, replace(PUBLISHED, escape=False)).candidates) == 2


def test_in_a_grace_period_the_previous_pair_is_a_full_candidate() -> None:
    """After a change of ring the warm old home still wins by its cache, within four looks."""
    pool = Pool(9)
    before = Ring.build(pool.members[:4], pool.parameters)
    old_first, old_second = before.pair(KEY, lambda _: True)
    assert old_first is not None
    pool.picture = replace(pool.picture, previous=(before, SplitTable.build(())))
    target = next(i for i in (old_first, old_second) if i is not None and i not in pool.pair(KEY))
    pool.warm(target, HASHES)

    decision = pool.choose(HASHES)

    assert (decision.chosen.instance_id, decision.reason) == (target, Reason.PREVIOUS_PAIR)
    assert decision.chosen.role in ("previous_1", "previous_2")
    assert len(decision.candidates) <= 4


def test_after_a_split_the_old_key_still_finds_its_cache() -> None:
    """The previous split table gives the previous key: a longer key does not abandon what is warm."""
    pool = Pool(16, [Split(KEY, 1, 12)])
    pool.picture = replace(pool.picture, previous=(pool.picture.ring, SplitTable.build(())))
    old = pool.pair(KEY)
    new = pool.pair(HASHES[11])
    target = next(i for i in old if i not in new)
    pool.warm(target, HASHES)

    decision = pool.choose(HASHES)

    assert (decision.key, decision.key_blocks) == (HASHES[11], 12)
    assert (decision.chosen.instance_id, decision.reason) == (target, Reason.PREVIOUS_PAIR)


def test_four_looks_are_the_end() -> None:
    """Pair and previous pair fill the looks: an overloaded key in a grace period looks no further."""
    pool = Pool(16, [Split(KEY, 1, 12)])
    pool.picture = replace(pool.picture, previous=(pool.picture.ring, SplitTable.build(())))
    pool.busy(4.0, *pool.views)

    decision = pool.choose(HASHES)

    looked = [c.instance_id for c in decision.candidates]
    assert len(looked) == len(set(looked)) == 4


@pytest.mark.parametrize("how", ["unreachable", "SUSPECT", "DRAINING", "WARMING", "LEFT", "excluded", "stuck", "gone"])
def test_an_ineligible_candidate_is_skipped_on_the_ring(how: str) -> None:
    """A dead instance looks idle and warm; it must not attract its prefixes (released code, defect 5)."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(first, HASHES)
    exclude: frozenset[str] = frozenset()
    if how == "unreachable":
        pool.views[first].reachable = False
    elif how == "excluded":
        exclude = frozenset({first})
    elif how == "stuck":
        pool.load(first, suspect=True)
    elif how == "gone":
        del pool.views[first]
    else:
        pool.state(first, InstanceState[how])

    decision = pool.choose(HASHES, exclude=exclude)

    looked = [c.instance_id for c in decision.candidates]
    assert first not in looked
    assert second in looked
    assert len(looked) == 2


def test_who_does_not_admit_is_avoided() -> None:
    """The other of the pair is taken though it is colder and slower."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(first, HASHES)
    pool.load(first, admitting=False)
    pool.busy(2.0, second)

    assert pool.choose(HASHES, PUBLISHED).chosen.instance_id == second


def test_a_full_pair_looks_further_before_it_gives_up() -> None:
    """Neither of the pair admits: an escape takes it."""
    pool = Pool(8)
    for instance_id in pool.pair(KEY):
        pool.load(instance_id, admitting=False)

    decision = pool.choose(HASHES)

    assert decision.reason is Reason.ESCAPE


@pytest.mark.parametrize(("rest_s", "retry_ms"), [(0.0, 50), (2.5, 2_500), (99.0, 10_000)])
def test_nobody_admits_means_overloaded_with_the_least_drain(rest_s: float, retry_ms: int) -> None:
    """The delay is the least predicted drain of those looked at, 50 ms to 10 s."""
    pool = Pool(8)
    for instance_id in pool.views:
        pool.load(instance_id, admitting=False, rest_s=rest_s + 100)
    pool.busy(rest_s, pool.pair(KEY)[1])

    with pytest.raises(Overloaded) as caught:
        pool.choose(HASHES)

    assert caught.value.retry_after_ms == retry_ms


def test_no_instance_at_all_is_its_own_answer() -> None:
    """An empty pool, or one with nobody eligible, is NoInstance with a delay."""
    with pytest.raises(NoInstance):
        Pool(0).choose(HASHES)
    pool = Pool(2)
    with pytest.raises(NoInstance) as caught:
        pool.choose(HASHES, exclude=frozenset(pool.views))
    assert caught.value.retry_after_ms


def test_a_lone_instance_is_the_only_candidate() -> None:
    """One eligible instance: it is taken, and there is no backup."""
    decision = Pool(1).choose(HASHES)

    assert (decision.reason, decision.backup) == (Reason.ONLY_CANDIDATE, None)


def test_old_state_is_eligible_and_said() -> None:
    """Unknown is not unreachable: the hash still decides, the reason is DEGRADED."""
    pool = Pool(8)
    for view in pool.views.values():
        view.heard_at_ms = NOW_MS - 60_000
    assert pool.choose(HASHES).reason is Reason.DEGRADED

    for view in pool.views.values():
        view.heard_at_ms = None
    decision = pool.choose(HASHES)
    assert decision.reason is Reason.DEGRADED
    assert decision.chosen.state_age_ms < 0
    assert {c.instance_id for c in decision.candidates} == set(pool.pair(KEY))


def test_no_full_block_takes_the_pair_of_the_request_id() -> None:
    """Short prompts spread by request id, and the same id gives the same pair."""
    pool = Pool(8)
    query = RouteQuery("abc", chain(tail=50))

    decision = choose(query, pool.picture, pool.views, ChooseOptions(), NOW_MS)

    assert (decision.reason, decision.key_blocks) == (Reason.NO_KEY, 0)
    assert {c.instance_id for c in decision.candidates} == set(pool.pair(request_key("abc")))


def test_booked_blocks_are_future_hits() -> None:
    """Ten queued requests with one new prefix are one miss, not ten."""
    pool = Pool(8)
    query = RouteQuery("r", chain(*HASHES))
    decision = choose(query, pool.picture, pool.views, ChooseOptions(), NOW_MS)
    chosen = decision.chosen.instance_id
    sequence = book(decision, pool.views[chosen], query, NOW_MS)

    after = pool.choose(HASHES)

    assert sequence == 1
    assert after.chosen.instance_id == chosen
    assert after.chosen.indexed_hit_tokens == 0
    assert after.chosen.hit_tokens == 20 * BLOCK
    assert after.chosen.booked_s == pytest.approx(decision.chosen.prefill_s)
    assert after.chosen.work_ahead_s == pytest.approx(decision.chosen.prefill_s)


def test_a_decision_is_seen_by_the_next_one_at_once() -> None:
    """In-flight work counts from the decision, not from an answer: no herd on an idle instance (defect 4)."""
    pool = Pool(8)
    counts: dict[str, int] = {}
    for number in range(80):
        query = RouteQuery(str(number), chain(*run_of(100 + number, 40)))
        decision = choose(query, pool.picture, pool.views, ChooseOptions(), NOW_MS)
        counts[decision.chosen.instance_id] = counts.get(decision.chosen.instance_id, 0) + 1
        book(decision, pool.views[decision.chosen.instance_id], query, NOW_MS)

    assert max(counts.values()) <= 15
    assert len(counts) == 8


def test_a_fully_cached_prompt_is_no_miss() -> None:
    """It costs the fixed part only (released code, defect 3: it counted as a full miss)."""
    pool = Pool(8)
    first, _ = pool.pair(KEY)
    pool.warm(first, HASHES)

    chosen = pool.choose(HASHES).chosen

    assert (chosen.instance_id, chosen.miss_tokens) == (first, 0)
    assert chosen.prefill_s == pytest.approx(PrefillCost().a_s)


def test_a_faster_instance_predicts_less() -> None:
    """Unequal machines enter through their own measured cost."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.load(second, cost=PrefillCost(b_s_per_token=0.000_08))

    assert pool.choose(HASHES).chosen.instance_id == second
    assert pool.choose(HASHES).chosen.predicted_ttft_s < 0.5
    assert first != second


def test_a_callers_last_block_may_reach_beyond_the_prompt() -> None:
    """Hits never exceed the prompt, misses are never negative."""
    pool = Pool(8)
    first, _ = pool.pair(KEY)
    pool.warm(first, HASHES)
    query = RouteQuery("r", chain(*HASHES)._replace(prompt_tokens=19 * BLOCK + 1))

    chosen = choose(query, pool.picture, pool.views, ChooseOptions(), NOW_MS).chosen

    assert (chosen.hit_tokens, chosen.miss_tokens) == (19 * BLOCK + 1, 0)


@pytest.mark.parametrize(
    ("select", "expected"), [("cache", "warm"), ("load", "cold"), ("min_ttft", "cold"), ("cache_first", "warm")]
)
def test_ablations_replace_the_rule_inside_the_pair(select: str, expected: str) -> None:
    """Cache only, load only, lowest prediction only, and the published one."""
    pool = Pool(8)
    first, second = pool.pair(KEY)
    pool.warm(second, HASHES[:10])
    pool.busy(3.0, second)

    decision = pool.choose(HASHES, ChooseOptions(select=select, escape=False))  # type: ignore[arg-type]

    assert decision.chosen.instance_id == (second if expected == "warm" else first)


@pytest.mark.parametrize("choices", [1, 2, 3, 4])
def test_choices_bound_the_full_candidates(choices: int) -> None:
    """One is ring 1 alone, two the pair, more the next of each ring; there is always a backup."""
    decision = Pool(8).choose(HASHES, ChooseOptions(choices=choices, escape=False))

    assert len(decision.candidates) == choices
    assert decision.backup is not None
    assert decision.backup.instance_id != decision.chosen.instance_id


def test_deciding_draws_nothing_at_random() -> None:
    """Equal inputs, equal answers, ties too (released code, defect 9: it re-seeded the global generator)."""
    pool = Pool(8)

    assert len({pool.choose(HASHES).chosen.instance_id for _ in range(20)}) == 1


@settings(max_examples=60)
@given(st.integers(1, 12), st.data())
def test_any_state_gives_a_distinct_eligible_bounded_answer(n: int, data: st.DataObject) -> None:
    """Whatever the loads, hits and states: at most four looks, all distinct and eligible, the best rule kept."""
    pool = Pool(n)
    for instance_id in pool.views:
        pool.busy(data.draw(st.floats(0, 8)), instance_id)
        pool.warm(instance_id, HASHES[: data.draw(st.integers(0, 20))])
        pool.load(instance_id, admitting=data.draw(st.booleans()))
        pool.views[instance_id].reachable = data.draw(st.booleans())
    eligible = {i for i, v in pool.views.items() if v.eligible}
    try:
        decision = pool.choose(HASHES)
    except NoInstance:
        assert not eligible
        return
    except Overloaded:
        assert not all(view.load.admitting for view in pool.views.values())
        return
    looked = [c.instance_id for c in decision.candidates]
    assert len(looked) == len(set(looked)) <= 4
    assert set(looked) <= eligible
    assert decision.chosen.admitting
    assert decision.backup is None or decision.backup.instance_id != decision.chosen.instance_id
    if decision.chosen.predicted_ttft_s > 0.9 * 5.0:
        usable = [c for c in decision.candidates if c.admitting]
        assert decision.chosen.predicted_ttft_s == min(c.predicted_ttft_s for c in usable)


class _CountingViews(dict[str, object]):
    """A mapping that counts its reads and cannot be scanned."""

    reads = 0

    def get(self, key: str, default: object = None) -> object:
        self.reads += 1
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.reads += 1
        return super().__getitem__(key)

    def __iter__(self) -> Never:
        raise AssertionError("a decision must not look at all instances")


def test_state_read_per_decision_does_not_grow_with_n() -> None:
    """The same few views are read in a pool of 8 and of 256, also on escape."""
    worst: dict[int, int] = {}
    for n in (8, 256):
        pool = Pool(n)
        pool.busy(4.0, *pool.views)
        for number in range(50):
            views = _CountingViews(pool.views)
            query = RouteQuery("r", chain(*run_of(number + 1, 5)))
            choose(query, pool.picture, views, ChooseOptions(), NOW_MS)  # type: ignore[arg-type]
            worst[n] = max(worst.get(n, 0), views.reads)

    assert worst[256] <= 16
    assert worst[8] <= 16


@pytest.mark.parametrize(("host_discount", "chosen"), [(0.0, 0), (0.75, 1)])
def test_a_slower_tier_counts_with_its_credit(host_discount: float, chosen: int) -> None:
    """Sixteen blocks on the host against eight on the device: more at full credit, less at a quarter of it."""
    pool = Pool(4)
    hashes = run_of(9, 32)
    pair = pool.pair(hashes[0])
    for block in hashes[:16]:
        pool.views[pair[0]].kv.set(block, 2)
    pool.warm(pair[1], hashes[:8])
    pool.load(pair[0], host_discount=host_discount)

    decision = pool.choose(hashes)

    assert decision.chosen.instance_id == pair[chosen]
    assert decision.chosen.miss_tokens == (16 if chosen == 0 else 24) * BLOCK
