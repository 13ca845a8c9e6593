"""What differs between engines that speak OpenAI's HTTP API: how they say what they are, how loaded, which rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dualmap.core.state import PrefillCost, Tier
from services.instanceagent.engine_http import EngineHttp, HttpTimes
from services.instanceagent.engine_request import EngineRequest
from services.instanceagent.kv_events import EventSource

LEAST_PAGE_TOKENS = 16
"""Events of smaller pages are one a token: too many to follow, so such an engine is modelled."""


@dataclass(frozen=True, slots=True)
class HttpEngineOptions:
    """An engine behind HTTP. ``rank`` None: it has one cache only. Endpoints "": asked of the engine.

    ``kv_tokens``, ``max_sequences``, ``batch_tokens``, ``cost``: where the engine does not say.
    """

    url: str
    model: str
    served_model: str = ""
    hash_key: bytes = field(default=b"", repr=False)
    api_key: str = field(default="", repr=False)
    rank: int | None = None
    events: bool = True
    kv_endpoint: str = ""
    replay_endpoint: str = ""
    tiers: frozenset[Tier] = frozenset(Tier)
    kv_tokens: int = 1_200_000
    max_sequences: int = 256
    batch_tokens: int = 8_192
    cost: PrefillCost = field(default_factory=PrefillCost)
    http: HttpTimes = field(default_factory=HttpTimes)
    start_timeout_s: float = 600.0
    poll_s: float = 1.0
    parity_timeout_s: float = 5.0
    parity_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Learnt:
    """What an engine said of itself. None: it did not say."""

    version: str
    block_tokens: int | None = None
    kv_tokens: int | None = None
    max_sequences: int | None = None
    events: EventSource | None = None
    load_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load as the engine sees it. ``started_s``: when its process began, by its own clock; compared, never counted.

    ``prefill_tokens`` and ``prefill_busy_s`` are totals: their differences give the measured prefill rate.
    """

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    waiting_uncached_tokens: int | None = None
    prefill_tokens: float | None = None
    prefill_busy_s: float | None = None
    started_s: float | None = None
    kv_tokens: int | None = None

    def prefill_rate_since(self, before: EngineLoad) -> float | None:
        """Uncached tokens a second of prefill between two readings; None where nothing was prefilled, or counted."""
        if self.prefill_tokens is None or self.prefill_busy_s is None:
            return None
        if before.prefill_tokens is None or before.prefill_busy_s is None:
            return None
        tokens, busy_s = self.prefill_tokens - before.prefill_tokens, self.prefill_busy_s - before.prefill_busy_s
        return tokens / busy_s if tokens > 0 and busy_s > 0 else None


class EngineDialect(Protocol):
    """vLLM's or SGLang's ways."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    @property
    def prefix_closed(self) -> bool:
        """Whether a held block implies its ancestors."""
        ...

    async def learn(self, http: EngineHttp, options: HttpEngineOptions) -> Learnt:
        """What the engine is. Raises EngineCallFailed."""
        ...

    def place(self, request: EngineRequest, rank: int) -> None:
        """Mark a request for a data-parallel rank."""
        ...

    async def load(self, http: EngineHttp, options: HttpEngineOptions) -> EngineLoad:
        """The load now. Raises EngineCallFailed."""
        ...


def rank_endpoint(endpoint: str, rank: int) -> str:
    """Where a rank publishes: its port is the base's plus its number. Raises ValueError without a port."""
    place, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{endpoint!r} has no port")
    return f"{place}:{int(port) + rank}"


def host_of(url: str) -> str:
    """Host of an HTTP URL as it stands in a ZMQ endpoint."""
    place = url.split("://", 1)[-1].split("/", 1)[0].rsplit("@", 1)[-1]
    return place.rpartition(":")[0] if place.rpartition(":")[2].isdigit() else place


def configured_events(options: HttpEngineOptions, *, sglang: bool) -> EventSource | None:
    """The event source that the operator named."""
    if not options.kv_endpoint:
        return None
    rank = options.rank or 0
    replay = rank_endpoint(options.replay_endpoint, rank) if options.replay_endpoint else None
    return EventSource(rank_endpoint(options.kv_endpoint, rank), replay, options.rank, sglang)
