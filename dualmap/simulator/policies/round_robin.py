"""Round robin: each router takes the instances in turn; neither cache nor load is looked at."""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Placement, Sight, eligible, look


class RoundRobin:
    """In turn."""

    name: ClassVar[str] = "round_robin"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """The next one."""
        del output_tokens
        views = eligible(sight, query)
        if not views:
            raise NoInstance(1_000)
        chosen = views[self._turn % len(views)]
        self._turn += 1
        return Placement(look(query.chain, chosen, sight.picture.default_slo_s))
