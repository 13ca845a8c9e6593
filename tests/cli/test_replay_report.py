"""Promises of the replay's figures: every request accounted for, quantiles by nearest rank, late sends said aloud."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from dualmap.cli.replay_report import Outcome, ReplayFacts, ReplayReport, quantile

_FACTS = ReplayFacts(
    slo_s=5.0,
    speed=10.0,
    poll_ms=200.0,
    rebalance_ms=250.0,
    start_depth=2,
    policy="dualmap",
    seconds=1.0,
    bound_rate=8.1,
    rate=4.5,
    cost="a prefill costs 20 ms",
    instances=2,
)


def _done(index: int, ttft_s: float, instance_id: str = "a/0", lag_s: float = 0.0) -> Outcome:
    return Outcome(
        index=index,
        status="done",
        ttft_s=ttft_s,
        total_s=ttft_s + 1.0,
        prompt_tokens=100,
        hit_tokens=25,
        instance_id=instance_id,
        send_lag_s=lag_s,
        route_s=0.001,
        reason="CACHE_HIT",
        first_token=True,
    )


def test_failed_and_shed_requests_count_as_misses() -> None:
    """Attainment is of all that were sent, not of those that came back."""
    outcomes = [_done(0, 1.0), _done(1, 6.0), Outcome(2, status="shed"), Outcome(3, status="failed", first_token=True)]

    figures = ReplayReport(_FACTS, outcomes).figures()

    assert figures["requests"] == 4
    assert (figures["done"], figures["failed"], figures["shed"]) == (2, 1, 1)
    assert figures["attainment"] == 0.25
    assert figures["begun_and_broken"] == 1
    assert figures["hit_rate"] == 0.25


def test_the_json_holds_the_promised_figures(tmp_path: Path) -> None:
    """Names that scripts rely on."""
    path = tmp_path / "figures.json"

    ReplayReport(_FACTS, [_done(0, 1.0), _done(1, 2.0, "b/0")]).write_json(path)

    promised = (
        "requests done failed shed attainment hit_rate ttft_p50_s ttft_p90_s ttft_p99_s route_p50_ms route_p99_ms "
        "migrations per_instance send_lag_p99_ms"
    )
    written = json.loads(path.read_text())
    assert set(promised.split()) <= set(written)
    assert written["per_instance"] == {"a/0": 1, "b/0": 1}
    assert written["route_p50_ms"] == 1.0


def test_late_sends_are_said_to_be_the_machines_fault() -> None:
    """A replay whose sends were late says so in the table and in the JSON; one in time does not."""
    late = ReplayReport(_FACTS, [_done(0, 1.0, lag_s=0.6)])
    in_time = ReplayReport(_FACTS, [_done(0, 1.0, lag_s=0.01)])
    said = io.StringIO()

    late.print_table(Console(file=said, width=120))

    assert "The machine, not the cluster" in said.getvalue()
    assert late.figures()["machine_bound"] is True
    assert in_time.figures()["machine_bound"] is False


def test_quantiles_are_by_nearest_rank() -> None:
    """Of nothing there is none."""
    assert quantile([], 0.5) is None
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0
    assert quantile([0.001], 0.01, 1_000.0) == 1.0
