"""An agent and its fake engine as one program: both serve, the engine is kept, the agent's end is the program's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Queue

import psutil
import pytest

ENGINE = "dualmap.cli"
AGENT = "services.instanceagent"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


class Program:
    """The running program; its lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._serving: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_serving(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until so many servers more have said that they serve."""
        for _ in range(count):
            self._serving.get(timeout=timeout_s)

    def child(self, module: str) -> psutil.Process:
        (found,) = (each for each in psutil.Process(self.process.pid).children() if module in each.cmdline())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                if line.startswith('{"event": "serving"'):
                    self._serving.put(line)


@pytest.fixture
def running() -> Iterator[Program]:
    port = free_port()
    environment = os.environ | {
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
        "DUALMAP_HTTP__PORT": "0",
        "DUALMAP_AGENT__RING_MANAGERS": "127.0.0.1:1",
        "DUALMAP_AGENT__DRAIN_TIMEOUT_S": "1",
        "DUALMAP_ENGINE__KIND": "vllm",
        "DUALMAP_ENGINE__URL": f"http://127.0.0.1:{port}",
    }
    command = [sys.executable, "-m", "dualmap.cli.agent_with_engine"]
    command += ["--port", str(port), "--kv-events-port", "0", "--replay-port", "0"]
    program = Program(
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    )
    try:
        program.wait_serving(2)
        yield program
    finally:
        program.close()


def test_an_engine_that_dies_is_started_again(running: Program) -> None:
    """The agent stays the same; a new engine says that it serves."""
    agent = running.child(AGENT)
    engine = running.child(ENGINE)

    engine.kill()
    running.wait_serving(1)

    assert running.child(ENGINE).pid != engine.pid
    assert running.child(AGENT) == agent


def test_a_stop_drains_the_agent_and_ends_both(running: Program) -> None:
    """Exit code 0, and no process left."""
    children = [running.child(AGENT), running.child(ENGINE)]

    running.process.send_signal(signal.SIGTERM)

    assert running.process.wait(timeout=30) == 0
    assert [each for each in children if each.is_running()] == []


def test_the_agents_end_is_the_programs(running: Program) -> None:
    """A container whose agent died ends too, so that it is started again; the engine goes with it."""
    engine = running.child(ENGINE)

    running.child(AGENT).kill()

    assert running.process.wait(timeout=30) == -signal.SIGKILL % 256
    assert not engine.is_running()
