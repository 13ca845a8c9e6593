"""A pool that grows and shrinks under load."""

from __future__ import annotations

import pytest

from dualmap.cli.bench_scaling import ScalingOptions, scale_live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_a_pool_grows_and_shrinks_under_load_and_no_request_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 to 5 to 3: nothing fails, about 2/n of the pairs move, drained ones leave empty, attainment returns."""
    monkeypatch.delenv("DUALMAP_REDIS__URL", raising=False)

    figures = await scale_live(ScalingOptions(few=3, many=5, share=0.4, phase_s=5.0, window_s=4.0))

    assert figures.failed == 0, figures.errors
    assert figures.requests > 300
    assert [change.instances for change in figures.changes] == [4, 5, 5, 4]
    for change in figures.changes:
        assert change.moved_share == pytest.approx(change.expected_share, rel=0.1), change
        assert change.left_waiting == 0, change
    assert figures.windows[-1].attainment >= 0.9
