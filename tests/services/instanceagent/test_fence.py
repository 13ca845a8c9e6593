"""Whose orders an agent follows."""

from __future__ import annotations

import pytest

from dualmap.core.errors import StaleLeader
from services.instanceagent.fence import FENCE_MS, Fence


def test_a_past_leader_is_refused_and_an_operator_is_not() -> None:
    """The highest epoch heard is followed; an order without epoch changes nothing."""
    fence = Fence()
    fence.pass_in(7, 0.0)
    fence.pass_in(0, 1.0)
    with pytest.raises(StaleLeader):
        fence.pass_in(6, 2.0)
    fence.pass_in(7, 3.0)
    fence.pass_in(8, 4.0)
    with pytest.raises(StaleLeader):
        fence.pass_in(7, 5.0)


def test_an_epoch_far_above_all_does_not_lock_the_rebalancer_out_for_ever() -> None:
    """It holds while it is heard and a stated time beyond; a refused order does not prolong it."""
    fence = Fence()
    fence.pass_in(1 << 63, 0.0)
    for at_ms in (1.0, FENCE_MS - 1):
        with pytest.raises(StaleLeader):
            fence.pass_in(8, at_ms)
    fence.pass_in(8, FENCE_MS)
    with pytest.raises(StaleLeader):
        fence.pass_in(7, FENCE_MS + 1)
