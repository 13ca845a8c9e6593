"""DualMap as released: the pair of a slowly lengthened key; half the SLO as threshold everywhere; hit-first queues.

Rule: both candidates under ``THRESHOLD`` (0.5 of the SLO in predicted wait): the longer hit, equal hits always ring 1.
One over it: the other. Both over: the longer hit, and the rebalancer may move the request on. Its key follows the same
split table as ours (the released one changes a level at a time and never merges), which flatters it. Its neighbour
i + 1 stands in as the third candidate of a move.
"""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.keys import key_of, request_key
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Look, Placement, Sight, look

THRESHOLD = 0.5


class DualMapReleased:
    """Half-SLO thresholds inside the pair."""

    name: ClassVar[str] = "dualmap_released"
    queue: ClassVar[QueuePolicy] = QueuePolicy.HIT_FIRST
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = True
    heat: ClassVar[bool] = True
    central: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """One decision inside the pair."""
        del output_tokens
        ring = sight.picture.ring
        key, blocks = key_of(query.chain.hashes, sight.picture.parameters.start_depth, sight.picture.splits)
        if not blocks:
            key = request_key(query.request_id)
        views = sight.views

        def usable(instance_id: str) -> bool:
            view = views.get(instance_id)
            return view is not None and view.eligible and instance_id not in query.exclude

        names = [name for name in ring.pair(key, usable) if name is not None]
        if not names:
            raise NoInstance(1_000)
        slo_s = sight.picture.default_slo_s
        looks = [look(query.chain, views[name], slo_s) for name in names]
        chosen = _choose(looks, THRESHOLD * slo_s)
        ids = ring.instance_ids
        neighbour = ids[(ids.index(chosen.instance_id) + 1) % len(ids)]
        others = tuple(name for name in (*names, neighbour) if name != chosen.instance_id)
        return Placement(chosen, others[0] if others else "", (chosen.instance_id, *others), key, blocks)


def _choose(looks: list[Look], threshold_s: float) -> Look:
    under = [one for one in looks if one.ahead_s <= threshold_s]
    # max keeps the first of equals: ring 1, as released.
    return max(under or looks, key=lambda one: one.hit_tokens)
