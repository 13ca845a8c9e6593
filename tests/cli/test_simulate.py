"""`dualmap simulate`: what is asked for is run, and options that contradict each other are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualmap.cli import simulate_options as given
from dualmap.cli.simulate import app
from dualmap.simulator.arrivals import poisson_arrivals
from dualmap.simulator.study import ContradictionError
from dualmap.simulator.synthetic import synthetic_trace

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
        (["--rate", "3", "--policies", "ceiling_central", "--timetable", "5:fail:1"], "--timetable"),
        (["--rate", "3", "--timetable", "5:join:1"], "--instances"),
        (["--rate", "3", "--timetable", "5:drain:2"], "--instances"),
        (["--rate", "3", "--timetable", "9:join:2,5:fail:2"], "--instances"),
        (["--rate", "3", "--timetable", "-5:stall:1:2"], "--timetable"),
        (["--rate", "3", "--no-slowdown-term"], "--fit-cost"),
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


def test_the_key_may_start_deeper(tmp_path: Path) -> None:
    """Without a heat tree every key is as long as asked, where the prompt has so many blocks."""
    out = tmp_path / "d.json"
    asked = ["--rate", "3", "--policies", "dualmap", "--start-depth", "3", "--no-heat", "--json", str(out)]
    result = CliRunner().invoke(app, [*BASE, *asked])

    assert result.exit_code == 0, result.output
    depths = json.loads(out.read_text())["policies"]["dualmap"]["by_seed"][0]["key_depths"]
    assert max(int(depth) for depth in depths) == 3
    assert depths["3"] > 0.5


def trace_file(folder: Path) -> Path:
    """A short trace in the published form."""
    made = poisson_arrivals(synthetic_trace("skew", 800, 1), 4.0, 1)
    lines = [
        json.dumps(
            {
                "timestamp": int(one.timestamp_s * 1_000),
                "input_length": one.input_tokens * 4,
                "output_length": one.output_tokens,
                "hash_ids": list(one.hash_ids),
            }
        )
        for one in made
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_paper_call_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was kept is not run again, half a last line is no harm, and the files come out the same."""
    trace = trace_file(tmp_path)
    out = tmp_path / "results"
    asked = ["paper", "--conversation", str(trace), "--toolagent", str(trace), "--quick", "--only", "decode"]
    asked += ["--workers", "1", "--out", str(out)]
    first = CliRunner().invoke(app, asked)
    assert first.exit_code == 0, first.output
    written = {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in {".md", ".json"}}
    kept = out / "kept.jsonl"
    lines = kept.read_text(encoding="utf-8").splitlines()
    kept.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40], encoding="utf-8")

    second = CliRunner().invoke(app, asked)

    assert second.exit_code == 0, second.output
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in {".md", ".json"}} == written
    assert set(written) == {"README.md", "decode.md", "decode.json"}
    again = [line for line in kept.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    assert again[-1] == lines[-1], "one was run again"
    assert len(again) == len(lines)


def test_a_section_nobody_knows_is_refused(tmp_path: Path) -> None:
    """By name, before anything is read."""
    asked = ["paper", "--conversation", "none", "--toolagent", "none", "--only", "everything", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, asked)

    assert isinstance(result.exception, ContradictionError)
    assert "--only" in str(result.exception)
