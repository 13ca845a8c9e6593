"""Agents as processes of their own, where a test kills them, or needs loops that do not share its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from dualmap.core.membership import InstanceState
from dualmap.v1 import agent_pb2, agent_pb2_grpc
from tests.services.instanceagent.cluster import until
from tests.services.instanceagent.fake_ring import FakeRing

START_S = 60.0


@dataclass
class AgentProcess:
    """One agent; killed and started again it keeps its name."""

    name: str
    ring: FakeRing
    environment: Mapping[str, str]
    process: asyncio.subprocess.Process | None = None
    serving: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    @property
    def instance_id(self) -> str:
        return f"{self.name}/0"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.serving['http_port']}"

    @property
    def stub(self) -> Any:
        return agent_pb2_grpc.InstanceAgentStub(self.channels[-1])

    async def start(self) -> None:
        epoch = self.ring.epoch
        environment = {
            **os.environ,
            "DUALMAP_SERVER__PORT": "0",
            "DUALMAP_METRICS__PORT": "none",
            "DUALMAP_HTTP__PORT": "0",
            "DUALMAP_LOG__LEVEL": "error",
            "DUALMAP_AGENT__ID": self.name,
            "DUALMAP_AGENT__RING_MANAGERS": self.ring.address,
            "DUALMAP_ENGINE__FAULTS": "true",
            **self.environment,
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.instanceagent", env=environment, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        self.serving = json.loads(line)
        self.channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{self.serving['port']}"))
        await until(lambda: self.ring.epoch > epoch and self._active(), "it joined", START_S)
        self.alive = True

    def _active(self) -> bool:
        member = self.ring.members.get(self.instance_id)
        return member is not None and member.state is InstanceState.ACTIVE

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR1)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR2)

    async def load(self) -> agent_pb2.GetStateResponse:
        asked = agent_pb2.GetStateRequest(instance_id=self.instance_id)
        answer: agent_pb2.GetStateResponse = await self.stub.GetState(asked, timeout=30)
        return answer

    async def held(self) -> int:
        """Requests that wait or run."""
        load = (await self.load()).update.load
        return int(load.waiting_requests) + int(load.running_requests)

    async def kill(self) -> None:
        """SIGKILL: no farewell to anybody. Its clients hear of it by their broken connections."""
        self.alive = False
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def close(self) -> None:
        """Kill it, and close the channels to all its lives."""
        await self.kill()
        for channel in self.channels:
            await channel.close()


@asynccontextmanager
async def agent_processes(*names: str, **environment: str) -> AsyncIterator[dict[str, AgentProcess]]:
    """Agents of these names that know each other; ``environment`` without the DUALMAP_ before its names."""
    ring = FakeRing()
    await ring.start()
    full = {f"DUALMAP_{name}": value for name, value in environment.items()}
    agents = {name: AgentProcess(name, ring, full) for name in names}
    try:
        await asyncio.gather(*(agent.start() for agent in agents.values()))
        yield agents
    finally:
        await asyncio.gather(*(agent.close() for agent in agents.values()))
        await ring.stop()
