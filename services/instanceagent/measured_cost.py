"""What prefills cost at one engine, measured as well as the engine lets one: its own times, its counters, or our clock.

Knows no queue and no clock: times are monotonic milliseconds that the caller brings.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.core.cost import CostFit, PrefillWork
from dualmap.core.state import PrefillCost

ONE_STEP_MS = 10.0
"""First tokens this near to each other come from one step of the engine, or from steps too short to tell apart."""

MOST_IN_ONE = 32
"""Prefills of one sample: more would smear what it says."""


@dataclass(slots=True)
class _Step:
    """First tokens that came together: when their work began and what it was."""

    began_ms: float
    last_ms: float
    work: PrefillWork
    running: int


class MeasuredCost:
    """The fit of one instance. Once an engine's counters were heard, nothing else is believed."""

    def __init__(self, initial: PrefillCost) -> None:
        self._fit = CostFit(initial)
        self._staged_ms: dict[int, float] = {}
        self._edge_ms = float("-inf")
        self._step: _Step | None = None
        self._spoilt = False
        self._counted = False
        self._uncounted = PrefillWork()
        self._running = 0
        # Asked several times a request, changed once.
        self._beside: dict[int, PrefillCost] = {}
        self.refused = 0
        """Samples that were no use: impossible ones, and times in which a prefill was given up."""

    def cost(self, running: int) -> PrefillCost:
        """The cost beside so many decoding sequences."""
        cost = self._beside.get(running)
        if cost is None:
            cost = self._beside[running] = self._fit.cost_beside(running)
        return cost

    def staged(self, number: int, now_ms: float) -> None:
        """A job was released to the engine."""
        self._staged_ms[number] = now_ms

    def gone(self, number: int) -> None:
        """A job left without first token: part of the engine's time went into it, nobody knows how much."""
        if self._staged_ms.pop(number, None) is not None:
            self._spoilt = True

    def first_token(self, number: int, tokens: tuple[int, int], engine_s: float | None, now_ms: float) -> None:
        """A job's first token: (miss, context) ``tokens``, and the seconds of its prefill where the engine says."""
        staged_ms = self._staged_ms.get(number, now_ms)
        work = PrefillWork.of(*tokens)
        if self._counted:
            self._uncounted += work
        elif engine_s is not None:
            self._learn(work, engine_s, self._running)
        else:
            self._note(work, staged_ms, now_ms)
        self._staged_ms.pop(number, None)

    def runs(self, running: int) -> None:
        """So many sequences decode from now on."""
        self._running = running

    def counted(self, miss_tokens: float, busy_s: float) -> None:
        """The engine's own counters since their last reading."""
        self._counted = True
        done = self._uncounted
        if done.prefills <= 0 or done.miss_tokens <= 0 or miss_tokens <= 0:
            return
        # What the engine counted decides how much; ours only says in how many prefills and how long ones.
        share = miss_tokens / done.miss_tokens
        self._uncounted = PrefillWork()
        self._learn(PrefillWork(done.prefills, miss_tokens, done.token_pairs * share), busy_s, self._running)

    def settle(self, now_ms: float) -> None:
        """Time went by: a step that nothing joined is over."""
        if self._step is not None and now_ms - self._step.last_ms > ONE_STEP_MS:
            self._close()

    def _note(self, work: PrefillWork, staged_ms: float, now_ms: float) -> None:
        step = self._step
        if step is not None:
            together = now_ms - step.last_ms <= ONE_STEP_MS and step.work.prefills < MOST_IN_ONE
            if together:
                step.work += work
                step.last_ms = now_ms
                return
            self._close()
        # The engine was busy since the last first token, or since the first job that it was given after it.
        began_ms = max(self._edge_ms, min(staged_ms, *self._staged_ms.values(), staged_ms))
        self._step = _Step(began_ms, now_ms, work, self._running)

    def _close(self) -> None:
        step = self._step
        if step is None:
            return
        self._step = None
        self._edge_ms = step.last_ms
        if self._spoilt:
            self._spoilt = False
            self.refused += 1
            return
        self._learn(step.work, (step.last_ms - step.began_ms) / 1_000, step.running)

    def _learn(self, work: PrefillWork, seconds: float, running: int) -> None:
        self._beside.clear()
        if not self._fit.observe_work(work, seconds, running):
            self.refused += 1
