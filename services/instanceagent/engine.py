"""What an agent needs of an engine, whichever it is. Adapters stand in files of their own and know no queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dualmap.core.state import PrefillCost, Tier
from dualmap.rpc.submission import Submission


@dataclass(frozen=True, slots=True)
class Started:
    """The engine began with the request."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token is out. ``hit_tokens`` and ``prefill_s``: None where the engine does not say."""

    hit_tokens: int | None = None
    prefill_s: float | None = None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Tokens:
    """More tokens."""

    count: int
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete. ``hit_tokens``: cached prompt tokens as the engine reports them, if it does."""

    output_tokens: int
    finish_reason: str = "stop"
    hit_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine gave the request up. ``retryable``: it may run again, here or elsewhere, if no token is out."""

    problem: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class HttpChunk:
    """Part of the engine's HTTP answer; status and headers with the first part only."""

    data: bytes = b""
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


EngineEvent = Started | FirstToken | Tokens | Done | Failed | HttpChunk
"""One event of one job."""


@dataclass(frozen=True, slots=True)
class KvStored:
    """Routing blocks now held in ``tier`` (their worst)."""

    hashes: Sequence[int]
    tier: Tier = Tier.DEVICE


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Routing blocks no longer held in any tier."""

    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvCleared:
    """The cache is empty, or its continuity cannot be shown: a new incarnation."""


KvChange = KvStored | KvRemoved | KvCleared
"""One change of the KV cache."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine is. ``prefix_closed``: what is held has its whole prefix held. ``modelled``: not its own word."""

    kv_tokens: int
    max_sequences: int
    batch_tokens: int
    cost: PrefillCost
    prefix_closed: bool = True
    modelled: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A request released to the engine under a number of the agent's own; numbers are never used twice."""

    number: int
    submission: Submission


class EngineListener(Protocol):
    """Who hears of an engine; called in the event loop's thread, and must not block."""

    def engine_event(self, job_number: int, event: EngineEvent) -> None:
        """One event of one job; none follows Done, Failed or a cancel."""
        ...

    def kv_changed(self, changes: Sequence[KvChange]) -> None:
        """Changes of the cache, in order."""
        ...

    def prefilled(self, miss_tokens: float, busy_s: float) -> None:
        """Uncached tokens computed since this was last called, and the time the engine was busy with them."""
        ...


class Engine(Protocol):
    """One KV cache and what computes with it."""

    @property
    def facts(self) -> EngineFacts:
        """Known once `start` returned."""
        ...

    @property
    def problem(self) -> str | None:
        """Why the engine cannot be used now; None when it is well."""
        ...

    @property
    def kv_use(self) -> float:
        """Share of the cache in use, 0 to 1."""
        ...

    async def start(self, listener: EngineListener) -> None:
        """Connect, learn the facts, begin to tell the listener. Raises StartError."""
        ...

    async def stop(self) -> None:
        """Let go; jobs under way are dropped in silence."""
        ...

    def stage(self, job: Job) -> None:
        """Give the engine a job; its events follow."""
        ...

    def cancel(self, job_number: int) -> None:
        """Give a job up; nothing is heard of it any more. Unknown numbers are ignored."""
        ...

    def clear_cache(self) -> None:
        """Forget all blocks; KvCleared follows."""
        ...
