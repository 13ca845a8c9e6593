"""Least loaded: the least sum of full input tokens not yet past their first token; ties at random, caches ignored."""

from __future__ import annotations

from typing import ClassVar

from dualmap.core.choose import RouteQuery
from dualmap.core.errors import NoInstance
from dualmap.core.state import QueuePolicy
from dualmap.simulator.policies.placing import Placement, Sight, eligible, look


class LeastLoaded:
    """Input tokens as load."""

    name: ClassVar[str] = "least_loaded"
    queue: ClassVar[QueuePolicy] = QueuePolicy.FIFO
    late: ClassVar[bool] = False
    rebalances: ClassVar[bool] = False
    heat: ClassVar[bool] = False
    central: ClassVar[bool] = False

    def place(self, query: RouteQuery, output_tokens: int, sight: Sight) -> Placement:
        """The instance with the fewest pending input tokens."""
        del output_tokens
        views = eligible(sight, query)
        if not views:
            raise NoInstance(1_000)
        pending = [sight.pending_prompt_tokens.get(view.instance_id, 0.0) for view in views]
        least = min(pending)
        ties = [view for view, tokens in zip(views, pending, strict=True) if tokens == least]
        chosen = ties[sight.random.randrange(len(ties))] if len(ties) > 1 else ties[0]
        return Placement(look(query.chain, chosen, sight.picture.default_slo_s))
