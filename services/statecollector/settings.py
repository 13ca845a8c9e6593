"""Settings of the state collector: how often it asks, how long it waits, when it gives an instance up for lost."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from dualmap.rpc.convert_state import MAX_WAIT_MS
from dualmap.runtime.settings import Block, ServerSettings, ServiceSettings


class PollSettings(Block):
    """One instance's polling."""

    interval_ms: int = Field(
        default=100, ge=10, le=10_000, description="Between polls of a busy instance: a fiftieth of the default SLO."
    )
    jitter: float = Field(
        default=0.2, ge=0, lt=1, description="Share of the interval either way, so that agents are not asked in step."
    )
    timeout_ms: int = Field(
        default=500, ge=20, le=10_000, description="Deadline of one poll; two of them are a third of a lease."
    )
    hold_ms: int = Field(
        default=1_000,
        ge=0,
        le=MAX_WAIT_MS,
        description="Longest an idle agent may hold its answer until something changes; 0 asks without holding.",
    )
    held_streams: bool = Field(
        default=True, description="Polls of an instance share one stream: half the CPU of a call each, on both ends."
    )
    tick_ms: int = Field(
        default=10,
        ge=0,
        le=1_000,
        description="Polls begin at multiples of it: waking once for several costs a third less; 0 spreads them.",
    )
    gather_ms: int = Field(
        default=5,
        ge=0,
        le=1_000,
        description="Time a result waits for others to be written with: a twentieth of a poll halves Redis's work.",
    )
    failures_to_unreachable: int = Field(
        default=2, ge=1, le=10, description="Failed polls in a row; one may be a lost packet, two are not."
    )
    backoff_ms: int = Field(
        default=1_000, ge=10, le=60_000, description="Longest pause before asking an unreachable or lying agent again."
    )
    max_answer_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=64 * 1024,
        le=256 * 1024 * 1024,
        description="Longest answer taken; a million blocks are 9 MiB.",
    )

    @model_validator(mode="after")
    def _refuse_what_would_hammer(self) -> Self:
        if self.backoff_ms < self.interval_ms:
            raise ValueError("backoff_ms must not be below interval_ms")
        if max(self.tick_ms, self.gather_ms) > self.interval_ms:
            raise ValueError("tick_ms and gather_ms must not be above interval_ms: a poll would miss its turn")
        return self


class ShareSettings(Block):
    """How several collectors divide a pool."""

    beat_ms: int = Field(default=400, ge=20, le=10_000, description="Between looks at ring and other collectors.")
    ttl_ms: int = Field(
        default=1_200,
        ge=60,
        le=60_000,
        description="A collector silent so long is dead; with one beat its share is taken over within 2 s.",
    )

    @model_validator(mode="after")
    def _refuse_flapping(self) -> Self:
        if self.ttl_ms < 2 * self.beat_ms:
            raise ValueError("ttl_ms must be at least twice beat_ms, or a late beat gives the share away")
        return self


class Settings(ServiceSettings):
    """State collector of DualMap: polls the agents and writes their state to Redis."""

    server: ServerSettings = ServerSettings(port=7072)
    poll: PollSettings = PollSettings()
    share: ShareSettings = ShareSettings()
