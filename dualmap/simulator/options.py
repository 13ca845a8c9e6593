"""What a run of the simulator is told: cluster, control plane, queue and timetable. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dualmap.core.binding import BindingOptions
from dualmap.core.choose import ChooseOptions
from dualmap.core.engine_model import EngineOptions
from dualmap.core.heat_tree import HeatOptions
from dualmap.core.queue_order import OrderOptions
from dualmap.core.rebalance import RebalanceOptions
from dualmap.core.state import PrefillCost, QueuePolicy

COST_7B = PrefillCost(a_s=0.020, b_s_per_token=0.000_16)
"""The paper's 7B model on a 910B4, and 20 ms a prefill."""

COST_14B = PrefillCost(a_s=0.020, b_s_per_token=0.000_127)
"""The paper's 14B model on a 910B3, and 20 ms a prefill."""

Happening = Literal["join", "drain", "fail", "restart", "stall"]


@dataclass(frozen=True, slots=True)
class TimetableEntry:
    """Something that happens to an instance. ``duration_s`` is read for a stall only."""

    at_s: float
    happening: Happening
    instance: int
    duration_s: float = 0.0


def simulated_engine(cost: PrefillCost = COST_7B, **changes: float) -> EngineOptions:
    """An engine whose decodes do not slow its prefills, as the paper's cost model has it; ``changes`` by field name."""
    engine = EngineOptions(cost=cost, prefill_slowdown_per_running=0.0)
    return replace(engine, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """The control plane. ``poll_s`` 0: every decision sees the exact state; else views are refreshed each period.

    ``message_s``: delay of every message. ``routers``: each with its own view and bookings, served in turn.
    ``bookings``: whether a router counts what it sent and no report shows yet. ``rebalance_s`` 0: no rebalancer.
    ``heat_s``: period of heat reports, 0 leaves the key at its start depth. ``fit_cost``: instances learn their cost
    from their own prefills instead of being told it; ``slowdown_term``: and what decodes beside a prefill add.
    ``grace_s``: how long the previous mapping stays readable.
    """

    poll_s: float = 0.0
    message_s: float = 0.0
    routers: int = 1
    bookings: bool = True
    rebalance_s: float = 0.25
    heat_s: float = 1.0
    grace_s: float = 60.0
    fit_cost: bool = False
    slowdown_term: bool = True
    start_depth: int = 1


EXACT = ControlOptions()
AS_BUILT = ControlOptions(poll_s=0.1, message_s=0.003, routers=2, fit_cost=True)
"""100 ms polls, 3 ms messages, two routers."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """One run. ``speeds``: relative speed of each instance, 1 where the list ends. ``queue`` None: the policy's own.

    ``offer_all``: holders offer all that waits, not only what they have given up.
    """

    instances: int = 8
    ttft_slo_s: float = 5.0
    engine: EngineOptions = field(default_factory=simulated_engine)
    speeds: Sequence[float] = ()
    control: ControlOptions = EXACT
    choose: ChooseOptions = field(default_factory=ChooseOptions)
    rebalance: RebalanceOptions = field(default_factory=RebalanceOptions)
    heat: HeatOptions = field(default_factory=HeatOptions)
    binding: Literal["early", "late"] = "late"
    binding_options: BindingOptions = field(default_factory=BindingOptions)
    queue: QueuePolicy | None = None
    order: OrderOptions = field(default_factory=OrderOptions)
    offer_all: bool = False
    feed_tokens: int = 8_192
    max_wait_s: float = 120.0
    timetable: Sequence[TimetableEntry] = ()
    sample_s: float = 1.0
    seed: int = 1
