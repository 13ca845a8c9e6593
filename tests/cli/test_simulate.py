"""`dualmap simulate`: what is asked for is run, and options that contradict each other are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualmap.cli import simulate_options as given
from dualmap.cli.simulate import app
from dualmap.simulator.study import ContradictionError

BASE = ["--synthetic", "skew", "--limit", "120", "--warmup", "20", "--workers", "1", "--instances", "2"]


def test_run_is_the_default_and_writes_json_and_plots(tmp_path: Path) -> None:
    """Without a subcommand policies are run; table, JSON and plots appear."""
    out = tmp_path / "out.json"
    asked = [*BASE, "--rate", "3", "--policies", "dualmap,min_ttft", "--json", str(out), "--plots", str(tmp_path / "p")]
    result = CliRunner().invoke(app, asked)

    assert result.exit_code == 0, result.output
    assert set(json.loads(out.read_text())["policies"]) == {"dualmap", "min_ttft"}
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"trade_off.svg", "ttft.svg", "quartiles.svg"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rate", "3", "--trace", "x"], "--trace"),
        ([], "--rate"),
        (["--rate", "3", "--keep-bursts"], "--keep-bursts"),
        (["--rate", "3", "--as-built", "--poll-ms", "5"], "--as-built"),
        (["--rate", "3", "--routers", "2"], "--routers"),
        (["--rate", "3", "--policies", "nobody"], "--policies"),
        (["--rate", "3", "--over-long", "bend"], "--over-long"),
        (["--rate", "3", "--timetable", "5:explode:1"], "--timetable"),
        (["--rate", "3", "--timetable", "5:stall:1"], "--timetable"),
        (["--rate", "3", "--no-rebalance", "--rebalance-ms", "100"], "--rebalance-ms"),
        (["--rate", "3", "--no-heat", "--heat-ms", "100"], "--heat-ms"),
        (["--rate", "3", "--host-load-us", "5"], "--host-tokens"),
        (["--rate", "3", "--speeds", "1,1,2"], "--instances"),
        (["--rate", "3", "--speeds", "1,0"], "--speeds"),
        (["--rate", "3", "--speeds", "fast"], "--speeds"),
        (["--rate", "3", "--policies", "min_ttft", "--choices", "3"], "--choices"),
        (["--rate", "3", "--policies", "dynamo", "--timetable", "5:join:2"], "--timetable"),
    ],
)
def test_contradictions_are_refused_by_name(options: list[str], named: str) -> None:
    """The message says which options cannot hold together."""
    result = CliRunner().invoke(app, [*BASE, *options])

    assert isinstance(result.exception, ContradictionError)
    assert named in str(result.exception)


def test_a_timetable_is_read() -> None:
    """Seconds, what, instance, and a duration for a stall."""
    join, stall = given.timetable("74:join:4, 80:stall:0:5")

    assert (join.at_s, join.happening, join.instance) == (74.0, "join", 4)
    assert (stall.happening, stall.duration_s) == ("stall", 5.0)


def test_a_second_tier_and_unequal_instances_are_simulated(tmp_path: Path) -> None:
    """A small cache with a tier behind it hits more than without; speeds are taken."""
    rates = {}
    for host in ("0", "1000000"):
        out = tmp_path / f"{host}.json"
        asked = ["--rate", "3", "--policies", "dualmap", "--kv-tokens", "20000", "--host-tokens", host]
        asked += ["--speeds", "1,0.8", "--no-bookings", "--rebalance-ms", "500", "--json", str(out)]
        result = CliRunner().invoke(app, [*BASE, *asked])
        assert result.exit_code == 0, result.output
        rates[host] = json.loads(out.read_text())["policies"]["dualmap"]["mean"]["hit_rate"]

    assert rates["1000000"] > rates["0"]


def test_goodput_takes_fewer_seeds(tmp_path: Path) -> None:
    """The first of the fixed seeds, one figure each."""
    out = tmp_path / "g.json"
    result = CliRunner().invoke(app, ["goodput", *BASE, "--policies", "min_ttft", "--seeds", "1", "--json", str(out)])

    assert result.exit_code == 0, result.output
    assert len(json.loads(out.read_text())["policies"]["min_ttft"]["by_seed"]) == 1
