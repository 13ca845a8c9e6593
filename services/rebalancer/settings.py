"""Settings of the rebalancer: how often it looks, what a move must be worth, whether it acts at all."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dualmap.core.rebalance import RebalanceOptions
from dualmap.runtime.settings import Block, ServerSettings, ServiceSettings


class RoundSettings(Block):
    """One round."""

    period_ms: int = Field(
        default=250, ge=20, le=10_000, description="Between rounds; a twentieth of the default SLO, as in the paper."
    )
    list_timeout_ms: int = Field(
        default=200, ge=10, le=5_000, description="Longest wait for a queue; a source that takes longer waits a round."
    )
    migrate_timeout_ms: int = Field(
        default=1_000, ge=50, le=10_000, description="Longest wait for a batch; an Accept alone may take 200 ms."
    )
    settle_ms: int = Field(default=1_000, ge=0, le=60_000, description="Nobody moves twice within it: no flip-flop.")
    handover_ms: int = Field(default=50, ge=0, le=5_000, description="What a move itself costs the request.")
    stalled_after_ms: int = Field(
        default=500, ge=50, le=60_000, description="No progress of staged work so long is a stall; a step is shorter."
    )
    max_moves: int = Field(default=1_024, ge=1, le=65_536, description="Most moves of a round: a batch per source.")
    dry_run: bool = Field(default=False, description="Plan and count, but send nothing.")

    @model_validator(mode="after")
    def _refuse_stale_lists(self) -> Self:
        if self.list_timeout_ms + self.migrate_timeout_ms > 10_000:
            raise ValueError("list_timeout_ms and migrate_timeout_ms together must not exceed 10,000")
        return self

    @property
    def options(self) -> RebalanceOptions:
        """The same for the planner."""
        return RebalanceOptions(
            settle_ms=self.settle_ms,
            handover_s=self.handover_ms / 1_000,
            stalled_after_ms=self.stalled_after_ms,
            max_moves=self.max_moves,
        )


class Settings(ServiceSettings):
    """Rebalancer of DualMap: moves waiting requests away from where they would miss."""

    server: ServerSettings = ServerSettings(port=7073)
    rebalance: RoundSettings = RoundSettings()
    leader_lease_s: float = Field(
        default=3.0, ge=0.2, le=60, description="Leadership without renewal; a standby takes over after it."
    )
