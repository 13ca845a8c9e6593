"""The promises of the two rings (algorithm: guarantees to keep)."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.errors import InvalidRequest
from dualmap.core.membership import InstanceState, Member, RingParameters
from dualmap.core.ring import Ring, _Points, moved_share

PARAMETERS = RingParameters()
SMALL = RingParameters(virtual_nodes=16)
_RNG = random.Random(4)
KEYS = [_RNG.getrandbits(64) for _ in range(3_000)]
IDS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=8, unique=True)
KEY = st.integers(0, 2**64 - 1)


def everyone(_: str) -> bool:
    return True


def members(ids: Sequence[str]) -> list[Member]:
    return [Member(i, "", state=InstanceState.ACTIVE) for i in ids]


def ring_of(n: int, parameters: RingParameters = PARAMETERS) -> Ring:
    return Ring.build(members([f"agent-{i}/0" for i in range(n)]), parameters)


def owner(ring: Ring, ring_no: int, key: int) -> str:
    return next(ring.walk(ring_no, key))


@settings(max_examples=60, deadline=None)
@given(IDS, KEY, st.randoms(use_true_random=False))
def test_the_pair_does_not_depend_on_the_order_of_members(ids: list[str], key: int, rng: random.Random) -> None:
    """The same members in any order give the same pair and the same walks."""
    shuffled = list(ids)
    rng.shuffle(shuffled)
    ring, other = Ring.build(members(ids), SMALL), Ring.build(members(shuffled), SMALL)

    assert ring.pair(key, everyone) == other.pair(key, everyone)
    assert list(ring.walk(1, key)) == list(other.walk(1, key))
    assert ring.instance_ids == other.instance_ids == tuple(sorted(ids))


@settings(max_examples=100, deadline=None)
@given(IDS, KEY, st.sets(st.integers(0, 7)))
def test_two_candidates_differ_whenever_two_are_eligible(ids: list[str], key: int, out: set[int]) -> None:
    """Ineligible owners are skipped; a candidate is missing only where there is no instance for it."""
    eligible = {i for n, i in enumerate(ids) if n not in out}
    first, second = Ring.build(members(ids), SMALL).pair(key, eligible.__contains__)

    assert len({first, second} - {None}) == min(2, len(eligible))
    assert {first, second} - {None} <= eligible
    assert (first is None) == (not eligible)


@settings(max_examples=60, deadline=None)
@given(IDS, KEY)
def test_a_walk_names_every_owner_once(ids: list[str], key: int) -> None:
    """Both walks visit all instances, and the pair is made of their first fit."""
    ring = Ring.build(members(ids), SMALL)
    first_walk, second_walk = list(ring.walk(1, key)), list(ring.walk(2, key))

    assert sorted(first_walk) == sorted(second_walk) == sorted(ids)
    expected = next((i for i in second_walk if i != first_walk[0]), None)
    assert ring.pair(key, everyone) == (first_walk[0], expected)


def test_an_empty_ring_has_no_candidates() -> None:
    """No member on the ring: no pair, nothing to walk."""
    ring = Ring.build([Member("a/0", "", state=InstanceState.WARMING)], PARAMETERS)

    assert ring.pair(1, everyone) == (None, None)
    assert list(ring.walk(1, 1)) == []


@pytest.mark.parametrize("ring_no", [1, 2])
@pytest.mark.parametrize("n", [3, 8, 20])
def test_a_join_moves_its_fair_share_and_only_to_the_newcomer(n: int, ring_no: int) -> None:
    """About 1/(n+1) of each ring's owners change, all to the newcomer; a leave is the same backwards."""
    before, after = ring_of(n), ring_of(n + 1)
    newcomer = f"agent-{n}/0"
    changes = [(owner(before, ring_no, k), owner(after, ring_no, k)) for k in KEYS]
    moved = [new for old, new in changes if old != new]

    assert set(moved) == {newcomer}
    assert 0.7 / (n + 1) < len(moved) / len(KEYS) < 1.4 / (n + 1)


def test_from_eight_to_nine_instances_most_pairs_stay_whole() -> None:
    """(8/9)^2 = 79 % of the pairs keep both candidates."""
    assert moved_share(ring_of(8), ring_of(9)) == pytest.approx(0.21, abs=0.04)
    assert moved_share(ring_of(8), ring_of(8)) == 0.0


