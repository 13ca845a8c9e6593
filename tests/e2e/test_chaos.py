"""One seed of chaos, short enough for every change; `make chaos` tries more of them."""

from __future__ import annotations

import pytest

from dualmap.cli.chaos_plan import Act, PlanOptions, plan_faults
from dualmap.cli.chaos_run import ChaosOptions, run_seed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SEED = 1
FAULTS = 6


def test_a_seed_replays_its_faults() -> None:
    """Equal seeds give equal plans; over some seeds every role is killed and paused; no role is hurt twice at once."""
    options = PlanOptions()
    plans = [plan_faults(seed, options) for seed in range(20)]

    assert plans == [plan_faults(seed, options) for seed in range(20)]
    assert len({(fault.role, fault.act) for plan in plans for fault in plan}) == 6 * len(Act)
    for plan in plans:
        for one, other in ((a, b) for a in plan for b in plan if a is not b and a.role == b.role):
            assert other.at_s > one.at_s + one.lasts_s or one.at_s > other.at_s + other.lasts_s


async def test_callers_notice_nothing_of_a_seed_of_chaos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Route never fails, nothing not begun is lost, nothing is answered twice, and then all views are equal."""
    monkeypatch.delenv("DUALMAP_REDIS__URL", raising=False)
    lines: list[str] = []

    result = await run_seed(SEED, ChaosOptions(PlanOptions(faults=FAULTS)), lines.append)

    assert not result.problems, "\n".join([*result.problems, *lines])
    assert len(result.seen) > 50
    assert result.agreed_after_s is not None
