"""Settings of an agent: whom it belongs to, how its queue behaves, which engine stands behind it."""

from __future__ import annotations

import re
import socket
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from dualmap.core.engine_model import EngineOptions
from dualmap.core.state import PrefillCost, QueuePolicy, Tier
from dualmap.runtime.settings import (
    Block,
    CommaList,
    MetricsSettings,
    Port,
    ServerSettings,
    ServiceSettings,
    is_loopback,
)
from services.instanceagent.instance_values import InstanceOptions

_POLICIES = {"slo": QueuePolicy.SLO, "hit_first": QueuePolicy.HIT_FIRST, "fifo": QueuePolicy.FIFO}


class AgentServerSettings(ServerSettings):
    """The gRPC port of an agent: every waiting request holds an open stream."""

    port: Port = Field(default=7080, description="0 is any free port.")
    max_concurrent_rpcs: int = Field(
        default=65_536, ge=1, le=1_000_000, description="Streams at once; the queue's own bounds refuse earlier."
    )
    max_message_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1024, le=64 * 1024 * 1024, description="Largest message between agents."
    )


class AgentMetricsSettings(MetricsSettings):
    """The HTTP port for Prometheus."""

    port: Port | None = Field(default=9080, description="0 is any free port; none serves no metrics.")


class HttpSettings(Block):
    """The OpenAI-compatible port."""

    host: str | None = Field(default=None, description="Address to listen on; absent, the server's, as it is as open.")
    port: Port | None = Field(default=8080, description="0 is any free port; none serves no OpenAI requests.")
    max_body_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1024,
        le=24 * 1024 * 1024,
        description="Largest body; with its tokens it must fit into one message between agents.",
    )
    body_timeout_s: float = Field(default=30.0, gt=0, le=600, description="Longest wait for a body.")
    max_requests: int = Field(
        default=16_384, ge=1, le=1_000_000, description="Requests at once; the queue's own bounds refuse earlier."
    )
    route_within_ms: int = Field(
        default=200, ge=1, le=60_000, description="A router's time at the front door; then the own queue, DEGRADED."
    )
    loras: CommaList = Field(
        default=(), max_length=1_024, description="Adapters of the first model that requests may name as their model."
    )


