"""DualMap as built: core's `choose`.

The pair of the adaptive key and two looks beyond it; the least prediction plus weighted own work among those that keep
the SLO; rebalancer and pull work on what waits. Parts are switched off by options of the run.
"""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery, choose
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Look, Placement, Sight


class DualMap:
    """The production decision."""

    name: ClassVar[str] = "dualmap"
    queue: ClassVar[QueuePolicy] = QueuePolicy.SLO
    late: ClassVar[bool] = True
    rebalances: ClassVar[bool] = True
    heat: ClassVar[bool] = True
    central: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """Core's decision, told as a placement."""
        del output_tokens
        decision = choose(query, sight.picture, sight.views, sight.choose, sight.now_s * 1_000)
        chosen = decision.chosen
        backup = decision.backup
        return Placement(
            Look(
                chosen.instance_id,
                chosen.indexed_hit_tokens,
                chosen.hit_tokens,
                chosen.miss_tokens,
                chosen.work_ahead_s,
                chosen.prefill_s,
            ),
            backup.instance_id if backup is not None else "",
            tuple(candidate.instance_id for candidate in decision.candidates),
            decision.key,
            decision.key_blocks,
        )
