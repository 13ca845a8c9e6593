"""What a replay measured: from one outcome a request to the figures, the table and the JSON. Sends nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

LATE_LIMIT_MS = 250.0
"""Sends later than this (p99, trace time) mean that the machine, not the cluster, set the pace."""


@dataclass(slots=True)
class Outcome:
    """What came of one request; times in seconds of the trace."""

    index: int
    status: str = "failed"
    """"done", "shed" (RESOURCE_EXHAUSTED to the end) or "failed"."""
    ttft_s: float | None = None
    total_s: float | None = None
    prompt_tokens: int = 0
    hit_tokens: int = 0
    instance_id: str = ""
    attempts: int = 1
    handovers: int = 0
    send_lag_s: float = 0.0
    route_s: float | None = None
    reason: str = ""
    error: str = ""
    first_token: bool = False


@dataclass(frozen=True, slots=True)
class ReplayFacts:
    """What the replay ran with, printed beside its figures; periods in milliseconds of the trace."""

    slo_s: float
    speed: float
    poll_ms: float
    rebalance_ms: float
    start_depth: int
    policy: str
    seconds: float
    bound_rate: float | None = None
    rate: float | None = None
    cost: str = ""
    instances: int = 0


@dataclass(slots=True)
class ReplayReport:
    """The figures of one replay."""

    facts: ReplayFacts
    outcomes: Sequence[Outcome]
    by_status: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        self.by_status = Counter(outcome.status for outcome in self.outcomes)

    def figures(self) -> dict[str, object]:
        """The JSON: shares 0..1, times in the units their names say, all in trace time but the route's."""
        done = [o for o in self.outcomes if o.status == "done"]
        ttft = sorted(o.ttft_s for o in done if o.ttft_s is not None)
        route = sorted(o.route_s for o in self.outcomes if o.route_s is not None)
        lag = sorted(o.send_lag_s for o in self.outcomes)
        in_slo = sum(1 for o in done if o.ttft_s is not None and o.ttft_s <= self.facts.slo_s)
        prompt = sum(o.prompt_tokens for o in done)
        return {
            "requests": len(self.outcomes),
            "done": self.by_status["done"],
            "failed": self.by_status["failed"],
            "shed": self.by_status["shed"],
            "begun_and_broken": sum(1 for o in self.outcomes if o.status == "failed" and o.first_token),
            "attainment": in_slo / len(self.outcomes) if self.outcomes else 0.0,
            "hit_rate": sum(o.hit_tokens for o in done) / prompt if prompt else 0.0,
            "ttft_p50_s": quantile(ttft, 0.50),
            "ttft_p90_s": quantile(ttft, 0.90),
            "ttft_p99_s": quantile(ttft, 0.99),
            "route_p50_ms": quantile(route, 0.50, 1_000.0),
            "route_p99_ms": quantile(route, 0.99, 1_000.0),
            "migrations": sum(o.handovers for o in self.outcomes),
            "second_attempts": sum(1 for o in self.outcomes if o.attempts > 1),
            "per_instance": dict(sorted(Counter(o.instance_id for o in done).items())),
            "reasons": dict(sorted(Counter(o.reason for o in self.outcomes if o.reason).items())),
            "errors": dict(Counter(o.error for o in self.outcomes if o.error).most_common(10)),
            "send_lag_p99_ms": quantile(lag, 0.99, 1_000.0),
            "seconds": self.facts.seconds,
            "policy": self.facts.policy,
            "rate": self.facts.rate,
            "bound_rate": self.facts.bound_rate,
            "speed": self.facts.speed,
            "ttft_slo_s": self.facts.slo_s,
            "poll_ms": self.facts.poll_ms,
            "rebalance_ms": self.facts.rebalance_ms,
            "start_depth": self.facts.start_depth,
            "machine_bound": self.machine_bound,
        }

    @property
    def machine_bound(self) -> bool:
        """Whether sends were so late that the figures speak of this machine."""
        lag = quantile(sorted(o.send_lag_s for o in self.outcomes), 0.99, 1_000.0)
        return lag is not None and lag > LATE_LIMIT_MS

    def write_json(self, path: Path) -> None:
        """Write the figures."""
        path.write_text(json.dumps(self.figures(), indent=2, sort_keys=True) + "\n")

    def print_table(self, console: Console, beside: Mapping[str, ReplayReport] | None = None) -> None:
        """Print the figures, those of other policies on the same requests beside them."""
        columns = {self.facts.policy: self.figures()} | {
            name: report.figures() for name, report in (beside or {}).items()
        }
        table = Table(title="replay (times in trace time)")
        table.add_column("figure")
        for name in columns:
            table.add_column(name, justify="right")
        for label, key, form in _ROWS:
            table.add_row(label, *(form(figures[key]) for figures in columns.values()))
        console.print(table)
        console.print(self._facts_line())
        if self.machine_bound:
            console.print(
                "[bold yellow]The machine, not the cluster, was the bottleneck:[/] sends were late "
                f"(p99 over {LATE_LIMIT_MS:g} ms); use a lower --speed before you trust these times."
            )

    def _facts_line(self) -> str:
        facts = self.facts
        parts = [
            f"{facts.instances} instances" if facts.instances else "",
            facts.cost,
            f"TTFT SLO {facts.slo_s:g} s",
            f"rate {facts.rate:g} req/s" if facts.rate else "the trace's own timing",
            f"every-block-once bound {facts.bound_rate:.2f} req/s" if facts.bound_rate else "",
            f"speed {facts.speed:g}",
            # Of a cluster that was not started here neither is known.
            f"polls {facts.poll_ms:g} ms" if facts.poll_ms else "",
            f"rebalancing {facts.rebalance_ms:g} ms"
            if facts.rebalance_ms
            else "no rebalancing"
            if facts.poll_ms
            else "",
            f"start depth {facts.start_depth}" if facts.start_depth else "",
        ]
        return "; ".join(part for part in parts if part)


