"""From what a user asks to runs, and back to plain values: workloads, contradictions, the JSON of `dualmap simulate`.

The JSON's schema: docs/results/SCHEMA.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from dualmap.core.errors import DualMapError
from dualmap.core.state import PrefillCost
from dualmap.simulator.arrivals import capacity_bound, ceiling_hit_rate, own_arrivals, poisson_arrivals
from dualmap.simulator.cluster import run_cluster
from dualmap.simulator.goodput import GoodputFigure, Trial, Workload
from dualmap.simulator.registry import policy_named
from dualmap.simulator.report import Measures, measure
from dualmap.simulator.requests import chains_of, sim_requests
from dualmap.simulator.synthetic import synthetic_trace
from dualmap.simulator.trace import OverLong, TraceError, TraceRequest, read_trace

SCHEMA_VERSION = 1


class ContradictionError(DualMapError):
    """Options cannot hold together: give one or the other of those named."""

    reason = "CONTRADICTION"


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    """Which requests. Exactly one of ``trace`` and ``synthetic``."""

    trace: str | None = None
    synthetic: str | None = None
    limit: int | None = None
    max_input: int = 20_480
    over_long: OverLong = "cut"
    skip_bad: bool = False
    warmup: int = 500

    def load(self, on_skip: Callable[[TraceError], None] | None = None) -> Workload:
        """Read or make the requests.

        Raises:
            ContradictionError: both or neither source, or a warm-up that leaves nothing to count.
            TraceError: the file cannot be read.
        """
        if (self.trace is None) == (self.synthetic is None):
            raise ContradictionError("--trace and --synthetic: give exactly one")
        if self.trace is not None:
            requests = read_trace(self.trace, self.limit, self.max_input, self.over_long, self.skip_bad, on_skip)
        else:
            requests = synthetic_trace(str(self.synthetic), self.limit or 5_000, seed=1)
        if self.warmup >= len(requests):
            raise ContradictionError(f"--warmup {self.warmup} leaves none of {len(requests)} requests to count")
        return Workload(self.trace or f"synthetic:{self.synthetic}", requests, self.warmup)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When requests arrive: Poisson at ``rate``, or the trace's own timing (``rate`` None: unscaled)."""

    rate: float | None = None
    own: bool = False
    keep_bursts: bool = False

    def times(self, requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
        """The requests with their times for one seed.

        Raises:
            ContradictionError: Poisson without a rate, or with bursts kept.
        """
        if self.own:
            return own_arrivals(requests, self.rate, spread=not self.keep_bursts, seed=seed)
        if self.keep_bursts:
            raise ContradictionError("--keep-bursts needs --own-timing: Poisson arrivals have no bursts to keep")
        if self.rate is None:
            raise ContradictionError("--rate: Poisson arrivals need one; or give --own-timing")
        return poisson_arrivals(requests, self.rate, seed)


def one_run(workload: Workload, arrivals: Arrivals, trial: Trial, seed: int) -> Measures:
    """One measured run."""
    timed = arrivals.times(workload.requests, seed)
    requests = sim_requests(timed, chains_of(timed), trial.options.ttft_slo_s)
    return measure(run_cluster(requests, policy_named(trial.policy), trial.options), workload.warmup)


def runs(  # noqa: PLR0917 - a table's head
    pool: ProcessPoolExecutor,
    workload: Workload,
    arrivals: Arrivals,
    trials: Sequence[Trial],
    seeds: Sequence[int],
    on_done: Callable[[], None] = lambda: None,
) -> dict[str, list[Measures]]:
    """Every trial with every seed, by label in the order given."""
    futures = {
        trial.label: [pool.submit(one_run, workload, arrivals, trial, seed) for seed in seeds] for trial in trials
    }
    for row in futures.values():
        for future in row:
            future.add_done_callback(lambda _: on_done())
    return {label: [future.result() for future in row] for label, row in futures.items()}


def ceilings(workload: Workload, instances: int, cost: PrefillCost) -> dict[str, float]:
    """What no policy passes: every block computed once with perfect balance, and the hit rate without limit."""
    return {
        "bound": capacity_bound(workload.requests, instances, cost),
        "ceiling": ceiling_hit_rate(workload.requests, workload.warmup),
    }


def runs_json(workload: Workload, found: dict[str, list[Measures]], limits: dict[str, float]) -> dict[str, object]:
    """The JSON of ``dualmap simulate``."""
    return {
        "schema": SCHEMA_VERSION,
        "kind": "runs",
        "trace": workload.name,
        "requests": len(workload.requests),
        "warmup": workload.warmup,
        **limits,
        "policies": {
            label: {"by_seed": [one.as_dict() for one in measures], "mean": means(measures)}
            for label, measures in found.items()
        },
    }


def means(measures: Sequence[Measures]) -> dict[str, float]:
    """Mean over the seeds of every scalar measure."""
    rows = [one.as_dict() for one in measures]
    names = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    return {name: sum(float(str(row[name])) for row in rows) / len(rows) for name in names}


def goodput_json(
    workload: Workload, figures: Sequence[GoodputFigure], limits: dict[str, float], target: float, fair: bool
) -> dict[str, object]:
    """The JSON of ``dualmap simulate goodput``."""
    return {
        "schema": SCHEMA_VERSION,
        "kind": "goodput",
        "trace": workload.name,
        "requests": len(workload.requests),
        "warmup": workload.warmup,
        "attainment": target,
        "fair": fair,
        **limits,
        "policies": {
            figure.label: {
                "goodput": round(figure.goodput, 4),
                "range": [round(value, 4) for value in figure.spread],
                "by_seed": [round(value, 4) for value in figure.by_seed],
            }
            for figure in figures
        },
    }
