"""The measured cost of prefills: from the engine's times, our clock, the engine's counters; never from junk."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dualmap.core.engine_model import EngineModel, EngineOptions, FirstToken
from dualmap.core.state import PrefillCost
from services.instanceagent.measured_cost import MeasuredCost
from tests.services.instanceagent.cluster import cluster, submission, submit

BELIEVED = PrefillCost(0.02, 0.000_16)
REAL = PrefillCost(0.02, 0.000_4)
SIZES = ((500, 500), (2_000, 2_000), (8_000, 8_000), (1_000, 12_000))


def jobs(count: int, seed: int = 1) -> Iterator[tuple[int, int]]:
    draw = random.Random(seed)
    for _ in range(count):
        context = draw.randint(300, 12_000)
        yield draw.randint(64, context), context


def assert_close(cost: PrefillCost, real: PrefillCost, rel: float) -> None:
    for miss, context in SIZES:
        assert cost.seconds(miss, context) == pytest.approx(real.seconds(miss, context), rel=rel)


def serve_one_by_one(measured: MeasuredCost, real: PrefillCost, count: int, jitter: float = 0.0) -> None:
    """An engine that tells no times, always with the next job staged behind the present one."""
    draw = random.Random(2)
    now_ms = 0.0
    work = list(jobs(count))
    measured.staged(0, now_ms)
    for number, (miss, context) in enumerate(work):
        measured.staged(number + 1, now_ms)
        now_ms += 1_000 * real.seconds(miss, context) * (1 + jitter * draw.uniform(-1, 1))
        measured.first_token(number, (miss, context), None, now_ms)
    measured.settle(now_ms + 1_000)


@pytest.mark.parametrize("factor", [0.1, 0.25, 0.4, 2.5, 10.0])
def test_a_wrong_configuration_is_outlived(factor: float) -> None:
    """Whatever was configured, 60 prefills later it is right within a tenth."""
    real = PrefillCost(BELIEVED.a_s * factor, BELIEVED.b_s_per_token * factor)
    measured = MeasuredCost(BELIEVED)
    for number, (miss, context) in enumerate(jobs(60)):
        measured.staged(number, 0.0)
        measured.first_token(number, (miss, context), real.seconds(miss, context), 0.0)

    assert_close(measured.cost(0), real, 0.1)


def test_an_engine_that_tells_no_times_is_measured_by_our_clock() -> None:
    """What waits in the engine behind another job is not counted as its own prefill."""
    measured = MeasuredCost(BELIEVED)
    serve_one_by_one(measured, REAL, 200, jitter=0.1)

    assert_close(measured.cost(0), REAL, 0.1)


def test_a_batch_is_measured_as_one() -> None:
    """Eight prompts whose first tokens come out of one step cost its time once, not eight times."""
    measured = MeasuredCost(BELIEVED)
    now_ms, number = 0.0, 0
    work = list(jobs(800))
    for begin in range(0, len(work), 8):
        batch = work[begin : begin + 8]
        for offset in range(8):
            measured.staged(number + offset, now_ms)
        now_ms += sum(1_000 * REAL.seconds(miss, context) for miss, context in batch)
        for miss, context in batch:
            measured.first_token(number, (miss, context), None, now_ms)
            number += 1
    measured.settle(now_ms + 1_000)

    assert_close(measured.cost(0), REAL, 0.1)


def test_a_fast_engine_that_batches_equal_prompts_is_learnt_soon() -> None:
    """Configured 0.16 ms a token, really a sixteenth, all prompts alike: 100 steps later within a quarter."""
    measured = MeasuredCost(BELIEVED)
    now_ms = 0.0
    for step in range(100):
        numbers = range(step * 16, step * 16 + 16)
        for number in numbers:
            measured.staged(number, now_ms)
        now_ms += 100.0
        for number in numbers:
            measured.first_token(number, (500, 500), None, now_ms)
    measured.settle(now_ms + 1_000)

    assert measured.cost(0).seconds(500, 500) == pytest.approx(0.1 / 16, rel=0.25)


def test_idle_time_is_no_prefill() -> None:
    """An engine that had nothing to do was not slow."""
    measured = MeasuredCost(BELIEVED)
    now_ms = 0.0
    for number, (miss, context) in enumerate(jobs(100)):
        now_ms += 60_000
        measured.staged(number, now_ms)
        now_ms += 1_000 * REAL.seconds(miss, context)
        measured.first_token(number, (miss, context), None, now_ms)

    assert_close(measured.cost(0), REAL, 0.05)


def test_a_prefill_given_up_spoils_its_time_only() -> None:
    """Nobody knows how much of it went into the cancelled one: that sample is refused and counted."""
    measured = MeasuredCost(REAL)
    measured.staged(1, 0.0)
    measured.staged(2, 0.0)
    measured.gone(1)
    measured.first_token(2, (1_000, 1_000), None, 3_000.0)
    measured.settle(4_000.0)

    assert measured.refused == 1
    assert measured.cost(0).samples == 0


def test_few_or_odd_samples_do_not_take_over() -> None:
    """One stall of a minute as the very first sample may triple the estimate, no more; good ones repair it."""
    measured = MeasuredCost(REAL)
    measured.staged(0, 0.0)
    measured.first_token(0, (2_000, 2_000), 60.0, 0.0)
    assert measured.cost(0).seconds(2_000, 2_000) < 3.1 * REAL.seconds(2_000, 2_000)
    for number, (miss, context) in enumerate(jobs(100)):
        measured.first_token(number + 1, (miss, context), REAL.seconds(miss, context), 0.0)

    assert_close(measured.cost(0), REAL, 0.1)


def test_decoding_beside_it_is_told_apart_from_the_cost_of_a_token() -> None:
    """Prefills beside 0 to 100 sequences: the slow-down goes with their number and not into the cost at rest."""
    measured = MeasuredCost(BELIEVED)
    draw = random.Random(5)
    for number, (miss, context) in enumerate(jobs(600)):
        running = draw.randint(0, 100)
        measured.runs(running)
        measured.first_token(number, (miss, context), BELIEVED.seconds(miss, context) * (1 + 0.01 * running), 0.0)

    assert_close(measured.cost(0), BELIEVED, 0.1)
    assert measured.cost(100).seconds(4_000, 4_000) == pytest.approx(2 * BELIEVED.seconds(4_000, 4_000), rel=0.1)


def test_a_constant_crowd_of_decodes_is_part_of_the_cost() -> None:
    """Where the load never varies there is nothing to tell apart, and the prediction is right all the same."""
    measured = MeasuredCost(BELIEVED)
    measured.runs(80)
    for number, (miss, context) in enumerate(jobs(200)):
        measured.first_token(number, (miss, context), BELIEVED.seconds(miss, context) * 1.8, 0.0)

    assert measured.cost(80).seconds(4_000, 4_000) == pytest.approx(1.8 * BELIEVED.seconds(4_000, 4_000), rel=0.05)


def test_the_engines_own_counters_go_before_our_clock() -> None:
    """Once it counts, our times (which hold its queue) teach nothing, and its sums do."""
    measured = MeasuredCost(BELIEVED)
    measured.counted(0, 0.0)
    work = list(jobs(400))
    for begin in range(0, len(work), 4):
        some = work[begin : begin + 4]
        for offset, (miss, context) in enumerate(some):
            measured.staged(begin + offset, 0.0)
            measured.first_token(begin + offset, (miss, context), None, 1e6 * begin)
        measured.counted(sum(miss for miss, _ in some), sum(REAL.seconds(*job) for job in some))

    assert_close(measured.cost(0), REAL, 0.1)


def test_the_simulated_engine_is_learnt_whatever_is_believed_of_it() -> None:
    """Configured 0.16 ms a token, really 0.4: within 5 % after 40 prefills of the engine model itself."""
    model = EngineModel(EngineOptions(cost=REAL))
    measured = MeasuredCost(BELIEVED)
    now_s = 0.0
    for number, (miss, _) in enumerate(jobs(40)):
        measured.staged(number, now_s * 1_000)
        hashes = tuple(range(number * 1_000, number * 1_000 + miss // 128))
        model.stage(str(number), hashes, 128, miss, 1, now_s)
        now_s += 30.0
        first = next(event for event in model.advance(now_s) if isinstance(event, FirstToken))
        measured.first_token(number, (miss - first.hit_tokens, miss), first.prefill_s, first.at_s * 1_000)

    assert_close(measured.cost(0), REAL, 0.05)


async def test_an_agent_reports_what_it_measured() -> None:
    """Expected 16 µs a token, really 40: the load report that routers predict by has the truth."""
    engine = {"prefill_us_per_token": 40.0, "expected_prefill_us_per_token": 16.0, "prefill_ms": 2.0}
    async with cluster("a", engine=engine) as built:
        assert built.instance("a").load().cost.b_s_per_token == pytest.approx(16e-6)
        stub = built.stub("a")
        for seed in range(30):
            await submit(stub, submission(f"r{seed}", seed=seed + 1, count=400 * (1 + seed % 5))).end()
        cost = built.instance("a").load().cost

    assert cost.samples >= 25
    assert cost.b_s_per_token == pytest.approx(40e-6, rel=0.1)
