"""DualMap as released: the pair of a slowly lengthened key; half the SLO as threshold everywhere; hit-first queues.

Rule: both candidates under ``THRESHOLD`` (0.5 of the SLO in predicted wait): the longer hit, equal hits always ring 1.
One over it: the other. Both over: the longer hit, and the rebalancer may move the request on. Its neighbour i + 1 is
the third candidate of a move.

Key: ``KEY_TOKENS`` of the prompt, so many more where that prefix is split. A prefix is split by one level when it is
more than ``HOT_SHARE`` of the last ``WINDOW`` observations, each request observed twice; nothing is ever merged.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import ClassVar

from dualmap.core.blocks import Chain
from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.keys import request_key
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Look, Placement, Sight, look

THRESHOLD = 0.5
KEY_TOKENS = 512
HOT_SHARE = 0.0612
WINDOW = 200


class DualMapReleased:
    """Half-SLO thresholds inside the pair."""

    name: ClassVar[str] = "dualmap_released"
    queue: ClassVar[QueuePolicy] = QueuePolicy.HIT_FIRST
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = True
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def __init__(self) -> None:
        self._split: set[int] = set()
        self._window: deque[int] = deque()
        self._seen: Counter[int] = Counter()

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """One decision inside the pair."""
        del output_tokens
        ring = sight.picture.ring
        key, blocks = self._key(query.chain)
        if blocks:
            self._observe(key)
        else:
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

    def _key(self, chain: Chain) -> tuple[int, int]:
        level = max(1, KEY_TOKENS // chain.block_tokens)
        blocks = min(level, len(chain.hashes))
        while blocks and chain.hashes[blocks - 1] in self._split and blocks + level <= len(chain.hashes):
            blocks += level
        return (chain.hashes[blocks - 1], blocks) if blocks else (0, 0)

    def _observe(self, key: int) -> None:
        for _ in range(2):
            self._window.append(key)
            self._seen[key] += 1
            if len(self._window) > WINDOW:
                self._seen[self._window.popleft()] -= 1
        if self._seen[key] > HOT_SHARE * WINDOW:
            self._split.add(key)


def _choose(looks: list[Look], threshold_s: float) -> Look:
    under = [one for one in looks if one.ahead_s <= threshold_s]
    # max keeps the first of equals: ring 1, as released.
    return max(under or looks, key=lambda one: one.hit_tokens)
