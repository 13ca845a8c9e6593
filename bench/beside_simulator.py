"""The simulator with what `dualmap replay` runs with: start depth 2, one router, decodes that slow prefills.

    python bench/beside_simulator.py TRACE [--rate 3.4] [--limit 600] [--instances 4] [--message-ms 15] [--poll-ms 100]

One line a queue order and binding, the same requests at the same times as the replay of the same seed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Literal

from dualmap.core.state import QueuePolicy
from dualmap.simulator.goodput import Trial
from dualmap.simulator.options import EXACT, ClusterOptions, simulated_engine
from dualmap.simulator.study import Arrivals, WorkloadChoice, one_run

Binding = Literal["early", "late"]
RUNS: tuple[tuple[QueuePolicy, Binding], ...] = (
    (QueuePolicy.SLO, "early"),
    (QueuePolicy.FIFO, "early"),
    (QueuePolicy.HIT_FIRST, "early"),
    (QueuePolicy.SLO, "late"),
)


def options_of(asked: argparse.Namespace, queue: QueuePolicy, binding: Binding) -> ClusterOptions:
    """As the local cluster of a replay is set."""
    control = replace(
        EXACT,
        poll_s=asked.poll_ms / 1_000,
        message_s=asked.message_ms / 1_000,
        fit_cost=True,
        start_depth=2,
    )
    engine = simulated_engine(decode_tokens_per_s=40.0, prefill_slowdown_per_running=0.001)
    return ClusterOptions(
        instances=asked.instances, engine=engine, control=control, queue=queue, binding=binding, max_wait_s=60.0
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--rate", type=float, default=3.4)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--poll-ms", type=float, default=100.0)
    parser.add_argument("--message-ms", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    workload = WorkloadChoice(trace=asked.trace, limit=asked.limit, warmup=0).load()
    sys.stdout.write("queue      binding  in SLO    hit  p50 s   p90 s   p99 s  moved pulled failed\n")
    for queue, binding in RUNS:
        trial = Trial(queue.name, "dualmap", options_of(asked, queue, binding))
        got = one_run(workload, Arrivals(asked.rate), trial, asked.seed)
        sys.stdout.write(
            f"{queue.name.lower():<10} {binding:<7} {got.attainment:7.3f} {got.hit_rate:6.3f} {got.ttft_p50_s:6.2f} "
            f"{got.ttft_p90_s:7.2f} {got.ttft_p99_s:7.2f} {got.moved:6} {got.pulled:6} {got.failed:6}\n"
        )


if __name__ == "__main__":
    main()
