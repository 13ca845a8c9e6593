"""The orders themselves: the largest set in time, and who goes first of the rest."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.core.queue_order import OrderOptions, feasible, feasible_by_class, fifo_rank, hit_first_rank, rest_rank


def test_the_longest_job_gives_way() -> None:
    """Moore-Hodgson drops the longest of those that together are late, not the last."""
    assert feasible([(2.0, 1.0), (4.0, 5.0), (5.0, 1.0), (6.0, 1.0)], 0.0) == ([0, 2, 3], [1], 3.0)


def test_with_lots_length_alone_does_not_decide_who_gives_way() -> None:
    """The highest cost x lot gives way, and more than one where the first frees too little."""
    jobs = [(2.0, 1.0), (4.0, 2.0), (5.0, 3.0)]
    assert feasible(jobs, 0.0, [1.0, 1.0, 0.1]) == ([0, 2], [1], 4.0)
    assert feasible(jobs, 0.0, [1.0, 1.0, 1.0]) == ([0, 1], [2], 3.0)
    assert feasible([(2.0, 1.0), (3.0, 1.0), (4.0, 4.0)], 0.0, [1.0, 0.9, 0.1]) == ([2], [0, 1], 4.0)


def test_a_higher_class_leaves_only_its_spare_time() -> None:
    """The lower class gets what is left; it never costs the higher one a place."""
    assert feasible_by_class([[(10.0, 3.0)], [(4.0, 2.0), (5.0, 2.0)]], 0.0) == [([0], []), ([1], [0])]


def test_ranks() -> None:
    """Rest: oldest first, a class counts as age. Hit first: longest hit, then arrival. Fifo: arrival."""
    options = OrderOptions(class_age_ms=1_000.0)
    assert rest_rank(5_000.0, 1, options) < rest_rank(4_500.0, 0, options) < rest_rank(6_000.0, 1, options)
    assert hit_first_rank(5, 9.0) < hit_first_rank(4, 1.0) < hit_first_rank(4, 2.0)
    assert fifo_rank(1.0) < fifo_rank(2.0)


_JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), max_size=7)


@settings(max_examples=150)
@given(_JOBS, st.integers(0, 4))
def test_no_set_in_time_is_larger(jobs: list[tuple[int, int]], start: int) -> None:
    """The set kept meets all its deadlines, and exhaustive search finds none larger."""
    jobs = sorted(jobs)
    kept, dropped, end = feasible([(float(d), float(c)) for d, c in jobs], float(start))

    assert sorted(kept + dropped) == list(range(len(jobs)))
    assert _in_time([jobs[position] for position in kept], start)
    assert end == start + sum(jobs[position][1] for position in kept)
    assert not any(_in_time(list(some), start) for some in combinations(jobs, len(kept) + 1))


def _in_time(jobs: list[tuple[int, int]], clock: int) -> bool:
    for deadline, cost in jobs:
        clock += cost
        if clock > deadline:
            return False
    return True