class AgentSettings(Block):
    """Who the agent is, and how it queues."""

    id: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}$",
        description="Stable name; instances are id/rank. Two agents of one name would fight for one place. Absent: the "
        "machine's name, which a container keeps over restarts.",
    )
    instances: int = Field(default=1, ge=1, le=64, description="Instances (data-parallel ranks) served by this agent.")
    ring_managers: CommaList = Field(
        default=("127.0.0.1:7071",), min_length=1, description="host:port of every ring manager, tried in turn."
    )
    routers: CommaList = Field(default=(), description="host:port of routers, for the front door.")
    advertise_host: str | None = Field(
        default=None,
        description="Host that others reach this agent at; absent: the one it listens on, or the machine's name.",
    )
    http_address: str = Field(
        default="", description="host:port announced for the OpenAI port; absent: where it listens, for one behind NAT."
    )
    weight: float = Field(default=1.0, gt=0, le=16, description="Share of the ring against an instance of weight 1.")
    role: Literal["mixed", "prefill", "decode"] = Field(default="mixed", description="What the instance serves.")
    queue_policy: Literal["slo", "hit_first", "fifo"] = Field(
        default="slo", description="Order of the queue; slo keeps the most deadlines, the others are baselines."
    )
    binding: Literal["early", "late"] = Field(
        default="early", description="late: the other candidate may pull what misses or stalls here."
    )
    max_waiting_requests: int = Field(
        default=10_000, ge=1, le=1_000_000, description="Requests that may wait; ordering 10,000 takes milliseconds."
    )
    max_waiting_tokens: int = Field(
        default=50_000_000, ge=1, le=1 << 40, description="Prompt tokens that may wait: 200 MB of token ids."
    )
    max_wait_ms: int = Field(
        default=120_000, ge=1, le=3_600_000, description="Longest wait; then RESOURCE_EXHAUSTED with a retry delay."
    )
    feed_tokens: int | None = Field(
        default=None, ge=1, description="Uncached tokens the engine may hold without first token; absent: its batch."
    )
    max_sequences: int | None = Field(
        default=None, ge=1, description="Requests the engine may hold; absent: its own limit."
    )
    suspect_after_ms: int = Field(
        default=2_000, ge=100, le=600_000, description="Silence of a busy engine that makes the instance SUSPECT."
    )
    drain_timeout_s: float = Field(
        default=60.0, ge=0, le=3_600, description="Longest drain; what is left then ends UNAVAILABLE."
    )

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Ids of the instances: id/rank."""
        name = self.id or socket.gethostname()
        return tuple(f"{name}/{rank}" for rank in range(self.instances))

    @property
    def instance_options(self) -> InstanceOptions:
        """Limits of each queue."""
        return InstanceOptions(
            queue_policy=_POLICIES[self.queue_policy],
            max_waiting_requests=self.max_waiting_requests,
            max_waiting_tokens=self.max_waiting_tokens,
            max_wait_ms=float(self.max_wait_ms),
            feed_tokens=self.feed_tokens,
            max_sequences=self.max_sequences,
            suspect_after_ms=float(self.suspect_after_ms),
        )


class EngineSettings(Block):
    """The engine. Costs and sizes are the simulated engine's; of a real one, where it does not tell its own."""

    kind: Literal["simulated", "vllm", "sglang"] = Field(
        default="simulated", description="Which adapter stands before the engine."
    )
    url: str = Field(default="", description="http://host:port of a real engine's OpenAI API, /v1 left out.")
    served_model: str = Field(
        default="", max_length=512, description="Name that the engine knows its model by; empty: the first it lists."
    )
    api_key: SecretStr = Field(default=SecretStr(""), description="The engine's, sent as a bearer token; empty: none.")
    events: bool = Field(default=True, description="Follow the engine's KV events; false: its cache is modelled.")
    kv_endpoint: str = Field(
        default="", description="tcp://host:port where rank 0 publishes KV events; empty: what the engine says, if any."
    )
    replay_endpoint: str = Field(
        default="", description="tcp://host:port where rank 0 replays them; without it a gap drops the index."
    )
    tiers: CommaList = Field(
        default=("device", "host", "remote"),
        description="Media whose blocks count as held: leave out those that load no faster than prefill computes.",
    )
    host_credit: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="A host block's worth of a device block: 1 - its load time / its prefill time.",
    )
    remote_credit: float = Field(default=1.0, ge=0, le=1, description="The same of a block in a remote store.")
    start_timeout_s: float = Field(
        default=600.0, gt=0, le=7_200, description="Longest wait for the engine at start; weights take minutes to load."
    )
    poll_ms: int = Field(default=1_000, ge=10, le=60_000, description="Between two looks at the engine's load.")
    parity_timeout_s: float = Field(
        default=5.0, gt=0, le=300, description="Longest step of the self-test; then the cache is modelled."
    )
    prefill_ms: float = Field(default=20.0, ge=0, le=60_000, description="Time of any prefill beside its tokens.")
    prefill_us_per_token: float = Field(
        default=160.0, gt=0, le=1_000_000, description="Time per uncached token; 0.16 ms is the paper's 7B model."
    )
    prefill_ps_per_token2: float = Field(
        default=0.0, ge=0, le=1e9, description="Attention: picoseconds per uncached token and token of context."
    )
    expected_prefill_ms: float | None = Field(
        default=None, ge=0, le=60_000, description="What the agent takes prefill_ms for until measured; absent: true."
    )
    expected_prefill_us_per_token: float | None = Field(
        default=None, gt=0, le=1_000_000, description="As expected_prefill_ms, of a token: to try a wrong belief."
    )
    kv_tokens: int = Field(
        default=1_200_000, ge=128, le=1 << 40, description="KV cache; 64 GB at 57,344 B a token, as in the paper."
    )
    host_tier_tokens: int = Field(default=0, ge=0, le=1 << 40, description="Slower tier behind it; 0: none.")
    decode_tokens_per_s: float = Field(default=50.0, gt=0, le=1e6, description="Tokens a second of one sequence.")
    batch_tokens: int = Field(default=8_192, ge=1, le=1 << 30, description="Prefill tokens of one engine step.")
    max_sequences: int = Field(default=256, ge=1, le=65_536, description="Sequences the engine runs at once.")
    output_tokens: int = Field(
        default=64, ge=1, le=1_048_576, description="Length of an answer whose request names none."
    )
    faults: bool = Field(default=False, description="Let SIGUSR1 pause the engine and SIGUSR2 resume it: for tests.")

    @model_validator(mode="after")
    def _refuse_what_cannot_work(self) -> Self:
        parts = urlsplit(self.url)
        if self.kind != "simulated" and (parts.scheme not in {"http", "https"} or not parts.hostname):
            raise ValueError(f"kind {self.kind} needs a url like http://127.0.0.1:8000")
        if "@" in parts.netloc:
            raise ValueError("url must hold no user or password; use api_key")
        for name in ("kv_endpoint", "replay_endpoint"):
            if not re.fullmatch(r"|tcp://.+:\d{1,5}", getattr(self, name)):
                raise ValueError(f"{name} must be like tcp://127.0.0.1:5557")
        if "device" not in self.tiers or not set(self.tiers) <= {tier.name.lower() for tier in Tier}:
            raise ValueError("tiers must name device, and may name host and remote")
        if self.replay_endpoint and not self.kv_endpoint:
            raise ValueError("replay_endpoint without kv_endpoint follows nothing")
        return self

    @property
    def model_options(self) -> EngineOptions:
        """The simulated engine's options."""
        cost = PrefillCost(self.prefill_ms / 1e3, self.prefill_us_per_token / 1e6, self.prefill_ps_per_token2 / 1e12)
        return EngineOptions(
            cost=cost,
            kv_tokens=self.kv_tokens,
            host_tier_tokens=self.host_tier_tokens,
            decode_tokens_per_s=self.decode_tokens_per_s,
            max_running=self.max_sequences,
        )

    @property
    def expected_cost(self) -> PrefillCost:
        """What the agent believes of the engine before it has measured."""
        real = self.model_options.cost
        base_ms, token_us = self.expected_prefill_ms, self.expected_prefill_us_per_token
        return PrefillCost(
            real.a_s if base_ms is None else base_ms / 1e3,
            real.b_s_per_token if token_us is None else token_us / 1e6,
            real.c_s_per_token2,
        )


class Settings(ServiceSettings):
    """The instance agent: the queue before an engine."""

    server: AgentServerSettings = AgentServerSettings()
    metrics: AgentMetricsSettings = AgentMetricsSettings()
    http: HttpSettings = HttpSettings()
    agent: AgentSettings = AgentSettings()
    engine: EngineSettings = EngineSettings()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.agent.max_wait_ms < self.pool.ttft_slo_ms:
            raise ValueError("agent.max_wait_ms is below pool.ttft_slo_ms: requests would be refused in time")
        http_host = self.http.host or self.server.host
        if not self.server.insecure and not is_loopback(http_host):
            raise ValueError("http.host reaches beyond this machine; say server.insecure: true to allow it")
        if self.http.port and self.http.port in (self.server.port, self.metrics.port):
            raise ValueError("http.port is also the port of the server or of metrics")
        return self

    @property
    def http_host(self) -> str:
        """Address of the OpenAI port."""
        return self.http.host or self.server.host
