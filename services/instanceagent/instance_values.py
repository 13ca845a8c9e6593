"""What an instance is made of and counts: limits, parts, counters, who is held where. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dualmap.core.state import QueuePolicy
from dualmap.runtime.clock import Clock
from services.instanceagent.metrics import InstanceMetrics
from services.instanceagent.request import HeldRequest
from services.instanceagent.state_log import StateLog


@dataclass(frozen=True, slots=True)
class InstanceOptions:
    """Limits of one queue. None for ``feed_tokens`` or ``max_sequences``: the engine's own.

    ``host_discount``, ``remote_discount``: share of a hit that is lost where a block is held in that tier only.
    """

    queue_policy: QueuePolicy = QueuePolicy.SLO
    max_waiting_requests: int = 10_000
    max_waiting_tokens: int = 50_000_000
    max_wait_ms: float = 120_000.0
    feed_tokens: int | None = None
    max_sequences: int | None = None
    suspect_after_ms: float = 2_000.0
    host_discount: float = 0.0
    remote_discount: float = 0.0


@dataclass(slots=True)
class Counters:
    """What happened since the agent's start."""

    moved_out: int = 0
    moved_in: int = 0
    put_back: int = 0
    finished: int = 0
    finished_in_slo: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InstanceParts:
    """What an instance is given: its state, its numbers, time, and whom to tell that a request is done here."""

    state: StateLog
    metrics: InstanceMetrics
    clock: Clock
    new_incarnation: Callable[[], int]
    done: Callable[[HeldRequest, bool], None]


@dataclass(slots=True)
class Held:
    """Requests of one instance by the state that matters to it."""

    waiting: dict[tuple[str, int], HeldRequest] = field(default_factory=dict)
    jobs: dict[int, HeldRequest] = field(default_factory=dict)
    away: set[HeldRequest] = field(default_factory=set)
