"""What independent bookers and older polls cost: hit rate, attainment and CV in the simulator, at the capacity bound.

    python bench/blindness.py TRACE [--rate 8.1] [--limit 4500] [--seeds 3] [--bookers 1,8] [--json FILE]

The production decisions of `dualmap.core` in virtual time; a booker is a router with its own view and bookings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dualmap.simulator.goodput import Trial, Workload
from dualmap.simulator.options import AS_BUILT, ClusterOptions
from dualmap.simulator.study import Arrivals, WorkloadChoice, means, one_run

BOOKERS = "1,2,4,8"
POLLS_MS = (50, 100, 250, 1_000)
MEASURES = ("hit_rate", "attainment", "fair_attainment", "load_cv", "ttft_p50_s")


def cell(workload: Workload, rate: float, bookers: int, poll_ms: int, seeds: Sequence[int]) -> dict[str, float]:
    """Means over the seeds for one number of bookers and one poll period."""
    options = ClusterOptions(control=replace(AS_BUILT, poll_s=poll_ms / 1_000, routers=bookers))
    trial = Trial(f"{bookers} bookers, {poll_ms} ms", "dualmap", options)
    measured = means([one_run(workload, Arrivals(rate), trial, seed) for seed in seeds])
    return {name: measured[name] for name in MEASURES}


def main() -> None:
    """One line a cell, as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a file, or synthetic:bursts")
    parser.add_argument("--rate", type=float, default=8.1, help="requests a second; absent, the bound at 8 instances")
    parser.add_argument("--limit", type=int, default=4_500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bookers", default=BOOKERS, help="numbers of bookers, separated by commas")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kind = given.trace.removeprefix("synthetic:")
    choice = WorkloadChoice(trace=given.trace) if kind == given.trace else WorkloadChoice(synthetic=kind)
    workload = replace(choice, limit=given.limit).load()
    seeds = range(1, given.seeds + 1)
    found: list[dict[str, float]] = []
    for poll_ms in POLLS_MS:
        for bookers in map(int, given.bookers.split(",")):
            measured = cell(workload, given.rate, bookers, poll_ms, seeds)
            found.append({"bookers": bookers, "poll_ms": poll_ms, **measured})
            sys.stdout.write("  ".join(f"{name} {value:.4g}" for name, value in found[-1].items()) + "\n")
            sys.stdout.flush()
            if given.json is not None:
                given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
