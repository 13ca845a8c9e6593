"""Ceiling: one central queue with an instant view of every cache; an instance that frees takes what suits it best.

No agents could do it. Rule: of those that can meet their deadline here, least ``EXTRA_WEIGHT`` x extra work against the
best cache of all + slack; see `Cluster`.
"""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Placement, Sight


class CeilingCentral:
    """No routing: the cluster keeps one queue."""

    name: ClassVar[str] = "ceiling_central"
    queue: ClassVar[QueuePolicy] = QueuePolicy.SLO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = True
    shared_cache: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """Never asked."""
        del output_tokens, sight
        raise NoInstance(1_000, f"{query.request_id}: a central queue routes nothing")
