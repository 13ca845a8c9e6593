"""Goodput: the highest arrival rate at which enough requests meet their objective, by bisection over seeded runs.

Runs are spread over processes; the same arguments give the same figures on any number of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from dualmap.core.blocks import Chain
from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.cluster import RunResult, run_cluster
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.registry import policy_named
from dualmap.simulator.report import Measures, measure, time_line
from dualmap.simulator.requests import SimRequest, chains_of, sim_requests
from dualmap.simulator.trace import TraceRequest
from dualmap.simulator.verdict import Verdict

SEEDS = (1, 2, 3, 4, 5)
TOLERANCE = 0.01
START_SHARE = 0.8
"""First guess of a bisection as a share of the bound."""

_WIDEST = 64.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests without times, and how many of them only warm the caches."""

    name: str
    requests: Sequence[TraceRequest]
    warmup: int = 500


@dataclass(frozen=True, slots=True)
class Trial:
    """One policy under one set of options."""

    label: str
    policy: str
    options: ClusterOptions = field(default_factory=ClusterOptions)


_LOADED: dict[str, tuple[Workload, list[Chain]]] = {}


def load_workloads(workloads: Sequence[Workload]) -> None:
    """Hash the chains once a process."""
    for workload in workloads:
        _LOADED[workload.name] = (workload, chains_of(workload.requests))


def requests_at(workload_name: str, trial: Trial, rate: float, seed: int) -> list[SimRequest]:
    """A run's requests, with Poisson arrivals; the workload must have been loaded in this process."""
    workload, chains = _LOADED[workload_name]
    arrived = poisson_arrivals(workload.requests, rate, seed)
    return sim_requests(arrived, chains, trial.options.ttft_slo_s)


def run_at(workload_name: str, trial: Trial, rate: float, seed: int) -> RunResult:
    """One run of them to its end."""
    requests = requests_at(workload_name, trial, rate, seed)
    return run_cluster(requests, policy_named(trial.policy), trial.options)


def measure_at(workload_name: str, trial: Trial, rate: float, seed: int) -> Measures:
    """One run, measured."""
    return measure(run_at(workload_name, trial, rate, seed), _LOADED[workload_name][0].warmup)


def attains_at(  # noqa: PLR0917 - one row of a table
    workload_name: str, trial: Trial, rate: float, seed: int, target: float, fair: bool
) -> bool:
    """Whether one run attains ``target``; played only as long as that is open."""
    warmup = _LOADED[workload_name][0].warmup
    requests = requests_at(workload_name, trial, rate, seed)
    final = all(entry.happening != "fail" for entry in trial.options.timetable)
    verdict = Verdict(requests, warmup, target, fair=fair, final=final)
    answer: bool | None = None

    def decided(now_s: float) -> bool:
        nonlocal answer
        answer = verdict.at(now_s)
        return answer is not None

    result = run_cluster(requests, policy_named(trial.policy), trial.options, decided)
    if answer is None:
        found = measure(result, warmup)
        answer = (found.fair_attainment if fair else found.attainment) >= target
    return answer


def time_line_at(
    workload_name: str, trial: Trial, rate: float, seed: int, bin_s: float
) -> list[tuple[float, float, int]]:
    """Attainment over the time of one run."""
    return time_line(run_at(workload_name, trial, rate, seed), bin_s)


def goodput(  # noqa: PLR0917 - one row of a table
    workload_name: str, trial: Trial, target: float, fair: bool, start: float, seed: int
) -> float:
    """Highest rate, requests a second, with at least ``target`` in time (``fair``: in every quartile), to 1 %.

    ``start`` is a first guess. Attainment is taken to fall with the rate; 0 where no rate within a factor of 64 below
    the guess attains it.
    """

    def attains(rate: float) -> bool:
        return attains_at(workload_name, trial, rate, seed, target, fair)

    low, high = _bracket(attains, start)
    while low > 0 and high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        if attains(middle):
            low = middle
        else:
            high = middle
    return low


def _bracket(attains: Callable[[float], bool], start: float) -> tuple[float, float]:
    low, high = start, start
    factor = 1.15
    if attains(start):
        while high < start * _WIDEST:
            high = low * factor
            if not attains(high):
                return low, high
            low = high
        return low, low
    while low > start / _WIDEST:
        low = high / factor
        if attains(low):
            return low, high
        high = low
        factor *= 1.1
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class GoodputFigure:
    """Goodput of one trial: mean over the seeds and their range."""

    label: str
    goodput: float
    by_seed: tuple[float, ...]

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest seed."""
        return min(self.by_seed), max(self.by_seed)


@contextmanager
def worker_pool(workloads: Sequence[Workload], workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that hold the workloads; 0 workers: as many as cores."""
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, initializer=load_workloads, initargs=(workloads,)) as pool:
        try:
            yield pool
        except BaseException:
            # Leaving waits for what runs; what only waits its turn is nobody's any more.
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def goodputs(  # noqa: PLR0917 - a table's head
    pool: ProcessPoolExecutor,
    workload_name: str,
    trials: Sequence[Trial],
    target: float,
    fair: bool,
    start: float,
    seeds: Sequence[int] = SEEDS,
    on_done: Callable[[], None] = lambda: None,
) -> list[GoodputFigure]:
    """Goodput of every trial, all seeds, spread over the pool."""
    futures = [
        [pool.submit(goodput, workload_name, trial, target, fair, start, seed) for seed in seeds] for trial in trials
    ]
    for row in futures:
        for future in row:
            future.add_done_callback(lambda _: on_done())
    figures = []
    for trial, row in zip(trials, futures, strict=True):
        by_seed = tuple(future.result() for future in row)
        figures.append(GoodputFigure(trial.label, sum(by_seed) / len(by_seed), by_seed))
    return figures
