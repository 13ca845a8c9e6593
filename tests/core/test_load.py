"""One prediction for everybody: what waits before a request, by policy, class and slack."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.load import drain_s, predict_ttft_s, priority_class, slack_bucket, work_due_before
from dualmap.core.state import EMPTY_WAITING, PRIORITY_CLASSES, SLACK_BUCKETS, LoadReport, QueuePolicy


def _table(**cells: float) -> tuple[float, ...]:
    table = list(EMPTY_WAITING)
    for name, seconds in cells.items():
        pclass, bucket = (int(part) for part in name[1:].split("_"))
        table[pclass * SLACK_BUCKETS + bucket] = seconds
    return tuple(table)


@pytest.mark.parametrize(
    ("slack_s", "bucket"),
    [
        (-1.0, 0), (0.0, 0), (0.49, 1), (0.5, 2), (0.99, 2), (1.0, 3), (1.99, 3), (2.0, 4), (3.99, 4),
        (4.0, 5), (5.0, 5), (7.99, 5), (8.0, 6), (15.99, 6), (16.0, 7), (1e9, 7),
    ],
)  # fmt: skip
def test_slack_falls_into_the_buckets_of_the_design(slack_s: float, bucket: int) -> None:
    """Limits are 0.1, 0.2, 0.4, 0.8, 1.6 and 3.2 times the default SLO; nothing left is given up."""
    assert slack_bucket(slack_s, 5.0) == bucket


def test_priorities_become_classes() -> None:
    """-1, 0, 1 are classes 0, 1, 2; anything beyond counts as the nearest."""
    assert [priority_class(p) for p in (-5, -1, 0, 1, 7)] == [0, 0, 1, 2, 2]


def test_under_slo_only_work_due_before_counts() -> None:
    """Own and higher classes, up to the own bucket; lower classes, later deadlines and the given up do not."""
    load = LoadReport(waiting_s=_table(c0_1=100, c1_0=50, c1_2=1, c1_5=2, c1_6=30, c2_3=4, c2_7=60))

    assert work_due_before(load, None, 5, 1) == pytest.approx(1 + 2 + 4)


@pytest.mark.parametrize("policy", [QueuePolicy.FIFO, QueuePolicy.HIT_FIRST])
def test_under_other_policies_all_of_it_counts(policy: QueuePolicy) -> None:
    """Arrival order and hit order know no deadline: every waiting second may go first."""
    load = LoadReport(waiting_s=_table(c0_1=1, c1_0=2, c2_7=4), queue_policy=policy)

    assert work_due_before(load, _table(c0_7=8), 1, 2) == pytest.approx(15)


def test_a_request_past_its_deadline_waits_for_all_of_its_class() -> None:
    """What is given up goes after everything that can still be kept, and after its elders."""
    load = LoadReport(waiting_s=_table(c0_1=100, c1_0=1, c1_7=2, c2_0=4))

    assert work_due_before(load, None, 0, 1) == pytest.approx(7)


def test_the_prediction_is_rest_plus_due_plus_cost() -> None:
    """Reported and booked work add up; nothing else enters."""
    load = LoadReport(waiting_s=_table(c1_1=1.0), rest_s=0.5)

    assert predict_ttft_s(load, _table(c1_4=2.0), 5, 1, 0.25) == pytest.approx(3.75)
    assert drain_s(load, 2.0) == pytest.approx(3.5)


_SECONDS = st.lists(st.floats(0, 100), min_size=24, max_size=24).map(tuple)


@given(_SECONDS, st.integers(1, SLACK_BUCKETS - 2), st.integers(0, PRIORITY_CLASSES - 1))
def test_more_slack_never_means_less_work_before(waiting: tuple[float, ...], bucket: int, pclass: int) -> None:
    """A later deadline waits at least as long; so does a lower class; never more than all of it."""
    load = LoadReport(waiting_s=waiting)
    due = work_due_before(load, None, bucket, pclass)

    assert due <= work_due_before(load, None, bucket + 1, pclass) + 1e-9
    assert due <= work_due_before(load, None, bucket, max(0, pclass - 1)) + 1e-9
    assert due <= sum(waiting) + 1e-9
