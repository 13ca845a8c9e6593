"""What an engine has been given and how it gets on: staged, running, rest of the work, stalled or wedged. No clock."""

from __future__ import annotations

from dataclasses import dataclass

STALLED_AFTER_MS = 500.0
PATIENCE = 2.0
"""Predicted steps without progress before an engine counts as stalled (design: rebalancer)."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """A released request that has no first token yet; ``charge_tokens`` is what the feed rule counts."""

    charge_tokens: int
    miss_tokens: int
    prefill_s: float


class Progress:
    """Ledger of one engine's jobs by number; times are monotonic milliseconds."""

    def __init__(self, suspect_after_ms: float) -> None:
        self._suspect_after_ms = suspect_after_ms
        self._staged: dict[int, StagedJob] = {}
        self._running: set[int] = set()
        self._moved_ms = 0.0
        self._prefill_since_ms = 0.0
        self._staged_tokens = 0

    @property
    def staged(self) -> int:
        """Jobs without first token."""
        return len(self._staged)

    @property
    def running(self) -> int:
        """Jobs past their first token."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether the engine has anything."""
        return bool(self._staged or self._running)

    @property
    def staged_tokens(self) -> int:
        """Sum of the staged jobs' charges."""
        return self._staged_tokens

    @property
    def staged_miss_tokens(self) -> int:
        """Uncached prompt tokens of the staged jobs."""
        return sum(job.miss_tokens for job in self._staged.values())

    def stage(self, number: int, job: StagedJob, now_ms: float) -> None:
        """A job was released. The first one of an idle engine starts the clock."""
        if not self._staged:
            self._moved_ms = self._prefill_since_ms = now_ms
        self._staged[number] = job
        self._staged_tokens += job.charge_tokens

    def first_token(self, number: int, now_ms: float) -> StagedJob | None:
        """The job runs; gives what it was staged as."""
        job = self._unstage(number)
        if job is not None:
            self._running.add(number)
        self._moved_ms = self._prefill_since_ms = now_ms
        return job

    def started(self, now_ms: float) -> None:
        """The engine began a prefill."""
        self._moved_ms = self._prefill_since_ms = now_ms

    def moved(self, now_ms: float) -> None:
        """The engine showed a sign of work."""
        self._moved_ms = now_ms

    def gone(self, number: int, now_ms: float, *, progress: bool) -> None:
        """The job left the engine. A cancel is no sign of work: ``progress`` False."""
        if number == next(iter(self._staged), None):
            self._prefill_since_ms = now_ms
        self._unstage(number)
        self._running.discard(number)
        if progress:
            self._moved_ms = now_ms

    def rest_s(self, now_ms: float) -> float:
        """Seconds until all staged jobs are predicted past their first token. 0 when none is staged."""
        if not self._staged:
            return 0.0
        oldest = next(iter(self._staged.values()))
        # Not since the last sign of work: tokens of those that run say nothing of how far the prefill is.
        elapsed_s = max(0.0, now_ms - self._prefill_since_ms) / 1_000
        return self._step_s() - min(elapsed_s, oldest.prefill_s)

    def stalled_ms(self, now_ms: float) -> float:
        """Milliseconds without progress once they exceed what the step may take; 0 while it moves."""
        silent_ms = self._silent_ms(now_ms)
        return silent_ms if silent_ms > max(STALLED_AFTER_MS, PATIENCE * self._step_s() * 1_000) else 0.0

    def suspect(self, now_ms: float) -> bool:
        """Whether the engine has to be taken for wedged."""
        return self._silent_ms(now_ms) > max(self._suspect_after_ms, PATIENCE * self._step_s() * 1_000)

    def _silent_ms(self, now_ms: float) -> float:
        return max(0.0, now_ms - self._moved_ms) if self.busy else 0.0

    def _step_s(self) -> float:
        # An engine may prefill all that is staged in one batch: nothing need come out before its end.
        return sum(job.prefill_s for job in self._staged.values())

    def _unstage(self, number: int) -> StagedJob | None:
        job = self._staged.pop(number, None)
        if job is not None:
            self._staged_tokens -= job.charge_tokens
        return job
