"""Whose queue is listed: told from loads alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.instance_view import InstanceView
from dualmap.core.load import slack_bucket
from dualmap.core.membership import InstanceState, Member
from dualmap.core.state import PRIORITY_CLASSES, SLACK_BUCKETS, LoadReport
from services.rebalancer.sources import may_miss, sources_of

SLO_S = 5.0


def waiting(bucket: int, seconds: float, pclass: int = 1) -> tuple[float, ...]:
    table = [0.0] * (PRIORITY_CLASSES * SLACK_BUCKETS)
    table[pclass * SLACK_BUCKETS + bucket] = seconds
    return tuple(table)


def view(state: InstanceState = InstanceState.ACTIVE, reachable: bool = True, **load: float) -> InstanceView:
    report = LoadReport(waiting_requests=1, stalled_ms=load.get("stalled_ms", 0.0), suspect=bool(load.get("suspect")))
    return InstanceView("a/0", member=Member("a/0", "h:1", state=state), reachable=reachable, load=report)


@pytest.mark.parametrize(
    ("bucket", "seconds", "rest_s", "listed"),
    [
        (1, 0.1, 0.0, True),  # no slack is certain in the lowest bucket
        (4, 1.9, 0.0, False),  # 2 s of slack at least
        (4, 2.1, 0.0, True),
        (4, 1.9, 0.2, True),
        (7, 15.0, 0.0, False),
        (7, 17.0, 0.0, True),
        (0, 50.0, 9.0, False),  # given up: nothing to save
    ],
)
def test_a_queue_is_listed_when_somebody_may_miss(bucket: int, seconds: float, rest_s: float, listed: bool) -> None:
    """Work before and of the bucket against the least slack in it."""
    assert may_miss(LoadReport(waiting_s=waiting(bucket, seconds), rest_s=rest_s), SLO_S) is listed


@given(st.floats(0.01, 20.0), st.floats(0.0, 20.0), st.floats(0.0, 5.0))
def test_none_that_misses_is_passed_over(slack_s: float, work_s: float, rest_s: float) -> None:
    """Buckets are coarse, so a calm queue may be listed; a missing one always is."""
    report = LoadReport(waiting_s=waiting(slack_bucket(slack_s, SLO_S), work_s), rest_s=rest_s)

    if work_s > 0 and rest_s + work_s > slack_s:
        assert may_miss(report, SLO_S)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (view(), []),
        (view(stalled_ms=499), []),
        (view(stalled_ms=500), [False]),
        (view(suspect=1), [True]),
        (view(InstanceState.SUSPECT), [True]),
        (view(InstanceState.DRAINING, stalled_ms=900), []),
        (view(InstanceState.WARMING, stalled_ms=900), []),
        (view(reachable=False, suspect=1), []),
    ],
)
def test_standing_still_is_reason_enough_for_those_who_can_answer(seen: InstanceView, expected: list[bool]) -> None:
    """Stalled or SUSPECT and reachable; who drains helps itself."""
    assert [source.suspect for source in sources_of([seen], SLO_S, 500)] == expected


def test_an_empty_queue_is_never_listed() -> None:
    """A wedged instance with nothing waiting has nothing to give."""
    seen = view(suspect=1)
    seen.load = LoadReport(suspect=True)

    assert sources_of([seen], SLO_S, 500) == ()
