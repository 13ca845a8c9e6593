"""The example of the client guide runs as it stands, and finds the backup when the chosen instance is dead."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from dualmap.cli.local_cluster import LocalOptions
from tests.e2e.conftest import Start

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "client.py"

pytestmark = pytest.mark.timeout(90)


async def _run(routers: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLE),
        routers,
        "Why is the sky blue? " * 100,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=EXAMPLE.parents[2],
        env={"PYTHONPATH": str(EXAMPLE.parents[2])},
    )
    said, _ = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode, said.decode()


async def test_the_example_runs_and_survives_the_death_of_the_chosen_instance(start: Start) -> None:
    """The first run names the instance; killed, the next run ends at the other."""
    async with start(LocalOptions(instances=2, rebalance=False)) as cluster:
        routers = ",".join(cluster.router_addresses)
        code, said = await _run(routers)
        chosen = "agent-1" if 'done instance_id: "agent-1/0"' in said else "agent-2"
        cluster.services[chosen].send(signal.SIGKILL)
        again_code, said_again = await _run(routers)

    other = "agent-2" if chosen == "agent-1" else "agent-1"
    assert code == 0, said
    assert f'done instance_id: "{chosen}/0"' in said
    assert again_code == 0, said_again
    assert f'done instance_id: "{other}/0"' in said_again
