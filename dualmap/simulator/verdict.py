"""Whether a run attains its target, told as soon as nothing that is left can change the answer.

Counted as `report.measure` counts: the same answer as of the whole run, the rest of which is not played.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.simulator.report import quartiles
from dualmap.simulator.requests import SimRequest


class Verdict:
    """Looks at a run's requests as their deadlines pass. ``fair``: every quartile of prompt length must attain it.

    ``final``: a first token that came in time stays in time (no instance fails in this run).
    """

    def __init__(
        self, requests: Sequence[SimRequest], warmup: int, target: float, *, fair: bool, final: bool = True
    ) -> None:
        counted = requests[warmup:]
        parts = quartiles(counted) if fair else [list(counted)]
        self._part = {id(request): place for place, part in enumerate(parts) for request in part}
        self._sizes = [len(part) for part in parts]
        self._target = target
        self._final = final
        self._missed = [0] * len(parts)
        self._open = list(self._sizes)
        self._due = sorted(counted, key=lambda request: request.deadline_s)
        self._next = 0

    def at(self, now_s: float) -> bool | None:
        """The answer, or None while it is open. ``now_s`` never goes back."""
        while self._next < len(self._due) and self._due[self._next].deadline_s < now_s:
            self._settle(self._due[self._next])
            self._next += 1
        sizes = self._sizes
        if any(size and (size - lost) / size < self._target for size, lost in zip(sizes, self._missed, strict=True)):
            return False
        worst = [lost + left for lost, left in zip(self._missed, self._open, strict=True)]
        sure = all(not size or (size - lost) / size >= self._target for size, lost in zip(sizes, worst, strict=True))
        return True if sure and self._final else None

    def _settle(self, request: SimRequest) -> None:
        part = self._part[id(request)]
        self._open[part] -= 1
        self._missed[part] += not request.in_time
