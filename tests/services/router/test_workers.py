"""Several workers on one port: all serve, a dead one comes back, a stop ends all, a taken port is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from dualmap.rpc.clients import channel_options
from dualmap.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[3]


@contextmanager
def workers(redis_url: str, count: int, port: int = 0) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A parent with its workers; what it printed is empty when it did not serve."""
    variables = {
        "PATH": "/usr/bin:/bin",
        "DUALMAP_REDIS__URL": redis_url,
        "DUALMAP_SERVER__PORT": str(port),
        "DUALMAP_METRICS__PORT": "0",
        "DUALMAP_SERVER__DRAIN_GRACE_S": "1",
    }
    command = [sys.executable, "-m", "services.router", "--workers", str(count)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables, cwd=HERE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, json.loads(line) if line else {}
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait, bounded, for what other processes do."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def router_ids(port: int, connections: int = 24) -> set[int]:
    """Ids of the routers that answer on so many new connections."""
    found = set()
    for _ in range(connections):
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            found.add(stub.GetView(router_pb2.GetViewRequest(), timeout=10, wait_for_ready=True).router_id)
    return found


def test_workers_share_a_port_and_nothing_else(redis_url: str) -> None:
    """One line says where; different routers answer there; SIGTERM ends them all with code 0."""
    with workers(redis_url, 2) as (process, said):
        assert len(router_ids(said["port"])) == 2
        assert len(set(said["worker_metrics_ports"])) == 2
        children = psutil.Process(process.pid).children()
        process.terminate()
        code = process.wait(20)

    assert code == 0
    assert len(children) == 2
    assert not any(child.is_running() for child in children)


def test_a_worker_that_dies_is_started_again(redis_url: str) -> None:
    """The port never goes: the other serves, and soon there are two again."""
    with workers(redis_url, 2) as (process, said):
        before = router_ids(said["port"])
        victim = psutil.Process(process.pid).children()[0].pid
        os.kill(victim, signal.SIGKILL)

        def renewed() -> bool:
            pids = {child.pid for child in psutil.Process(process.pid).children()}
            return len(pids) == 2 and victim not in pids

        until(renewed)
        until(lambda: len(router_ids(said["port"]) - before) == 1)


def test_workers_end_when_their_parent_is_killed(redis_url: str) -> None:
    """Nothing keeps the port that nobody watches."""
    with workers(redis_url, 2) as (process, _said):
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait(10)
        _gone, alive = psutil.wait_procs(children, timeout=20)

    assert not alive


def test_a_port_in_use_is_refused_before_any_worker_starts(redis_url: str) -> None:
    """SO_REUSEPORT would let two clusters share a port in silence."""
    with socket.create_server(("127.0.0.1", 0)) as taken, workers(redis_url, 2, taken.getsockname()[1]) as started:
        process, said = started
        code = process.wait(20)

    assert said == {}
    assert code == 1


def test_workers_that_cannot_start_end_their_parent() -> None:
    """No Redis and no ring file: every worker refuses, and so does the whole."""
    with workers("unix:///nowhere/redis.sock", 2) as (process, said):
        code = process.wait(30)

    assert said == {}
    assert code == 1
