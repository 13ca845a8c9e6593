"""Min TTFT (Mooncake's scheduler): the least predicted time to first token over all n; ties to the higher hit."""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Placement, Sight, eligible, look


class MinTtft:
    """Scan of all instances."""

    name: ClassVar[str] = "min_ttft"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """The best of all predictions, the second best as backup."""
        del output_tokens
        slo_s = sight.picture.default_slo_s
        looks = [look(query.chain, view, slo_s) for view in eligible(sight, query)]
        if not looks:
            raise NoInstance(1_000)
        looks.sort(key=lambda one: (one.predicted_s, -one.hit_tokens, one.instance_id))
        names = tuple(one.instance_id for one in looks[:2])
        return Placement(looks[0], names[1] if len(names) > 1 else "", names)
