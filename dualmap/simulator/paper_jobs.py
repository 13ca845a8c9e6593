"""The set of comparisons behind `dualmap simulate paper`, as data: which trials on which workload at which rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualmap.core.binding import BindingOptions
from dualmap.core.choose import ChooseOptions
from dualmap.core.heat_tree import HeatOptions
from dualmap.core.state import QueuePolicy
from dualmap.simulator.goodput import Trial
from dualmap.simulator.options import (
    AS_BUILT,
    COST_14B,
    EXACT,
    ClusterOptions,
    TimetableEntry,
    simulated_engine,
)
from dualmap.simulator.registry import CEILINGS

BASELINES = ("min_ttft", "preble", "least_loaded", "cache_affinity", "round_robin", "dualmap_released")
OURS = ClusterOptions()
SAME_QUEUE = ("min_ttft + slo queue", "preble + slo queue", "least_loaded + slo queue")
MAIN = ("dualmap", "min_ttft", "preble", "min_ttft + slo queue", *CEILINGS)
"""Rows that a quick call keeps."""


def trial(label: str, policy: str = "dualmap", options: ClusterOptions = OURS) -> Trial:
    """A trial with our defaults unless told otherwise."""
    return Trial(label, policy, options)


def same_queue(policy: str, options: ClusterOptions = OURS) -> Trial:
    """A baseline with our queue order."""
    return Trial(f"{policy} + slo queue", policy, replace(options, queue=QueuePolicy.SLO))


def bindings() -> list[Trial]:
    """Ours: exact, as built, and with early binding."""
    return [
        trial("dualmap"),
        trial("dualmap as built", options=replace(OURS, control=AS_BUILT)),
        trial("dualmap early binding", options=replace(OURS, binding="early")),
        trial(
            "dualmap published rule",
            options=replace(OURS, choose=ChooseOptions(select="cache_first", escape_slo_fraction=0.7)),
        ),
    ]


def published() -> list[Trial]:
    """Every baseline with its own queue."""
    return [Trial(name, name, OURS) for name in BASELINES]


def ceilings() -> list[Trial]:
    """What no agents could do."""
    return [Trial(name, name, OURS) for name in CEILINGS]


def parts_off() -> list[Trial]:
    """Ours with one part off at a time, and d = 1 to 4 candidates."""
    trials = [trial("all on")]
    trials += [trial(f"select {name}", options=_choosing(select=name)) for name in ("min_ttft", "cache", "load")]
    trials += [
        trial(f"d = {count}, no escape", options=_choosing(escape=False, choices=count)) for count in (1, 2, 3, 4)
    ]
    off = replace(EXACT, rebalance_s=0.0)
    trials.append(trial("no rebalance", options=replace(OURS, control=off)))
    trials.append(trial("early binding", options=replace(OURS, binding="early")))
    trials.append(trial("early binding, no rebalance", options=replace(OURS, binding="early", control=off)))
    trials.append(trial("no heat", options=replace(OURS, control=replace(EXACT, heat_s=0.0))))
    return trials


def rules() -> list[Trial]:
    """The rule of the decision: the published one, the weight of own work, when others than the pair are looked at."""
    trials = [trial("weight 4, others above 0.2")]
    trials.append(
        trial("published rule, others above 0.7", options=_choosing(select="cache_first", escape_slo_fraction=0.7))
    )
    trials += [
        trial(f"weight {weight:g}, pair only", options=_choosing(work_weight=weight, escape=False))
        for weight in (0.0, 2.0, 4.0)
    ]
    trials += [
        trial(f"weight 4, others {said}", options=_choosing(escape_slo_fraction=share))
        for share, said in ((0.7, "above 0.7"), (0.4, "above 0.4"), (0.0, "always"))
    ]
    trials += [
        trial(f"weight {weight:g}, others above 0.2", options=_choosing(work_weight=weight))
        for weight in (0.0, 1.0, 2.0, 8.0)
    ]
    trials += [
        trial(f"weight 4, others above 0.2, {looks} looks", options=_choosing(looks=looks)) for looks in (3, 6, 8)
    ]
    return trials


def queues() -> list[Trial]:
    """The order of a queue: who gives way, aged turns, the other orders; and what a pull may take."""

    def ordered(**changes: object) -> ClusterOptions:
        return replace(OURS, order=replace(OURS.order, **changes))  # type: ignore[arg-type]

    anything = replace(OURS, offer_all=True, control=replace(EXACT, rebalance_s=0.0))
    return [
        trial("lots, one aged turn of 64 after 60 s"),
        trial("the longest gives way", options=ordered(even_drops=False)),
        trial("no aged turn", options=ordered(aged_after_ms=1e12)),
        trial("one aged turn of 8 after 15 s", options=ordered(aged_after_ms=15_000.0, aged_every=8)),
        trial("hit_first", options=replace(OURS, queue=QueuePolicy.HIT_FIRST)),
        trial("fifo", options=replace(OURS, queue=QueuePolicy.FIFO)),
        trial("no rebalance, pull of what was given up", options=replace(anything, offer_all=False)),
        trial("no rebalance, pull of anything, spare", options=anything),
        trial(
            "no rebalance, pull of anything, score",
            options=replace(anything, binding_options=BindingOptions(rule="score")),
        ),
    ]


def _choosing(**changes: object) -> ClusterOptions:
    return replace(OURS, choose=replace(OURS.choose, **changes))  # type: ignore[arg-type]


def mechanisms(poll_s: float, routers: int, stalls: Sequence[TimetableEntry]) -> list[Trial]:
    """None, rebalance, pull, both."""
    found = []
    for name, rebalance_s, late in (
        ("none", 0.0, False),
        ("rebalance", 0.25, False),
        ("pull", 0.0, True),
        ("both", 0.25, True),
    ):
        control = replace(AS_BUILT, poll_s=poll_s, routers=routers, rebalance_s=rebalance_s)
        options = replace(OURS, control=control, binding="late" if late else "early", timetable=stalls)
        stalled = ", stalls" if stalls else ""
        found.append(trial(f"{name}, {poll_s:g} s old, {routers} routers{stalled}", options=options))
    return found


def stalls(until_s: float, instances: int) -> list[TimetableEntry]:
    """One instance stalled 5 s a minute, in turn."""
    count = max(1, int(until_s // 60))
    return [TimetableEntry(30.0 + 60.0 * turn, "stall", turn % instances, 5.0) for turn in range(count)]


def fresh() -> list[Trial]:
    """Ours and the others at exact state, all with the same queue."""
    return [trial("dualmap"), *(same_queue(name) for name in ("min_ttft", "preble", "least_loaded"))]


def stale(poll_s: float, routers: int, instances: int) -> list[Trial]:
    """Ours and the scan of all at one age of state; on eight old ones also without rebalancer, and without bookings."""
    options = replace(OURS, instances=instances, control=replace(AS_BUILT, poll_s=poll_s, routers=routers))
    trials = [trial("dualmap", options=options), same_queue("min_ttft", options)]
    if poll_s < 1.0 or instances > 8:
        return trials
    alone = replace(options, binding="early", control=replace(options.control, rebalance_s=0.0))
    plain = replace(options, control=replace(options.control, bookings=False))
    return [
        *trials,
        same_queue("preble", options),
        trial("dualmap, early binding, no rebalance", options=alone),
        trial("dualmap, no bookings", options=plain),
        replace(same_queue("min_ttft", plain), label="min_ttft + slo queue, no bookings"),
    ]


def keys() -> list[Trial]:
    """Start depth, and heat by requests or by uncached tokens."""
    found = [
        trial(f"start depth {depth}", options=replace(OURS, control=replace(EXACT, start_depth=depth)))
        for depth in (1, 2, 8)
    ]
    found += [trial("heat by miss tokens", options=replace(OURS, heat=HeatOptions(weigh_by="miss_tokens")))]
    return found


def fourteen() -> list[Trial]:
    """The paper's second model."""
    options = replace(OURS, engine=simulated_engine(COST_14B))
    names = ("dualmap", "min_ttft", "preble", "dualmap_released", "cache_affinity", "least_loaded")
    found = [Trial(name, name, options) for name in names]
    found.append(same_queue("min_ttft", options))
    pair = replace(options, choose=replace(OURS.choose, select="min_ttft", escape=False))
    found.append(trial("least prediction inside the pair", options=pair))
    off = replace(options, binding="early", control=replace(EXACT, rebalance_s=0.0))
    return [*found, trial("dualmap, no rebalance, early binding", options=off)]


