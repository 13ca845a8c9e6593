"""The simulated engine behind the agent's engine seam: names translated, nothing decided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from dualmap.core import engine_model
from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import PrefillCost, Tier
from dualmap.engines.simulated import PromptBlocks, SimulatedEngine
from dualmap.runtime.clock import Clock
from dualmap.runtime.logs import get_log
from services.instanceagent.engine import (
    Done,
    EngineEvent,
    EngineFacts,
    EngineListener,
    FirstToken,
    Job,
    KvChange,
    KvCleared,
    KvRemoved,
    KvStored,
    Started,
    Tokens,
)
from services.instanceagent.synthetic_answer import SimulatedTokens, SyntheticAnswer

_log = get_log("simulated_engine")


class SimulatedEngineAdapter:
    """An `Engine` over the wall-clock model; faults can be brought on by ``pause`` and ``resume``."""

    def __init__(
        self,
        options: EngineOptions,
        batch_tokens: int,
        default_output_tokens: int,
        clock: Clock,
        expected_cost: PrefillCost | None = None,
    ) -> None:
        """``expected_cost``: what the agent is told of ``options.cost``; None: the truth."""
        self._options = options
        self._default_output_tokens = default_output_tokens
        self._engine = SimulatedEngine(options, self._heard, clock)
        self._listener: EngineListener | None = None
        self._answers: dict[int, SyntheticAnswer] = {}
        self.tokens = SimulatedTokens()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.facts = EngineFacts(
            kv_tokens=options.kv_tokens,
            max_sequences=options.max_running,
            batch_tokens=batch_tokens,
            cost=expected_cost or options.cost,
        )

    @property
    def problem(self) -> str | None:
        """None while the model's loop runs."""
        if self._task is None:
            return "not started"
        return "stopped" if self._task.done() else None

    @property
    def kv_use(self) -> float:
        """Share of the cache in use."""
        return self._engine.model.kv_use

    async def start(self, listener: EngineListener) -> None:
        """Begin; the facts were known before."""
        self._listener = listener
        self._task = asyncio.create_task(self._engine.run(self._stop), name="simulated-engine")

    async def stop(self) -> None:
        """Drop everything."""
        self._stop.set()
        if self._task is not None:
            await asyncio.gather(self._task)

    def stage(self, job: Job) -> None:
        """Give the engine a job."""
        chain = job.submission.chain
        prompt = PromptBlocks(chain.hashes, chain.block_tokens, chain.prompt_tokens)
        output_tokens = job.submission.max_output_tokens or self._default_output_tokens
        openai = job.submission.openai
        if openai is not None:
            self._answers[job.number] = SyntheticAnswer(job.submission, openai, output_tokens)
        self._engine.stage(str(job.number), prompt, output_tokens)

    def cancel(self, job_number: int) -> None:
        """Give a job up."""
        self._answers.pop(job_number, None)
        self._engine.cancel(str(job_number))

    def clear_cache(self) -> None:
        """Forget all blocks."""
        self._engine.clear_cache()
        if self._listener is not None:
            self._listener.kv_changed([KvCleared()])

    def pause(self) -> None:
        """Accept and never answer, until `resume`."""
        _log.warning("engine_paused")
        self._engine.pause()

    def resume(self) -> None:
        """Go on."""
        _log.warning("engine_resumed")
        self._engine.resume()

    def _heard(self, events: Sequence[engine_model.EngineEvent]) -> None:
        listener = self._listener
        if listener is None:
            return
        for event in events:
            match event:
                case engine_model.BlocksStored() | engine_model.BlocksRemoved():
                    listener.kv_changed([_kv_change(event)])
                case engine_model.Started():
                    listener.engine_event(int(event.request_id), Started())
                case engine_model.FirstToken():
                    self._tell(listener, event.request_id, FirstToken(event.hit_tokens, event.prefill_s))
                case engine_model.Tokens():
                    self._tell(listener, event.request_id, Tokens(event.count))
                case engine_model.Done():
                    self._tell(listener, event.request_id, Done(event.output_tokens, "length"))

    def _tell(self, listener: EngineListener, request_id: str, event: EngineEvent) -> None:
        number = int(request_id)
        answer = self._answers.get(number)
        if isinstance(event, Done):
            self._answers.pop(number, None)
        for told in answer.events(event) if answer is not None else [event]:
            listener.engine_event(number, told)


def _kv_change(event: engine_model.BlocksStored | engine_model.BlocksRemoved) -> KvChange:
    if isinstance(event, engine_model.BlocksStored):
        return KvStored(event.hashes, Tier(event.tier))
    return KvRemoved(event.hashes)
