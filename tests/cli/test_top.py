"""`dualmap top` before served parts of a system: one frame, a picture of it, and the live screen."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from dualmap.core.state import EMPTY_WAITING, LoadReport
from tests.cli.conftest import Run
from tests.cli.services import (
    before,
    collector,
    facts,
    member,
    move,
    nobody,
    rebalancer,
    ring,
    ring_manager,
    serving,
    status,
)
from tests.cli.test_route import address_of
from tests.services.router.harness import pool_of, running_router

BUSY = LoadReport(
    waiting_s=(6.5, *EMPTY_WAITING[1:]),
    waiting_requests=13,
    running_requests=4,
    kv_use=0.5,
    finished=3,
    finished_in_slo=2,
    prompt_tokens=1_000,
    cached_tokens=250,
)


@contextmanager
def system() -> Iterator[dict[str, str]]:
    """Two instances, a router that answers and one that does not, and one of each other part; addresses by option."""
    known = before(ring(member("agent-0/0"), member("agent-1/0")), member("agent-0/0"))
    full = LoadReport(admitting=False, finished=1)
    with ExitStack() as stack:
        dead = stack.enter_context(nobody())
        router = stack.enter_context(running_router(pool_of(2)))
        yield {
            "--routers": f"{address_of(router)},{dead}",
            "--ring-managers": stack.enter_context(serving(ring_manager(known))),
            "--collectors": stack.enter_context(serving(collector(facts("agent-0/0", BUSY), facts("agent-1/0", full)))),
            "--rebalancers": stack.enter_context(serving(rebalancer(status(move("r-1"))))),
        }


def words(options: dict[str, str]) -> list[str]:
    return [word for option in options.items() for word in option]


def test_one_frame_shows_the_whole_system(run: Run) -> None:
    """Instances with state, queue, backlog, hit rate, share and KV use; services, leaders, changes, moves."""
    with system() as options:
        code, out, err = run("top", "--once", *words(options))

    assert (code, err) == (0, "")
    lines = out.splitlines()
    cells = next(line for line in lines if "agent-0/0" in line).split()
    assert cells[:10] == ["agent-0/0", "ACTIVE", "13", "4", "6.50", "0.00", "25.0%", "66.7%", "75.0%", "50%"]
    assert "0 full" in next(line for line in lines if "agent-1/0" in line and "ACTIVE" in line)
    assert "2 of 2 instances active" in out
    assert "since start: 4 finished" in out
    assert "no answer" in next(line for line in lines if options["--routers"].split(",")[1] in line)
    assert "leader" in next(line for line in lines if options["--ring-managers"] in line)
    assert "moved 4 of 5" in next(line for line in lines if options["--rebalancers"] in line)
    assert "+ agent-1/0 ACTIVE" in out
    assert "agent-1/0 → agent-2/0  MOVED, overload, gain 1.2 s  r-1" in out


def test_a_frame_may_be_taken_after_a_while(run: Run) -> None:
    """Then its figures are of that while: here nothing was finished within it."""
    with system() as options:
        code, out, _ = run("top", "--once", "--watch-s", "0.2", "--interval-s", "0.1", *words(options))

    assert code == 0
    assert "last 0 s: 0 finished" in out


def test_addresses_may_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that scripts and containers name them once."""
    with system() as options:
        for option, value in options.items():
            monkeypatch.setenv(f"DUALMAP_{option[2:].replace('-', '_').upper()}", value)
        code, out, _ = run("top", "--once")

    assert code == 0
    assert "agent-0/0" in out


def test_a_frame_can_be_kept_as_a_picture(run: Run, tmp_path: Path) -> None:
    """A whole SVG by itself: well formed, and nothing in it is fetched from elsewhere."""
    path = tmp_path / "top.svg"
    with system() as options:
        code, out, _ = run("top", "--svg", str(path), *words(options))
        refused = run("top", "--svg", str(tmp_path / "no" / "top.svg"), *words(options))

    drawn = path.read_text()
    assert code == 0
    assert "agent-0/0" in out
    assert ET.fromstring(drawn).tag.endswith("svg")  # noqa: S314  (our own file)
    assert "agent-0/0" in drawn
    assert 'url("http' not in drawn
    assert refused[0] == 1
    assert "No such file" in refused[2]


def test_nobody_there_is_one_line(run: Run) -> None:
    """No frame without a system; a wrong address is named before anything is asked."""
    with nobody() as dead:
        parts = ("--routers", dead, "--collectors", dead, "--ring-managers", dead, "--rebalancers", dead)
        code, out, err = run("top", "--once", *parts)
        wrong = run("top", "--once", "--collectors", "here")

    assert (code, out) == (1, "")
    assert (
        err == f"dualmap: no service answers; router {dead} does not answer; is it running, and is the address right?\n"
    )
    assert wrong[0] == 1
    assert "--collectors: 'here' is no address" in wrong[2]


def test_the_live_screen_follows_and_gives_the_terminal_back() -> None:
    """Frames come by themselves; SIGINT ends it with code 0, out of the alternate screen."""
    with system() as options:
        master, slave = pty.openpty()
        code = "import typer; from dualmap.cli.top import top; typer.run(top)"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words(options), "--interval-s", "0.1"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
        )
        os.close(slave)
        try:
            shown = read_until(master, lambda text: text.count("instances active") >= 3)
            process.send_signal(signal.SIGINT)
            shown += read_until(master, lambda text: "\x1b[?1049l" in text)
            ended = process.wait(10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            os.close(master)

    assert ended == 0
    assert "\x1b[?1049h" in shown
    assert "last 0 s" in shown
    assert "Traceback" not in shown


def read_until(master: int, enough: Callable[[str], bool], within_s: float = 30.0) -> str:
    """What the terminal got until it is enough, or the program ended."""
    text, deadline_s = "", time.monotonic() + within_s
    while not enough(text):
        assert time.monotonic() < deadline_s, text[-2_000:]
        if select.select([master], [], [], 0.1)[0]:
            try:
                text += os.read(master, 65_536).decode(errors="replace")
            except OSError:
                return text
    return text
