"""A burst may wait, a queue that stands may not."""

from __future__ import annotations

from dualmap.rpc.admission import CALM_S, FEW, IN_ORDER, Admission


def test_as_many_callers_as_may_wait_in_order_are_never_refused() -> None:
    """Each of 64 comes back at once, for as long as it likes."""
    rule = Admission(most=256, burst_s=0.025)

    assert all(rule.admits(IN_ORDER, now_s) for now_s in range(100))
    assert not rule.overloaded


def test_a_burst_waits_up_to_the_limit() -> None:
    """All of it is taken if it came at once; what is beyond the limit is refused, and no overload is made of it."""
    rule = Admission(most=256, burst_s=0.025)

    taken = [rule.admits(waiting, 1.0) for waiting in range(260)]

    assert taken == [True] * 256 + [False] * 4
    assert not rule.overloaded


def test_a_burst_that_is_worked_off_in_time_is_no_overload() -> None:
    """The clock starts anew once few enough wait."""
    rule = Admission(most=256, burst_s=0.025)

    for now_s in (1.0, 1.02, 1.04, 1.06):
        assert rule.admits(200, now_s)
        assert rule.admits(IN_ORDER, now_s + 0.01)

    assert not rule.overloaded


def test_a_queue_that_stands_is_overload_until_nobody_had_to_be_refused() -> None:
    """Then only a few may wait, so that what is served is served soon."""
    rule = Admission(most=256, burst_s=0.025)
    assert rule.admits(65, 1.0)

    assert not rule.admits(65, 1.03)
    assert not rule.admits(FEW, 1.1)
    assert rule.admits(FEW - 1, 1.1)
    assert not rule.admits(FEW, 1.2)
    assert rule.admits(0, 1.2 + CALM_S)
    assert rule.admits(100, 1.3 + CALM_S)


def test_a_limit_below_the_burst_holds_always() -> None:
    """Whoever sets a small limit gets it."""
    rule = Admission(most=4, burst_s=0.025)

    assert [rule.admits(waiting, 1.0) for waiting in range(6)] == [True] * 4 + [False] * 2
