"""How services start, or say in one line why they do not: without Redis, with it late."""

from __future__ import annotations

import asyncio
import os
import sys
import time

import pytest

from dualmap.cli.local_cluster import LocalCluster, LocalOptions
from dualmap.cli.processes import StartError

DEAD = "redis://dm:secret@127.0.0.1:1/0"


async def _started(service: str, **variables: str) -> tuple[int, str]:
    """Exit code and what it said for a person; the process ends by itself or the test fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"services.{service}",
        env={**os.environ, "DUALMAP_SERVER__PORT": "0", "DUALMAP_METRICS__PORT": "none", **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    return process.returncode or 0, "\n".join(said)


@pytest.mark.parametrize("service", ["ringmanager", "statecollector", "rebalancer", "router"])
async def test_a_service_without_redis_ends_with_one_line(service: str) -> None:
    """Who does not find Redis in time says where it looked, without the password, and exits with 1."""
    code, said = await _started(service, DUALMAP_REDIS__URL=DEAD, DUALMAP_REDIS__START_TIMEOUT_S="0.3")

    assert code == 1
    assert said.startswith("cannot start: Redis at redis://dm:***@127.0.0.1:1/0 does not answer within 0.3 s")
    assert "secret" not in said
    assert len(said.splitlines()) == 1


async def test_a_cluster_asks_the_redis_it_was_given_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dualmap up` with the address of a dead Redis: one line, no process."""
    monkeypatch.setenv("DUALMAP_REDIS__URL", DEAD)
    monkeypatch.setenv("DUALMAP_REDIS__START_TIMEOUT_S", "0.3")
    cluster = LocalCluster(LocalOptions(instances=1))
    began_s = time.monotonic()

    with pytest.raises(StartError, match="does not answer within") as refused:
        await cluster.__aenter__()

    assert time.monotonic() - began_s < 5
    assert not cluster.services
    assert "secret" not in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
