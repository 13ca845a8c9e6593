"""Settings of the router; every number with the reason for its default."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from dualmap.core.choose import ChooseOptions, Select
from dualmap.runtime.settings import Block, CommaList, MetricsSettings, ServerSettings, ServiceSettings

_RULE = ChooseOptions()
"""The core's defaults are the only ones: what the simulator measures is what routes."""


class RouterSettings(Block):
    """How routes are decided and how much is taken on."""

    ring_managers: CommaList = Field(
        default=(), description="host:port of every ring manager; heat samples go to them. None: no samples are sent."
    )
    ring_file: Path | None = Field(
        default=None, description="Where the ring is kept for a start without Redis. Absent: such a start waits."
    )
    booking_ttl_ms: int = Field(
        default=2_000, ge=100, le=60_000, description="Life of a booking that no report covers; agents use the same."
    )
    burst_ms: int = Field(
        default=25,
        ge=1,
        le=10_000,
        description="How long more than 64 calls may wait; then few may, and the rest are refused: it is no burst.",
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="Processes on the one port, each a router of its own; one a core at most."
    )
    max_streams: int = Field(default=64, ge=1, le=1024, description="Open route streams.")
    select: Select = Field(
        default=_RULE.select, description="Rule inside the pair; the others exist to be compared with."
    )
    affinity_slo_fraction: float = Field(
        default=_RULE.affinity_slo_fraction,
        gt=0,
        le=10,
        description="Share of the SLO that a prediction must keep for the cache to count; measured best.",
    )
    escape_slo_fraction: float = Field(
        default=_RULE.escape_slo_fraction,
        gt=0,
        le=10,
        description="Share of the SLO above which others than the pair are looked at; measured best.",
    )
    work_weight: float = Field(
        default=_RULE.work_weight,
        ge=0,
        le=1_000,
        description="What a second of own prefill weighs against a second of waiting; measured best.",
    )
    looks: int = Field(
        default=_RULE.looks, ge=1, le=16, description="Instances a decision looks at; 4 is the pair and two more."
    )
    escape: bool = Field(default=_RULE.escape, description="Whether others than the pair are ever looked at.")
    unknown_after_ms: int = Field(
        default=round(_RULE.unknown_after_ms),
        ge=100,
        le=600_000,
        description="Age from which a state is unknown; one lease.",
    )
    heat_samples_per_s: int = Field(
        default=1_024, ge=1, le=1_024, description="Sampled chains a second at most, as the contract bounds them."
    )
    heat_period_ms: int = Field(
        default=500, ge=50, le=1_000, description="Time between reports; at least one a second is promised."
    )

    @property
    def choose_options(self) -> ChooseOptions:
        """The decision's options."""
        return ChooseOptions(
            affinity_slo_fraction=self.affinity_slo_fraction,
            escape_slo_fraction=self.escape_slo_fraction,
            work_weight=self.work_weight,
            looks=self.looks,
            select=self.select,
            escape=self.escape,
            unknown_after_ms=float(self.unknown_after_ms),
        )


class Settings(ServiceSettings):
    """The router: answers where a request should go."""

    server: ServerSettings = ServerSettings(port=7070)
    metrics: MetricsSettings = MetricsSettings(port=9070)
    router: RouterSettings = RouterSettings()

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.router.escape and self.router.looks < 2:
            raise ValueError("router.looks must be at least 2 where router.escape is on: the pair comes first")
        return self
