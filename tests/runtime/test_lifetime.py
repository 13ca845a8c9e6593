"""Promises of a service's life as a process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_PROGRAM = """
import asyncio, errno, os, sys
from redis.exceptions import ConnectionError
from dualmap.runtime.lifetime import StartError, run_service

async def main(stop):
    {body}

sys.exit(run_service(main))
"""


def _program(body: str) -> list[str]:
    return [sys.executable, "-c", _PROGRAM.format(body=body)]


@contextmanager
def _running(body: str) -> Iterator[subprocess.Popen[str]]:
    """The program, once it has printed its first line."""
    process = subprocess.Popen(_program(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_cleanly(number: signal.Signals) -> None:
    """Main sees the event, ends by itself, and the code is 0."""
    with _running("print('up', flush=True); await stop.wait(); print('cleaned', flush=True)") as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)

        assert process.returncode == 0
        assert out.endswith("cleaned\n")


def test_a_second_signal_exits_at_once() -> None:
    """A stop that hangs can be forced."""
    body = "print('up', flush=True); await stop.wait(); print('stopping', flush=True); await asyncio.Event().wait()"
    with _running(body) as process:
        process.terminate()
        assert process.stdout is not None
        while process.stdout.readline() != "stopping\n":
            pass
        process.terminate()
        process.communicate(timeout=20)

        assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise StartError('port 1 is in use')", "cannot start: port 1 is in use"),
        ("raise ConnectionError('Error 111 connecting')", "cannot start: Redis: Error 111 connecting"),
        ("raise OSError(errno.EADDRINUSE, 'Address already in use')", "cannot start: Address already in use"),
    ],
)
def test_an_expected_start_error_is_one_line(body: str, line: str) -> None:
    """No traceback, and the process says that it failed."""
    done = subprocess.run(_program(body), capture_output=True, text=True, timeout=20, check=False)

    assert (done.returncode, done.stderr.strip()) == (1, line)


def test_a_defect_keeps_its_traceback() -> None:
    """It is ours to correct."""
    done = subprocess.run(_program("raise OSError(5, 'odd')"), capture_output=True, text=True, timeout=20, check=False)

    assert done.returncode == 1
    assert "Traceback" in done.stderr
