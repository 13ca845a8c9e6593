"""The agent as a process: its one line, its metrics, its faults, its way out."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from dualmap.v1 import agent_pb2_grpc
from tests.services.instanceagent.cluster import submission, submit, until
from tests.services.instanceagent.fake_ring import FakeRing


@asynccontextmanager
async def _process(ring: FakeRing) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    environ = {
        **os.environ,
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
        "DUALMAP_HTTP__PORT": "0",
        "DUALMAP_AGENT__ID": "p",
        "DUALMAP_AGENT__RING_MANAGERS": ring.address,
        "DUALMAP_ENGINE__FAULTS": "true",
        "DUALMAP_ENGINE__PREFILL_MS": "2",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.instanceagent",
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return answer.decode()


async def test_a_process_serves_tells_pauses_and_leaves_cleanly() -> None:
    """Serving line, a request, metrics without content, SIGUSR1 and SIGUSR2, SIGTERM: drained, left, exit code 0."""
    ring = FakeRing()
    await ring.start()
    async with _process(ring) as (process, line):
        assert line["event"] == "serving"
        await until(lambda: "p/0" in ring.members, "joined")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{line['port']}") as channel:
            stub = agent_pb2_grpc.InstanceAgentStub(channel)
            assert await submit(stub, submission("secret-request")).end() is grpc.StatusCode.OK
            metrics = await _get(line["metrics_port"], "/metrics")
            assert 'dualmap_agent_finished_requests_total{instance="p/0",pool="default"} 1.0' in metrics
            assert "secret" not in metrics
            assert "200 OK" in await _get(line["metrics_port"], "/readyz")

            process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.1)
            stuck = submit(stub, submission("r2", seed=2))
            await until(lambda: "started" in stuck.kinds, "staged")
            await asyncio.sleep(0.2)
            assert "first_token" not in stuck.kinds
            process.send_signal(signal.SIGTERM)
            await until(lambda: ring.drained == ["p/0"], "the drain is announced")
            process.send_signal(signal.SIGUSR2)
            assert await stuck.end() is grpc.StatusCode.OK
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert ring.left == ["p/0"]
    await ring.stop()


async def test_sigterm_while_the_engine_is_awaited_ends_the_process_in_time() -> None:
    """An engine that does not come keeps no process from its end."""
    environ = {
        **os.environ,
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
        "DUALMAP_HTTP__PORT": "0",
        "DUALMAP_AGENT__ID": "p",
        "DUALMAP_ENGINE__KIND": "vllm",
        "DUALMAP_ENGINE__URL": "http://127.0.0.1:1",
    }
    command = (sys.executable, "-m", "services.instanceagent")
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            while b"engine_awaited" not in await process.stderr.readline():
                assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