def decode_limited() -> list[Trial]:
    """Decodes that slow prefills, and prefills that starve decodes."""
    engine = simulated_engine(prefill_slowdown_per_running=0.02, decode_tokens_per_s=20.0, decode_batch_slowdown=0.03)
    options = replace(OURS, engine=engine)
    learnt = replace(options, control=replace(EXACT, fit_cost=True))
    blind = replace(options, control=replace(EXACT, fit_cost=True, slowdown_term=False))
    return [
        trial("dualmap, cost as told", options=options),
        trial("dualmap, cost learnt, no slow-down term", options=blind),
        trial("dualmap, cost learnt with the slow-down term", options=learnt),
        Trial("min_ttft, cost as told", "min_ttft", options),
    ]


def elasticity(label: str, start: int, joins: Sequence[tuple[float, int]], leave_s: float | None = None) -> Trial:
    """``start`` instances; at each time so many join; all that joined leave again if told when."""
    table: list[TimetableEntry] = []
    number = start
    for at_s, count in joins:
        table += [TimetableEntry(at_s, "join", number + place) for place in range(count)]
        number += count
    if leave_s is not None:
        table += [TimetableEntry(leave_s, "drain", place) for place in range(start, number)]
    return trial(label, options=replace(OURS, instances=start, timetable=table, control=AS_BUILT))
