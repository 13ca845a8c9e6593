"""Promises of the command line: a mistake is one clear line and a non-zero exit; Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("DUALMAP_")}


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dualmap.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_ENVIRONMENT | environment,
    )


def test_a_bad_trace_line_names_file_line_and_field_before_anything_is_sent(tmp_path: Path) -> None:
    """And nothing was started for it."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1}\n')

    ended = _run("replay", str(trace))

    assert ended.returncode == 1
    assert re.fullmatch(r"dualmap: .*trace\.jsonl:2: input_length: missing\n", ended.stderr)


@pytest.mark.parametrize("option", [("--instances", "3"), ("--speed", "2"), ("--policy", "round_robin")])
def test_options_that_a_running_cluster_contradicts_are_refused_by_name(option: tuple[str, str]) -> None:
    """--routers takes the cluster as it is."""
    trace = "/dev/null"

    ended = _run("replay", trace, "--routers", "127.0.0.1:9", *option)

    assert ended.returncode == 1
    assert ended.stderr == f"dualmap: {option[0]}: contradicts --routers: that cluster is as it is\n"


@pytest.mark.parametrize("name", ["DUALMAP_REDIS_URL", "DUALMAP_REDIS__URL"])
def test_a_redis_that_does_not_answer_is_one_line(name: str) -> None:
    """Nothing else is said, on either stream, and no password shown."""
    environment = {name: "redis://:hunter2@127.0.0.1:1", "DUALMAP_REDIS__START_TIMEOUT_S": "0.3"}

    ended = _run("up", **environment)

    assert ended.returncode == 1
    assert ended.stderr.startswith("dualmap: Redis at redis://:***@127.0.0.1:1 does not answer within 0.3 s")
    assert ended.stderr.count("\n") == 1
    assert not ended.stdout.strip()


def test_figures_that_cannot_be_written_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """A replay may take an hour."""
    path = tmp_path / "nowhere" / "figures.json"

    ended = _run("replay", "/dev/null", "--json", str(path))

    assert ended.returncode == 1
    assert ended.stderr == f"dualmap: --json: {path} cannot be written\n"


def test_a_port_in_use_is_one_line_and_no_traceback() -> None:
    """A service whose port is taken says so and ends."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ended = subprocess.run(
            [sys.executable, "-m", "services.ringmanager"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=_ENVIRONMENT | {"DUALMAP_SERVER__PORT": str(taken.getsockname()[1]), "DUALMAP_LOG__LEVEL": "error"},
        )

    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert ended.stderr.strip()


def test_a_wrong_setting_is_one_line_that_names_it() -> None:
    """With the variable to correct."""
    ended = subprocess.run(
        [sys.executable, "-m", "services.router"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=_ENVIRONMENT | {"DUALMAP_POOL__TTFT_SLO_MS": "soon"},
    )

    assert ended.returncode == 2
    assert ended.stderr.startswith("bad setting: pool.ttft_slo_ms (DUALMAP_POOL__TTFT_SLO_MS): ")
    assert ended.stderr.count("\n") == 1


@pytest.fixture
def up() -> Iterator[subprocess.Popen[str]]:
    """`dualmap up` with two instances, started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dualmap.cli", "up", "--instances", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_ENVIRONMENT | {"COLUMNS": "160"},
    )
    with process:
        yield process
        process.kill()


def _until(process: subprocess.Popen[str], words: str) -> str:
    said = []
    for line in process.stdout or ():
        said.append(line)
        if words in line:
            return "".join(said)
    raise AssertionError("".join(said))


def _family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind_when_up_ends(up: subprocess.Popen[str], number: signal.Signals) -> None:
    """Neither after Ctrl-C, which ends with 0, nor when the command itself is killed."""
    said = _until(up, "Ctrl-C stops it")
    family = _family(up.pid)

    up.send_signal(number)
    code = up.wait(30)
    gone, left = psutil.wait_procs(family, timeout=10)

    assert "start depth 2" in said
    assert len(gone) >= 7
    assert not left
    assert code == (0 if number is signal.SIGINT else -signal.SIGKILL)
