"""Cache affinity: one ring over the same adaptive key; load is never looked at. ``--no-heat`` leaves the key fixed."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.dualmap import DualMap
from dualmap.simulator.policies.placing import Placement, Sight


class CacheAffinity(DualMap):
    """Ring 1 alone."""

    name: ClassVar[str] = "cache_affinity"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """The key's owner on ring 1."""
        alone = replace(sight.choose, choices=1, select="cache", escape=False)
        return super().place(query, output_tokens, replace(sight, choose=alone))
