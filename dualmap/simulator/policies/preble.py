"""Preble (E2): exploit when the longest cached prefix is longer than the new part, at the cheapest of its holders.

Else explore: the least windowed cost over all instances.

Parameters: ``WINDOW_S`` 180: how long placed work counts. ``DECODE_S_PER_TOKEN``: what an output token adds to a cost
(decodes share their batch). ``EVICTION_WEIGHT``: share of the displaced tokens' prefill cost that a full cache adds.
``REBALANCE_FACTOR`` 2: where the heaviest instance's window exceeds so many times the lightest, exploitation of it
goes to the lightest, which moves hot subtrees.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.instance_view import InstanceView
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Look, Placement, Sight, eligible, look

WINDOW_S = 180.0
DECODE_S_PER_TOKEN = 0.001
EVICTION_WEIGHT = 0.1
REBALANCE_FACTOR = 2.0


class Preble:
    """Exploit or explore."""

    name: ClassVar[str] = "preble"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def __init__(self) -> None:
        self._placed: deque[tuple[float, str, float]] = deque()
        self._window_s: dict[str, float] = {}

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """One decision; the work placed enters the window."""
        self._forget(sight.now_s - WINDOW_S)
        views = eligible(sight, query)
        if not views:
            raise NoInstance(1_000)
        slo_s = sight.picture.default_slo_s
        looks = [look(query.chain, view, slo_s) for view in views]
        chosen = self._exploit(query, looks) or self._explore(looks, views)
        work_s = chosen.prefill_s + output_tokens * DECODE_S_PER_TOKEN
        self._placed.append((sight.now_s, chosen.instance_id, work_s))
        self._window_s[chosen.instance_id] = self._load_s(chosen) + work_s
        return Placement(chosen)

    def _exploit(self, query: RouteQuery, looks: list[Look]) -> Look | None:
        longest = max(one.hit_tokens for one in looks)
        if longest <= query.chain.prompt_tokens - longest:
            return None
        holders = [one for one in looks if one.hit_tokens == longest]
        chosen = min(holders, key=lambda one: (self._load_s(one), one.instance_id))
        lightest = min(looks, key=lambda one: (self._load_s(one), one.instance_id))
        if self._load_s(chosen) > REBALANCE_FACTOR * self._load_s(lightest) + slack_of(chosen):
            return lightest
        return chosen

    def _explore(self, looks: list[Look], views: list[InstanceView]) -> Look:
        def cost_s(pair: tuple[Look, InstanceView]) -> tuple[float, str]:
            one, view = pair
            eviction_s = EVICTION_WEIGHT * one.prefill_s if view.load.kv_use > 0.99 else 0.0
            return self._load_s(one) + one.prefill_s + eviction_s, one.instance_id

        return min(zip(looks, views, strict=True), key=cost_s)[0]

    def _load_s(self, one: Look) -> float:
        return self._window_s.get(one.instance_id, 0.0)

    def _forget(self, before_s: float) -> None:
        while self._placed and self._placed[0][0] < before_s:
            _, instance_id, work_s = self._placed.popleft()
            self._window_s[instance_id] = max(0.0, self._window_s[instance_id] - work_s)


def slack_of(one: Look) -> float:
    """Windowed work below which imbalance is no reason to leave a warm cache: one prefill of the whole prompt."""
    return one.prefill_s * 4
