"""The ring manager as a process: where it serves, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest


@pytest.mark.parametrize("service", ["ringmanager", "rebalancer"])
async def test_a_process_says_where_it_serves_and_ends_on_sigterm(redis_url: str, service: str) -> None:
    """One JSON line on stdout; SIGTERM drains and ends with code 0."""
    environ = {
        **os.environ,
        "DUALMAP_REDIS__URL": redis_url,
        "DUALMAP_SERVER__PORT": "0",
        "DUALMAP_METRICS__PORT": "0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{service}",
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            assert process.stdout is not None
            line = json.loads(await process.stdout.readline())
            assert line["event"] == "serving"
            assert line["port"] > 0
            assert line["metrics_port"] > 0
            process.send_signal(signal.SIGTERM)
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    assert b"Traceback" not in errors