def test_weight_gives_points_in_proportion() -> None:
    """An instance of weight 3 owns about three times the keys of one of weight 1; a tiny weight still owns a point."""
    big, small, tiny = (replace(m, weight=w) for m, w in zip(members("abc"), (3.0, 1.0, 0.001), strict=True))
    ring = Ring.build([big, small, tiny], PARAMETERS)
    owned = Counter(owner(ring, 1, k) for k in KEYS)

    assert 2.2 < owned["a"] / owned["b"] < 4.0
    assert "c" in list(ring.walk(1, 1))


def test_suspect_and_draining_keep_their_points() -> None:
    """A pause or a drain moves no key of the others: SUSPECT and DRAINING stay on the ring, WARMING and LEFT do not."""
    pool = [replace(m, state=s) for m, s in zip(members("abcde"), InstanceState, strict=True)]

    assert Ring.build(pool, PARAMETERS).instance_ids == ("b", "c", "d")


def test_two_members_of_one_id_are_refused() -> None:
    """A ring with a doubled id would not be the same everywhere."""
    with pytest.raises(InvalidRequest, match="members"):
        Ring.build(members(["a/0", "a/0"]), PARAMETERS)


def test_two_choices_balance_fresh_prefixes_and_one_does_not() -> None:
    """Unit loads: the largest stays within m/n + log log n / log 2 + a constant with two choices only.

    The keys' pairs here come from arcs of unequal length, which two choices must even out as well.
    """
    n = 16
    ring = ring_of(n)
    two: Counter[str] = Counter()
    one: Counter[str] = Counter()
    for key in KEYS[:1_600]:
        first, second = ring.pair(key, everyone)
        assert first is not None
        assert second is not None
        two[min((first, second), key=lambda i: two[i])] += 1
        one[first] += 1
    bound = 1_600 / n + math.log(math.log(n)) / math.log(2) + 4

    assert max(two.values()) <= bound < max(one.values())


class Counting(Sequence[int]):
    """A sequence that counts its reads."""

    def __init__(self, values: Sequence[int]):
        self.values, self.reads = values, 0

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.reads += 1
        return self.values[index]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)


def reads_per_pair(n: int) -> tuple[float, float]:
    plain = ring_of(n)
    asked = [0]
    counted = [_Points(p.seed, Counting(p.hashes), Counting(p.owners)) for p in (plain._first, plain._second)]
    ring = Ring(PARAMETERS, plain.instance_ids, counted[0], counted[1])

    def eligible(_: str) -> bool:
        asked[0] += 1
        return True

    for key in KEYS[:300]:
        ring.pair(key, eligible)
    reads = sum(s.reads for p in counted for s in (p.hashes, p.owners) if isinstance(s, Counting))
    return reads / 300, asked[0] / 300


def test_the_cost_of_a_pair_does_not_grow_with_the_pool() -> None:
    """Sixteen times the instances cost four more probes a ring and not one more question about eligibility."""
    reads_small, asked_small = reads_per_pair(8)
    reads_large, asked_large = reads_per_pair(128)

    assert asked_large <= asked_small == 2.0
    assert reads_large <= reads_small + 2 * 4 + 1


def test_another_process_gives_the_same_pairs() -> None:
    """Nothing of a process, its hash seed least of all, is in a pair: routers agree without a word."""
    script = (
        "from tests.core.test_ring import KEYS, everyone, ring_of\n"
        "print(*(n for key in KEYS[:50] for n in ring_of(9).pair(key, everyone)))"
    )
    here = [name for key in KEYS[:50] for name in ring_of(9).pair(key, everyone)]
    root = Path(__file__).parents[2]
    for seed in ("1", "2"):
        told = subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert told.stdout.split() == here


def test_a_remembered_pair_still_asks_who_is_eligible_now() -> None:
    """A key asked about again gets what a new ring would say, whoever went out or came back in between."""
    remembering = ring_of(5)
    for key in KEYS[:50]:
        first, second = remembering.pair(key, everyone)
        for out in ({first}, {second}, {first, second}, set[str | None]()):

            def eligible(name: str, out: set[str | None] = out) -> bool:
                return name not in out

            assert remembering.pair(key, eligible) == ring_of(5).pair(key, eligible)
