"""The learnt cost of a prefill: it finds the truth, forgets, and believes nothing impossible."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.core.cost import CostFit
from dualmap.core.state import PrefillCost


def _feed(fit: CostFit, truth: PrefillCost, samples: int, noise: float = 0.0, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(samples):
        context = draw.randint(200, 20_000)
        miss = draw.randint(0, context)
        fit.observe(miss, context, truth.seconds(miss, context) * (1 + noise * draw.uniform(-1, 1)))


def test_before_any_sample_it_is_the_configured_cost() -> None:
    """Start from configuration; samples say how much it rests on."""
    initial = PrefillCost(0.05, 0.000_2, 1e-9, samples=77)

    assert CostFit(initial).cost == PrefillCost(0.05, 0.000_2, 1e-9, 0)


@pytest.mark.parametrize(
    "truth",
    [PrefillCost(0.02, 0.000_16, 0.0), PrefillCost(0.05, 0.000_08, 2e-9), PrefillCost(0.0, 0.001, 0.0)],
)
def test_it_finds_the_true_cost_under_noise(truth: PrefillCost) -> None:
    """After 500 noisy prefills every size is predicted within 10 %."""
    fit = CostFit(PrefillCost())
    _feed(fit, truth, 500, noise=0.1)

    assert fit.cost.samples == 500
    for miss, context in ((2_000, 2_000), (500, 16_000), (20_000, 20_000)):
        assert fit.cost.seconds(miss, context) == pytest.approx(truth.seconds(miss, context), rel=0.1)


def test_it_follows_an_engine_that_slows_down() -> None:
    """Old samples fade: after a change it is right again."""
    fit = CostFit(PrefillCost())
    _feed(fit, PrefillCost(0.02, 0.000_1), 1_000)
    _feed(fit, PrefillCost(0.02, 0.000_4), 1_000, seed=2)

    assert fit.cost.seconds(8_000, 8_000) == pytest.approx(3.22, rel=0.05)


def test_one_wild_time_does_not_overturn_it() -> None:
    """A stall of minutes counts as at most eight times the prediction."""
    fit = CostFit(PrefillCost())
    _feed(fit, PrefillCost(), 200)
    before = fit.cost.seconds(4_000, 4_000)

    fit.observe(4_000, 4_000, 600.0)

    assert fit.cost.seconds(4_000, 4_000) < before * 1.1


def test_only_cached_prompts_teach_nothing_about_tokens() -> None:
    """Without misses the cost of a token stays as configured, however long it lasts."""
    fit = CostFit(PrefillCost())
    for _ in range(5_000):
        fit.observe(0, 4_000, 0.03)

    assert fit.cost.a_s == pytest.approx(0.03, rel=0.05)
    assert fit.cost.b_s_per_token == pytest.approx(0.000_16, rel=0.3)


@pytest.mark.parametrize(
    ("miss", "context", "seconds"),
    [(10, 5, 1.0), (-1, 5, 1.0), (1, 5, 0.0), (1, 5, -1.0), (1, 5, float("nan")), (1, 5, float("inf"))],
)
def test_the_impossible_is_refused(miss: int, context: int, seconds: float) -> None:
    """It neither counts nor changes anything."""
    fit = CostFit(PrefillCost())

    assert not fit.observe(miss, context, seconds)
    assert fit.cost == PrefillCost()


@given(st.lists(st.tuples(st.integers(0, 30_000), st.integers(0, 100_000), st.floats(1e-4, 100)), max_size=40))
def test_whatever_is_measured_more_work_never_costs_less(samples: list[tuple[int, int, float]]) -> None:
    """No negative term: a prediction grows with the miss and with the context."""
    fit = CostFit(PrefillCost())
    for miss, more, seconds in samples:
        fit.observe(miss, miss + more, seconds)
    cost = fit.cost

    assert min(cost.a_s, cost.b_s_per_token, cost.c_s_per_token2) >= 0
    assert 0 <= cost.seconds(0, 100) < cost.seconds(1_000, 1_000) <= cost.seconds(1_000, 9_000)
