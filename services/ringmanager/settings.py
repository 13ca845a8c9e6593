"""Settings of the ring manager: what a pool must agree on, how long silence is forgiven, when a prefix is hot."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dualmap.core.membership import RingParameters
from dualmap.runtime.settings import Block, ServerSettings, ServiceSettings
from services.ringmanager.membership import LeaseRules

LARGEST_SEED = (1 << 64) - 1


class RingSettings(Block):
    """Ring parameters; a change re-keys the whole pool, so change them only with the caches cold."""

    block_tokens: int = Field(
        default=128, ge=1, le=65_536, description="Tokens of a routing block; a multiple of every engine's block."
    )
    start_depth: int | None = Field(
        default=None,
        ge=1,
        le=1_024,
        description="Blocks of the shortest key; absent: 1 where the heat tree runs, 2 where it does not.",
    )
    virtual_nodes: int = Field(
        default=160, ge=1, le=4_096, description="Points of weight 1 on a ring; 160 keep arcs within a few per cent."
    )
    seed_1: int = Field(default=1, ge=0, le=LARGEST_SEED, description="Seed of the first ring.")
    seed_2: int = Field(default=2, ge=0, le=LARGEST_SEED, description="Seed of the second ring; differs from seed_1.")
    grace_s: float = Field(
        default=60.0, ge=0, le=3_600, description="Time the previous ring stays readable: its caches are warm so long."
    )
    heartbeat_s: float = Field(
        default=5.0, gt=0, le=10, description="Longest silence of a watch; callers take more than 10 s for death."
    )

    max_watches: int = Field(
        default=4_096,
        ge=1,
        le=65_536,
        description="Watches at once, beside server.max_concurrent_rpcs: agents hold one each; one more is refused.",
    )

    @model_validator(mode="after")
    def _refuse_one_ring(self) -> Self:
        if self.seed_1 == self.seed_2:
            raise ValueError("seed_1 and seed_2 are equal: the two rings would be one")
        return self


class LeaseSettings(Block):
    """How long an instance may be silent."""

    lease_s: float = Field(
        default=3.0, ge=0.1, le=300, description="Silence after which an instance is gone; agents renew thrice in it."
    )
    expiry_share: float = Field(
        default=0.2, ge=0, le=1, description="Of a pool, at most so many expire in one lease, and always at least one."
    )
    turn_s: float = Field(
        default=0.1, gt=0, le=5, description="Period of judging, warming and publishing; well below a third of a lease."
    )

    @model_validator(mode="after")
    def _refuse_late_judges(self) -> Self:
        if self.turn_s * 3 > self.lease_s:
            raise ValueError("turn_s must be at most a third of lease_s, or every judgement comes late")
        return self

    @property
    def rules(self) -> LeaseRules:
        """The same for the state machine."""
        return LeaseRules(self.lease_s, self.expiry_share, max(3 * self.turn_s, self.lease_s / 3))


class HeatSettings(Block):
    """When a prefix is too hot for one pair."""

    enabled: bool = Field(default=True, description="Whether hot prefixes are split; false publishes none.")
    plan_s: float = Field(default=1.0, gt=0, le=60, description="Period of planning: routers report once a second.")
    max_nodes: int = Field(default=65_536, ge=16, le=1 << 22, description="Bound of the tree: some 10 MB.")
    half_life_s: float = Field(default=60.0, gt=0, le=86_400, description="Time after which a request counts half.")
    dwell_s: float = Field(
        default=300.0, ge=0, le=86_400, description="Least time between split and merge of one prefix: no flip-flop."
    )
    min_samples: int = Field(
        default=20, ge=1, le=100_000, description="Samples before a split; 200 kept a cold pool hot ten times as long."
    )


class Settings(ServiceSettings):
    """Ring manager of DualMap: membership, leases, ring parameters, epochs, heat."""

    server: ServerSettings = ServerSettings(port=7071)
    ring: RingSettings = RingSettings()
    lease: LeaseSettings = LeaseSettings()
    heat: HeatSettings = HeatSettings()
    leader_lease_s: float = Field(
        default=3.0, ge=0.2, le=60, description="Leadership without renewal; a standby takes over after it."
    )

    @property
    def parameters(self) -> RingParameters:
        """What is published with the ring."""
        default_depth = 1 if self.heat.enabled else 2
        return RingParameters(
            block_tokens=self.ring.block_tokens,
            start_depth=self.ring.start_depth or default_depth,
            virtual_nodes=self.ring.virtual_nodes,
            seed_1=self.ring.seed_1,
            seed_2=self.ring.seed_2,
        )
