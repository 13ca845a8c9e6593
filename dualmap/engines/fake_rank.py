"""One data-parallel rank of a fake engine: the model in wall time, its block hashes, its events. It speaks no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dualmap.core import engine_model
from dualmap.core.engine_model import EngineOptions
from dualmap.engines.engine_blocks import EngineBlocks
from dualmap.engines.event_publisher import EventPublisher, PublisherOptions
from dualmap.engines.event_wire import Cleared, Event, EventWire
from dualmap.engines.simulated import PromptBlocks, SimulatedEngine
from dualmap.runtime.clock import Clock

JobEvent = engine_model.FirstToken | engine_model.Tokens | engine_model.Done | None
"""What a request hears; None: the engine died."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """``events`` None: no KV events."""

    wire: EventWire
    engine: EngineOptions
    block_tokens: int = 16
    events: PublisherOptions | None = None


@dataclass(slots=True, eq=False)
class EngineJob:
    """One request in the engine."""

    number: int
    hashes: tuple[int, ...]
    prompt_tokens: int
    uncached_tokens: int
    events: asyncio.Queue[JobEvent] = field(default_factory=asyncio.Queue)
    first_token: bool = False


@dataclass(slots=True)
class RankCounters:
    """Since the start of the engine's present life."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    prefill_busy_s: float = 0.0
    requests: int = 0


class FakeRank:
    """Start it, give it jobs, stop it. `restart` is a crash and a new life: sequence 0, an empty cache."""

    def __init__(self, options: RankOptions, clock: Clock) -> None:
        self.options = options
        self._clock = clock
        self._number = 0
        self._ports = (options.events.port, options.events.replay_port) if options.events is not None else (0, 0)
        self.publisher: EventPublisher | None = None

    async def start(self) -> None:
        """Begin a life."""
        options = self.options
        self.started_at_s = time.time()
        self.counters = RankCounters()
        self.jobs: dict[int, EngineJob] = {}
        self.blocks = EngineBlocks(options.wire.dialect, options.block_tokens, options.wire.host_medium)
        self.engine = SimulatedEngine(options.engine, self._heard, self._clock)
        self._stop = asyncio.Event()
        if options.events is not None:
            self.publisher = EventPublisher(options.events)
            self.publisher.port, self.publisher.replay_port = self._ports
            self.publisher.open()
            self._ports = (self.publisher.port, self.publisher.replay_port)
        self._task = asyncio.create_task(self.engine.run(self._stop), name="fake-rank")

    async def stop(self) -> None:
        """End the life; jobs under way hear of it."""
        self._stop.set()
        await self._task
        for job in self.jobs.values():
            job.events.put_nowait(None)
        if self.publisher is not None:
            await self.publisher.close()

    async def restart(self) -> None:
        """Die and begin anew on the same ports."""
        await self.stop()
        await self.start()

    def submit(self, token_ids: Sequence[int], max_tokens: int, lora_name: str = "", cache_salt: str = "") -> EngineJob:
        """Accept a request."""
        hashes = self.blocks.chain(token_ids, lora_name, cache_salt)
        hit_tokens = self.engine.model.cache.leading(hashes)[0] * self.options.block_tokens
        self._number += 1
        job = EngineJob(self._number, hashes, len(token_ids), len(token_ids) - hit_tokens)
        self.jobs[job.number] = job
        self.counters.requests += 1
        prompt = PromptBlocks(hashes, self.options.block_tokens, len(token_ids))
        self.engine.stage(str(job.number), prompt, max_tokens)
        return job

    def cancel(self, job: EngineJob) -> None:
        """Drop a request; one that ended is no error."""
        if self.jobs.get(job.number) is job:
            self.engine.cancel(str(job.number))
            self._leave(job)

    def clear_cache(self) -> None:
        """Forget all blocks and say so."""
        self.engine.clear_cache()
        self._publish([Cleared()])

    @property
    def running(self) -> int:
        """Requests past their first token, and the one that prefills."""
        return len(self.jobs) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return max(0, self.engine.model.staged_requests - 1)

    @property
    def waiting_uncached_tokens(self) -> int:
        """Uncached prompt tokens of requests without first token, as of their arrival."""
        return sum(job.uncached_tokens for job in self.jobs.values() if not job.first_token)

    def _heard(self, events: Sequence[engine_model.EngineEvent]) -> None:
        told: list[Event] = []
        for event in events:
            match event:
                case engine_model.BlocksStored():
                    told += self.blocks.stored(event)
                case engine_model.BlocksRemoved():
                    told += self.blocks.removed(event)
                case engine_model.FirstToken():
                    self._first_token(event)
                case engine_model.Tokens() | engine_model.Done():
                    self._tell(event)
        if told:
            self._publish(told)

    def _first_token(self, event: engine_model.FirstToken) -> None:
        job = self.jobs.get(int(event.request_id))
        if job is None:
            return
        job.first_token = True
        counters = self.counters
        counters.prompt_tokens += job.prompt_tokens
        counters.cached_tokens += event.hit_tokens
        counters.prefill_tokens += job.prompt_tokens - event.hit_tokens
        counters.prefill_busy_s += event.prefill_s
        job.events.put_nowait(event)

    def _tell(self, event: engine_model.Tokens | engine_model.Done) -> None:
        job = self.jobs.get(int(event.request_id))
        if job is None:
            return
        job.events.put_nowait(event)
        if isinstance(event, engine_model.Done):
            self._leave(job)

    def _leave(self, job: EngineJob) -> None:
        del self.jobs[job.number]
        self.blocks.release(job.hashes)

    def _publish(self, events: Sequence[Event]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events)
