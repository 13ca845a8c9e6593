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
