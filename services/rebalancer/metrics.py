"""What a rebalancer counts, under `dualmap_rebalancer_…`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dualmap.core.rebalance import Move
from dualmap.rpc.request_events import MoveOutcome


class RebalancerMetrics:
    """Metrics of one pool."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self._pool = pool

        def counter(what: str, text: str) -> Counter:
            return Counter(f"dualmap_rebalancer_{what}", text, ["pool"], registry=registry).labels(pool=pool)

        self.rounds = counter("rounds", "Rounds made while leading.")
        self.failed_rounds = counter("failed_rounds", "Rounds in which some source failed, or the whole round.")
        self.listed = counter("lists", "Queues listed.")
        self.list_failures = counter("list_failures", "Queues that were not told in time.")
        self.migrate_failures = counter("migrate_failures", "Batches that were not answered.")
        self.unlead_rounds = counter("rounds_not_leading", "Plans dropped because the lead was lost before sending.")
        self.lease_failures = counter("lease_failures", "Calls about the leadership that Redis did not answer.")
        self._planned = Counter(
            "dualmap_rebalancer_planned_moves", "Moves planned.", ["pool", "reason"], registry=registry
        )
        self._moves = Counter("dualmap_rebalancer_moves", "Moves by outcome.", ["pool", "reason"], registry=registry)
        self.leader = Gauge(
            "dualmap_rebalancer_leader", "1 while this process leads.", ["pool"], registry=registry
        ).labels(pool=pool)
        self.plan_seconds = Histogram(
            "dualmap_rebalancer_plan_seconds",
            "Time of a decision alone.",
            ["pool"],
            buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1),
            registry=registry,
        ).labels(pool=pool)
        self.round_seconds = Histogram(
            "dualmap_rebalancer_round_seconds",
            "Time of a round with its calls.",
            ["pool"],
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
            registry=registry,
        ).labels(pool=pool)

    def planned(self, moves: list[Move]) -> None:
        """Count a plan."""
        for move in moves:
            self._planned.labels(pool=self._pool, reason=str(move.cause)).inc()

    def outcome(self, outcome: MoveOutcome | None) -> None:
        """Count what came of a move; None: nobody said."""
        name = outcome.name.lower() if outcome is not None else "unanswered"
        self._moves.labels(pool=self._pool, reason=name).inc()
