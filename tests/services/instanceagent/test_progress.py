"""What an engine was given and whether it gets on."""

from __future__ import annotations

from services.instanceagent.progress import Progress, StagedJob

JOB = StagedJob(charge_tokens=1_000, miss_tokens=900, prefill_s=0.2)


def test_rest_shrinks_with_time_but_not_below_what_has_not_begun() -> None:
    """Two jobs of 0.2 s: 0.4 s at first, 0.3 s after 0.1 s, never under the second's 0.2 s without a first token."""
    progress = Progress(2_000)
    progress.stage(1, JOB, 1_000)
    progress.stage(2, JOB, 1_000)
    assert [round(progress.rest_s(at), 3) for at in (1_000, 1_100, 5_000)] == [0.4, 0.3, 0.2]
    assert (progress.staged_tokens, progress.staged_miss_tokens) == (2_000, 1_800)
    progress.first_token(1, 1_200)
    assert (progress.staged, progress.running, round(progress.rest_s(1_200), 3)) == (1, 1, 0.2)


def test_a_slow_step_is_no_stall() -> None:
    """Stalled only beyond twice the predicted step and 500 ms; suspect beyond the stated time."""
    progress = Progress(2_000)
    progress.stage(1, StagedJob(20_000, 20_000, 3.0), 0)
    assert progress.stalled_ms(5_900) == 0
    assert progress.stalled_ms(6_100) == 6_100
    assert not progress.suspect(5_900)
    assert progress.suspect(6_100)
    progress.moved(6_100)
    assert progress.stalled_ms(6_200) == 0


def test_an_idle_engine_is_never_stalled() -> None:
    """Silence without work means nothing, and a first job after it starts the clock anew."""
    progress = Progress(2_000)
    assert not progress.suspect(1e9)
    progress.stage(1, JOB, 1e9)
    assert progress.stalled_ms(1e9 + 400) == 0
    progress.gone(1, 1e9 + 400, progress=False)
    assert not progress.busy
    assert progress.staged_tokens == 0


def test_tokens_of_those_that_run_do_not_make_the_prefill_longer() -> None:
    """A prefill's rest shrinks from when it began, whatever the engine shows meanwhile, and a cancel starts anew."""
    progress = Progress(2_000)
    progress.stage(1, JOB, 0)
    progress.first_token(1, 100)
    progress.stage(2, JOB, 100)
    progress.stage(3, JOB, 150)
    progress.moved(250)
    assert round(progress.rest_s(250), 3) == 0.25
    progress.started(200)
    assert round(progress.rest_s(250), 3) == 0.35
    progress.gone(2, 250, progress=False)
    assert round(progress.rest_s(300), 3) == 0.15
