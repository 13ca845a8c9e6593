"""State of one instance as it travels from its agent to every view: values only (arithmetic: load.py, kv_index.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

PRIORITY_CLASSES = 3
"""Priority classes: index 0 is priority -1, 1 is 0, 2 is 1."""

SLACK_BUCKETS = 8
"""Given up; below 0.1, 0.2, 0.4, 0.8, 1.6, 3.2 x the pool's default SLO; more."""


class QueuePolicy(IntEnum):
    """Order of an agent's queue; numbers equal those of the contract."""

    SLO = 1
    HIT_FIRST = 2
    FIFO = 3


class Tier(IntEnum):
    """Where a block is held; numbers equal those of the contract. A higher number is slower."""

    DEVICE = 1
    HOST = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a prefill: a + b x miss + c x miss x (context - miss / 2), all in tokens."""

    a_s: float = 0.020
    b_s_per_token: float = 0.000_16
    c_s_per_token2: float = 0.0
    samples: int = 0

    def seconds(self, miss_tokens: float, context_tokens: float) -> float:
        """Prefill time of ``miss_tokens`` uncached of ``context_tokens`` in all. No tokens still cost ``a_s``."""
        return (
            self.a_s
            + self.b_s_per_token * miss_tokens
            + self.c_s_per_token2 * miss_tokens * (context_tokens - miss_tokens / 2)
        )


@dataclass(frozen=True, slots=True)
class TicketsSeen:
    """What an agent saw of one router's tickets: all up to ``watermark``, and a 256-bit little-endian map above it."""

    router_id: int
    watermark: int
    seen: int = 0


EMPTY_WAITING: tuple[float, ...] = (0.0,) * (PRIORITY_CLASSES * SLACK_BUCKETS)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load of an instance at one version. ``waiting_s`` is flat: class x SLACK_BUCKETS + bucket, seconds of prefill.

    ``host_discount``, ``remote_discount``: share of a hit that is lost where a block is held in that tier only.
    """

    waiting_s: tuple[float, ...] = EMPTY_WAITING
    rest_s: float = 0.0
    queue_policy: QueuePolicy = QueuePolicy.SLO
    admitting: bool = True
    waiting_requests: int = 0
    waiting_miss_tokens: int = 0
    running_requests: int = 0
    staged_miss_tokens: int = 0
    kv_use: float = 0.0
    cost: PrefillCost = field(default_factory=PrefillCost)
    tickets: tuple[TicketsSeen, ...] = ()
    stalled_ms: float = 0.0
    suspect: bool = False
    moved_out: int = 0
    moved_in: int = 0
    put_back: int = 0
    relays: int = 0
    finished: int = 0
    finished_in_slo: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    offered_s: float = 0.0
    prefix_closed: bool = True
    modelled: bool = False
    host_discount: float = 0.0
    remote_discount: float = 0.0


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """A whole index: ``hashes`` packed little-endian uint64 ascending, ``tiers`` one byte each."""

    hashes: bytes = b""
    tiers: bytes = b""


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """State of one instance, whole (``snapshot`` given) or as changes since version ``since``.

    ``changes`` is packed: 9 bytes each, the block's hash (little-endian uint64), then the tier now held in, 0 for gone.
    ``kv_digest`` and ``kv_blocks`` describe the index after this update.
    """

    instance_id: str
    incarnation: int
    agent_epoch: int
    version: int
    since: int
    load: LoadReport | None = None
    snapshot: KvSnapshot | None = None
    changes: bytes = b""
    kv_digest: int = 0
    kv_blocks: int = 0

    @property
    def full(self) -> bool:
        """Whether the update needs no base."""
        return self.snapshot is not None
