"""Goodput by bisection, and the values the command writes."""

from __future__ import annotations

import json

import pytest

from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.goodput import (
    Trial,
    Workload,
    attains_at,
    goodput,
    goodputs,
    load_workloads,
    measure_at,
    worker_pool,
)
from dualmap.simulator.options import COST_7B, ClusterOptions
from dualmap.simulator.requests import chains_of, sim_requests
from dualmap.simulator.study import (
    Arrivals,
    ContradictionError,
    WorkloadChoice,
    ceilings,
    goodput_json,
    runs,
    runs_json,
)
from dualmap.simulator.synthetic import synthetic_trace
from dualmap.simulator.verdict import Verdict

SMALL = Workload("small", synthetic_trace("skew", 250, 1), 50)
OURS = Trial("dualmap", "dualmap", ClusterOptions(instances=2))


def test_the_rate_found_attains_whatever_the_first_guess() -> None:
    """The answer attains the target; another guess ends nearby, as far as attainment falls with the rate."""
    load_workloads([SMALL])
    found = goodput("small", OURS, 0.9, False, 3.0, 1)

    assert measure_at("small", OURS, found, 1).attainment >= 0.9
    assert goodput("small", OURS, 0.9, False, found * 3, 1) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("policy", ["dualmap", "min_ttft", "round_robin", "ceiling_central"])
@pytest.mark.parametrize("fair", [True, False])
def test_a_run_stopped_early_answers_as_the_whole_run(policy: str, fair: bool) -> None:
    """Bisection plays a run only until its answer is certain; the answer is the same."""
    load_workloads([SMALL])
    one = Trial(policy, policy, ClusterOptions(instances=2))
    answers = set()
    for rate in (1.0, 2.0, 3.0, 4.0, 8.0):
        whole = measure_at("small", one, rate, 1)
        truth = (whole.fair_attainment if fair else whole.attainment) >= 0.9
        assert attains_at("small", one, rate, 1, 0.9, fair) == truth
        answers.add(truth)

    assert answers == {True, False}


def test_a_hopeless_run_is_given_up_as_soon_as_it_is_certain() -> None:
    """Whoever missed after their deadline decide; nobody is counted before it, nor the warm-up."""
    made = poisson_arrivals(SMALL.requests, 5.0, 1)
    requests = sim_requests(made, chains_of(made), 5.0)
    verdict = Verdict(requests, SMALL.warmup, 0.9, fair=False)

    assert verdict.at(requests[SMALL.warmup].deadline_s) is None
    assert verdict.at(requests[SMALL.warmup + 20].deadline_s) is None, "20 of 200 may miss"
    assert verdict.at(requests[SMALL.warmup + 21].deadline_s) is False


def test_figures_do_not_depend_on_the_processes() -> None:
    """In a pool and here: the same."""
    load_workloads([SMALL])
    here = goodput("small", OURS, 0.9, True, 3.0, 2)
    with worker_pool([SMALL], 1) as pool:
        (figure,) = goodputs(pool, "small", [OURS], 0.9, True, 3.0, seeds=(2,))

    assert figure.by_seed == (here,)
    limits = ceilings(SMALL, 2, COST_7B)
    written = json.loads(json.dumps(goodput_json(SMALL, [figure], limits, 0.9, True)))
    assert written["bound"] > 0
    assert written["policies"]["dualmap"]["range"] == [round(here, 4)] * 2


def test_runs_are_written_with_their_means() -> None:
    """Each seed's measures and their mean, under the label asked for."""
    with worker_pool((), 1) as pool:
        found = runs(pool, SMALL, Arrivals(rate=3.0), [OURS], (1, 2))
    written = json.loads(json.dumps(runs_json(SMALL, found, ceilings(SMALL, 2, COST_7B))))

    row = written["policies"]["dualmap"]
    assert len(row["by_seed"]) == 2
    assert row["mean"]["attainment"] == pytest.approx(sum(one["attainment"] for one in row["by_seed"]) / 2)


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        (WorkloadChoice(), "--trace"),
        (WorkloadChoice(trace="a", synthetic="skew"), "--synthetic"),
        (WorkloadChoice(synthetic="skew", limit=100, warmup=100), "--warmup"),
    ],
)
def test_contradictory_workloads_are_refused_by_name(choice: WorkloadChoice, named: str) -> None:
    """The option is in the message."""
    with pytest.raises(ContradictionError, match=named):
        choice.load()


def test_contradictory_arrivals_are_refused_by_name() -> None:
    """Poisson needs a rate and has no bursts."""
    with pytest.raises(ContradictionError, match="--rate"):
        Arrivals().times(SMALL.requests, 1)
    with pytest.raises(ContradictionError, match="--keep-bursts"):
        Arrivals(rate=1.0, keep_bursts=True).times(SMALL.requests, 1)
