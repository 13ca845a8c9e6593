"""The engine model run against the wall clock, in an asyncio loop. It adds time and nothing else."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualmap.core.engine_model import EngineEvent, EngineModel, EngineOptions
from dualmap.runtime.clock import Clock

Listener = Callable[[Sequence[EngineEvent]], None]
"""Called in the loop's thread with what happened, in order; never from within a call to the engine."""

_LONGEST_WAIT_S = 3_600.0


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What the model knows of a prompt: hashes of its full blocks and counts, never content."""

    hashes: Sequence[int]
    block_tokens: int
    prompt_tokens: int


class SimulatedEngine:
    """One simulated engine; `run` it in a task, and it tells the listener what happens."""

    def __init__(self, options: EngineOptions, listener: Listener, clock: Clock) -> None:
        self.model = EngineModel(options)
        self._listener = listener
        self._clock = clock
        self._began_s = clock.now_s()
        self._wake = asyncio.Event()

    @property
    def now_s(self) -> float:
        """Seconds since the engine was made: the model's clock."""
        return self._clock.now_s() - self._began_s

    def stage(self, job_id: str, prompt: PromptBlocks, max_output_tokens: int) -> None:
        """Accept a job; raises ValueError for an id in the engine. Tokens are streamed."""
        self.model.stage(
            job_id,
            prompt.hashes,
            prompt.block_tokens,
            prompt.prompt_tokens,
            max_output_tokens,
            self.now_s,
            stream=True,
        )
        self._wake.set()

    def cancel(self, job_id: str) -> bool:
        """Drop a job; False: it is not in the engine."""
        found = self.model.cancel(job_id, self.now_s)
        self._wake.set()
        return found

    def clear_cache(self) -> None:
        """Forget every block; jobs go on."""
        self.model.clear_cache(self.now_s)
        self._wake.set()

    def pause(self, seconds: float = math.inf) -> None:
        """Make no progress for so long: a wedged engine. Time begins to count at once."""
        self.model.pause(self.now_s + seconds)
        self._wake.set()

    def resume(self) -> None:
        """End a pause."""
        self.model.pause(self.now_s)
        self._wake.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Let time pass until ``stop``; then jobs under way are dropped in silence."""
        stopped = asyncio.ensure_future(stop.wait())
        stopped.add_done_callback(lambda _: self._wake.set())
        try:
            while not stop.is_set():
                self._wake.clear()
                events = self.model.advance(self.now_s)
                if events:
                    self._listener(events)
                    continue
                due_s = self.model.next_event_s()
                wait_s = _LONGEST_WAIT_S if due_s is None else min(_LONGEST_WAIT_S, due_s - self.now_s)
                await self._clock.wait(self._wake, wait_s)
        finally:
            stopped.cancel()
