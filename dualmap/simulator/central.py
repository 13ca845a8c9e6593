"""One queue for all instances, with an instant view of every cache: what no set of agents could do. A ceiling only."""

from __future__ import annotations

from collections.abc import Iterable

from dualmap.core.queue_order import feasible
from dualmap.simulator.instance import SimInstance
from dualmap.simulator.options import ClusterOptions
from dualmap.simulator.requests import SimRequest

EXTRA_WEIGHT = 4.0
"""Seconds of slack that a second of work beyond the best cache's outweighs."""


class CentralQueue:
    """Waiting requests of the whole cluster."""

    def __init__(self, options: ClusterOptions) -> None:
        self._waiting: dict[str, SimRequest] = {}
        self._options = options

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: SimRequest) -> None:
        """Add a request."""
        self._waiting[request.request_id] = request

    def by_suitability(self, request: SimRequest, instances: Iterable[SimInstance]) -> list[SimInstance]:
        """The instances with room, the cheapest for this request first."""
        free = [one for one in instances if one.alive and one.room_tokens() > 0]
        return sorted(free, key=lambda one: (one.cost_s(request.chain), one.number))

    def pick(
        self, instance: SimInstance, instances: Iterable[SimInstance], now_s: float, room_tokens: int
    ) -> SimRequest | None:
        """Take out what this instance should run next; None: nothing fits, or all would better wait for another."""
        if not self._waiting:
            return None
        everyone = [one for one in instances if one.alive]
        start_s = now_s + instance.rest_s(now_s)
        ordered = sorted(self._waiting.values(), key=lambda one: (one.deadline_s, one.index))
        costs = [instance.cost_s(one.chain) for one in ordered]
        live = [place for place, one in enumerate(ordered) if start_s + costs[place] <= one.deadline_s]
        share = [(ordered[place].deadline_s, costs[place] / len(everyone)) for place in live]
        kept = [live[place] for place in feasible(share, start_s)[0]]
        best: tuple[float, int] | None = None
        for place in kept:
            one = ordered[place]
            best_s = min(other.cost_s(one.chain) for other in everyone)
            slack_s = one.deadline_s - start_s - costs[place]
            extra_s = costs[place] - best_s
            if extra_s > 0.0 and extra_s * EXTRA_WEIGHT > self._options.ttft_slo_s - slack_s:
                continue
            score = EXTRA_WEIGHT * extra_s + slack_s
            if best is None or (score, place) < best:
                best = (score, place)
        if best is None:
            if kept:
                return None
            chosen = min(ordered, key=lambda one: (one.arrival_s, one.index))
        else:
            chosen = ordered[best[1]]
        if instance.hit_and_miss(chosen.chain)[1] > room_tokens:
            return None
        return self._waiting.pop(chosen.request_id)
