"""One request as an agent holds it: the one state it is in, its times, its follower. Moves nothing by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from dualmap.core.waiting import WaitingRequest
from dualmap.rpc.submission import Handover, Submission
from services.instanceagent.outlet import Outlet
from services.instanceagent.spans import RequestSpans


class Phase(Enum):
    """Where a request is; exactly one of these."""

    WAITING = "waiting"
    HANDING_OVER = "handing_over"
    RELAYED = "relayed"
    STAGED = "staged"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class HeldRequest:
    """A request from its arrival here until it is done here. Times are monotonic milliseconds of this process.

    ``came`` is None for a request that a client submitted here: this agent is its origin.
    """

    submission: Submission
    instance_id: str
    waiting: WaitingRequest
    spans: RequestSpans
    came: Handover | None = None
    phase: Phase = Phase.WAITING
    outlet: Outlet = field(default_factory=Outlet)
    job_number: int = 0
    failures: int = 0
    staged_ms: float = 0.0
    first_token_ms: float = 0.0
    hit_tokens: int = 0
    prefill_ms: float = 0.0
    output_tokens: int = 0
    handover: int = 0
    handovers: int = 0
    moved_ms: float | None = None
    passed_on: bool = False
    relay: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        """The client's id."""
        return self.submission.request_id

    @property
    def attempt(self) -> int:
        """Which attempt of it."""
        return self.submission.attempt

    @property
    def identity(self) -> tuple[str, int]:
        """(request id, attempt)."""
        return (self.submission.request_id, self.submission.attempt)

    def in_phase(self, phase: Phase) -> bool:
        """Whether it is in that state now; other tasks change it wherever one is awaited."""
        return self.phase is phase

    def since_submission_ms(self, at_ms: float) -> float:
        """Milliseconds from its submission, at whichever holder, to ``at_ms``."""
        return max(0.0, at_ms - self.waiting.submitted_ms)