def quantile(ascending: Sequence[float], share: float, factor: float = 1.0) -> float | None:
    """Nearest-rank quantile of sorted numbers times ``factor``; None of nothing."""
    if not ascending:
        return None
    rank = max(1, math.ceil(share * len(ascending)))
    return ascending[rank - 1] * factor


def _number(digits: int, unit: str = "") -> Callable[[object], str]:
    def form(value: object) -> str:
        return f"{value:.{digits}f}{unit}" if isinstance(value, int | float) else "-"

    return form


def _shares(value: object) -> str:
    counts = value if isinstance(value, dict) else {}
    total = sum(counts.values()) or 1
    return "\n".join(f"{name} {count / total:.1%}" for name, count in counts.items()) or "-"


def _counts(value: object) -> str:
    counts = value if isinstance(value, dict) else {}
    return "\n".join(f"{name} {count}" for name, count in counts.items()) or "-"


_ROWS = (
    ("requests", "requests", _number(0)),
    ("done", "done", _number(0)),
    ("failed", "failed", _number(0)),
    ("shed", "shed", _number(0)),
    ("attainment", "attainment", _number(3)),
    ("hit rate", "hit_rate", _number(3)),
    ("TTFT p50", "ttft_p50_s", _number(3, " s")),
    ("TTFT p90", "ttft_p90_s", _number(3, " s")),
    ("TTFT p99", "ttft_p99_s", _number(3, " s")),
    ("Route p50", "route_p50_ms", _number(2, " ms")),
    ("Route p99", "route_p99_ms", _number(2, " ms")),
    ("migrations", "migrations", _number(0)),
    ("second attempts", "second_attempts", _number(0)),
    ("sends late, p99", "send_lag_p99_ms", _number(1, " ms")),
    ("share per instance", "per_instance", _shares),
    ("reasons", "reasons", _counts),
    ("errors", "errors", _counts),
)
