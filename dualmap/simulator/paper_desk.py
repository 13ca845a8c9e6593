"""What the sections of `dualmap simulate paper` ask for runs and goodputs with, and how much is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualmap.core.state import PrefillCost
from dualmap.simulator.arrivals import capacity_bound
from dualmap.simulator.goodput import SEEDS, START_SHARE, GoodputFigure, Trial, Workload
from dualmap.simulator.kept import Job, Runner
from dualmap.simulator.options import COST_7B
from dualmap.simulator.report import Measures

INSTANCES = 8

Asked = dict[str, list[Future[Any]]]


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is run. ``quick``: the same set on shorter traces, without what only repeats a row elsewhere."""

    sections: Sequence[str]
    quick: bool = False
    seeds: Sequence[int] = SEEDS
    peers: Sequence[str] = ()
    """Policies of others' packages that are installed."""


class Desk:
    """Workloads by name, their bounds, and the runner."""

    def __init__(self, runner: Runner, workloads: Sequence[Workload], folder: Path, extent: Extent) -> None:
        self._runner = runner
        self.workloads = {one.name: one for one in workloads}
        self.folder = folder
        self.extent = extent
        self.bounds = {name: self.bound(name, COST_7B) for name in self.workloads}

    @property
    def chosen(self) -> list[str]:
        """The workloads of sections that a quick call shows on one alone."""
        return list(self.workloads)[: 1 if self.extent.quick else None]

    def bound(self, name: str, cost: PrefillCost) -> float:
        """Rate that fills eight instances when every block is computed once."""
        return capacity_bound(self.workloads[name].requests, INSTANCES, cost)

    def rate(self, name: str, share: float) -> float:
        """A share of the bound, to three places: so that a command can say the very rate."""
        return round(self.bounds[name] * share, 3)

    def runs(self, name: str, trials: Sequence[Trial], rate: float) -> Asked:
        """Ask for every trial with every seed."""
        return {one.label: [self._ask("run", name, one, rate, seed) for seed in self.extent.seeds] for one in trials}

    def goodputs(self, name: str, trials: Sequence[Trial], target: float, *, fair: bool) -> Asked:
        """Ask for every trial's goodput with every seed."""
        start = self.bounds[name] * START_SHARE
        return {
            one.label: [
                self._runner.ask(Job("goodput", name, one, start, seed, target, fair)) for seed in self.extent.seeds
            ]
            for one in trials
        }

    def time_line(self, name: str, trial: Trial, rate: float) -> Future[Any]:
        """Ask for attainment over the time of one run."""
        return self._ask("time_line", name, trial, rate, self.extent.seeds[0])

    def _ask(self, kind: Any, name: str, trial: Trial, rate: float, seed: int) -> Future[Any]:
        return self._runner.ask(Job(kind, name, trial, rate, seed))


def measures(asked: Asked) -> dict[str, list[Measures]]:
    """Wait for runs."""
    return {label: [Measures.from_dict(future.result()) for future in row] for label, row in asked.items()}


def figures(asked: Asked) -> dict[str, GoodputFigure]:
    """Wait for goodputs."""
    found = {}
    for label, row in asked.items():
        by_seed = tuple(float(future.result()) for future in row)
        found[label] = GoodputFigure(label, sum(by_seed) / len(by_seed), by_seed)
    return found


def spread(values: Sequence[float]) -> str:
    """Mean and range of seeds."""
    mean = sum(values) / len(values)
    return f"{mean:.3f} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else f"{mean:.3f}"


def best(found: Mapping[str, float]) -> str:
    """Label of the highest; ties by label."""
    return max(found, key=lambda label: (found[label], label))
