"""A listener that keeps what an adapter tells, and submissions for it."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from dualmap.core.membership import RingParameters
from dualmap.core.state import PrefillCost, Tier
from dualmap.engines.fake_server import FakeOptions, FakeServer
from dualmap.engines.fake_sglang import FakeSglang
from dualmap.engines.fake_vllm import FakeVllm
from dualmap.rpc.convert_agent import SubmissionDefaults, submission_of
from dualmap.rpc.submission import Submission
from dualmap.runtime.clock import SystemClock
from dualmap.v1 import agent_pb2, types_pb2
from services.instanceagent.engine import (
    Done,
    EngineEvent,
    Failed,
    FirstToken,
    HttpChunk,
    Job,
    KvChange,
    KvCleared,
    KvRemoved,
    KvStored,
    Tokens,
)
from services.instanceagent.engine_dialect import HttpEngineOptions
from services.instanceagent.engine_http import HttpTimes
from services.instanceagent.engine_metrics import EngineMetrics
from services.instanceagent.http_engine import HttpEngine, HttpEngineParts
from services.instanceagent.kv_events import FollowTimes
from services.instanceagent.sglang_engine import sglang_engine
from services.instanceagent.vllm_engine import vllm_engine
from tests.waiting import until

DEFAULTS = SubmissionDefaults("default", 5_000, RingParameters(), b"")
FAST = PrefillCost(0.005, 1e-6)
TIMES = FollowTimes(replay_silence_s=1.0, verify_s=0.2, reconnect_ms=20, reconnect_most_ms=50, heartbeat_ms=300)


class Listener:
    """Events by job, the index as told, and how many lives it had."""

    def __init__(self) -> None:
        self.events: dict[int, list[EngineEvent]] = {}
        self.held: dict[int, Tier] = {}
        self.lives = 0
        self.counted_tokens = 0.0

    def engine_event(self, job_number: int, event: EngineEvent) -> None:
        self.events.setdefault(job_number, []).append(event)

    def kv_changed(self, changes: Sequence[KvChange]) -> None:
        for change in changes:
            match change:
                case KvStored():
                    self.held |= dict.fromkeys(change.hashes, change.tier)
                case KvRemoved():
                    for block in change.hashes:
                        self.held.pop(block, None)
                case KvCleared():
                    self.held.clear()
                    self.lives += 1

    def prefilled(self, miss_tokens: float, busy_s: float) -> None:
        self.counted_tokens += miss_tokens

    def has(self, submission: Submission) -> bool:
        return all(block in self.held for block in submission.chain.hashes)

    def ended(self, number: int) -> bool:
        return any(isinstance(event, (Done, Failed)) for event in self.events.get(number, []))

    def last(self, number: int) -> EngineEvent:
        return self.events[number][-1]

    def kinds(self, number: int) -> list[str]:
        return [type(event).__name__ for event in self.events.get(number, [])]

    def http_body(self, number: int) -> bytes:
        return b"".join(event.data for event in self.events[number] if isinstance(event, HttpChunk))

    def text(self, number: int) -> str:
        return b"".join(e.data for e in self.events[number] if isinstance(e, (FirstToken, Tokens))).decode()


def tokens(count: int, first: int = 0) -> list[int]:
    return [2_000 + first + number for number in range(count)]


def submission(token_ids: Sequence[int] = (), **values: Any) -> Submission:
    """A checked submission of token ids, or of the prompt given."""
    message = agent_pb2.SubmitRequest(request_id="r", **values)
    if token_ids:
        message.prompt.token_ids = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return submission_of(message, DEFAULTS)


def openai(path: str, body: dict[str, Any], *, stream: bool = True) -> Submission:
    """A submission with an opaque body, as the OpenAI port makes it."""
    opaque = agent_pb2.OpenAiBody(path=path, body=json.dumps(body).encode(), stream=stream)
    return submission(openai=opaque, prompt=types_pb2.Prompt(text="for the router only"))


def fake(dialect: str = "vllm", version: str = "", **values: Any) -> FakeServer:
    options = FakeOptions(dialect="sglang" if dialect == "sglang" else "vllm", version=version, **values)
    return FakeSglang(options) if dialect == "sglang" else FakeVllm(options)


class Adapter:
    """An adapter with all that it needs, and what it told."""

    def __init__(self, server: FakeServer, rank: int | None = None, **values: Any) -> None:
        publisher = server.ranks[0].publisher
        if publisher is not None and server.wire.dialect == "vllm":
            endpoints = {"kv_endpoint": f"tcp://127.0.0.1:{publisher.port}"}
            if publisher.replay_port:
                endpoints["replay_endpoint"] = f"tcp://127.0.0.1:{publisher.replay_port}"
            values = endpoints | values
        options = HttpEngineOptions(
            **{
                "url": server.url,
                "model": "default",
                "rank": rank,
                "http": HttpTimes(connect_s=1.0, call_s=1.0),
                "start_timeout_s": 2.0,
                "poll_s": 0.05,
                "parity_timeout_s": 2.0,
                **values,
            }
        )
        self.registry = CollectorRegistry()
        metrics = EngineMetrics(self.registry, "pool").of("a/0")
        parts = HttpEngineParts(metrics, SystemClock(), lambda: 128, TIMES)
        make = vllm_engine if server.wire.dialect == "vllm" else sglang_engine
        self.engine: HttpEngine = make(options, parts)
        self.listener = Listener()
        self._number = 0

    async def run(self, request: Submission) -> int:
        """Stage a job and wait for its end; gives its number."""
        number = self.stage(request)
        await until(lambda: self.listener.ended(number))
        return number

    def stage(self, request: Submission) -> int:
        self._number += 1
        self.engine.stage(Job(self._number, request))
        return self._number

    def count(self, name: str, reason: str) -> float:
        labels = {"pool": "pool", "instance": "a/0", "reason": reason}
        return self.registry.get_sample_value(f"dualmap_agent_{name}_total", labels) or 0.0


@asynccontextmanager
async def adapting(server: FakeServer, rank: int | None = None, **values: Any) -> AsyncIterator[Adapter]:
    """A started adapter on a server that serves already."""
    adapter = Adapter(server, rank, **values)
    await adapter.engine.start(adapter.listener)
    try:
        yield adapter
    finally:
        await adapter.engine.stop()
