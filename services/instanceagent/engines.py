"""Makes the engine behind each instance as settings say: simulated here, or an adapter to a server. Starts none."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from dualmap.core.membership import RingParameters
from dualmap.core.state import Tier
from dualmap.runtime.clock import Clock
from services.instanceagent.engine import Engine
from services.instanceagent.engine_dialect import HttpEngineOptions
from services.instanceagent.engine_metrics import EngineMetrics
from services.instanceagent.http_engine import HttpEngineParts
from services.instanceagent.settings import Settings
from services.instanceagent.sglang_engine import sglang_engine
from services.instanceagent.simulated_engine import SimulatedEngineAdapter
from services.instanceagent.vllm_engine import vllm_engine


class EngineMaker:
    """One for an agent; ``parameters`` gives the ring's, once there is a ring."""

    def __init__(self, settings: Settings, registry: CollectorRegistry, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics = EngineMetrics(registry, settings.pool.name)
        self.parameters: Callable[[], RingParameters] = RingParameters
        self.simulated: list[SimulatedEngineAdapter] = []
        """Those whose faults can be brought on."""

    def make(self, instance_id: str) -> Engine:
        """The engine of an instance, not started."""
        engine = self._settings.engine
        if engine.kind == "simulated":
            made = SimulatedEngineAdapter(
                engine.model_options, engine.batch_tokens, engine.output_tokens, self._clock, engine.expected_cost
            )
            self.simulated.append(made)
            return made
        parts = HttpEngineParts(self._metrics.of(instance_id), self._clock, lambda: self.parameters().block_tokens)
        make = vllm_engine if engine.kind == "vllm" else sglang_engine
        return make(self._options(instance_id), parts)

    def _options(self, instance_id: str) -> HttpEngineOptions:
        settings = self._settings
        engine, pool = settings.engine, settings.pool
        # An engine with one cache is not asked for a rank: it may not know the word.
        rank = settings.agent.instance_ids.index(instance_id) if settings.agent.instances > 1 else None
        return HttpEngineOptions(
            url=engine.url,
            model=pool.models[0],
            served_model=engine.served_model,
            hash_key=pool.hash_key.get_secret_value().encode(),
            api_key=engine.api_key.get_secret_value(),
            rank=rank,
            events=engine.events,
            kv_endpoint=engine.kv_endpoint,
            replay_endpoint=engine.replay_endpoint,
            tiers=frozenset(Tier[name.upper()] for name in engine.tiers),
            kv_tokens=engine.kv_tokens,
            max_sequences=engine.max_sequences,
            batch_tokens=engine.batch_tokens,
            cost=engine.expected_cost,
            start_timeout_s=engine.start_timeout_s,
            poll_s=engine.poll_ms / 1_000,
            parity_timeout_s=engine.parity_timeout_s,
        )
