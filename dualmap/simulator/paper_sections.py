"""The sections of `dualmap simulate paper`. Each asks for all of its runs, yields once, and then writes what came."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from dualmap.simulator import paper_jobs as jobs
from dualmap.simulator.goodput import GoodputFigure, Trial
from dualmap.simulator.options import COST_14B
from dualmap.simulator.paper_desk import Asked, Desk, best, figures, measures, spread
from dualmap.simulator.paper_text import Document, run_rows
from dualmap.simulator.plots import draw_bars, draw_curves, draw_trade_off
from dualmap.simulator.report import Measures
from dualmap.simulator.study import means

CONVERSATION = "Conversation"
HYBRID = "Tool&Agent hybrid"

Section = Generator[None, None, Document]

_ROUGH = {
    CONVERSATION: {
        "min_ttft": "6.05", "preble": "5.0", "least_loaded": "4.85", "dualmap_released": "5.6",
        "dualmap": "6.71", "dualmap as built": "6.68", "dualmap early binding": "6.34",
        "min_ttft + slo queue": "6.49", "ceiling_central": "7.16", "ceiling_shared_cache": "8.45",
    },
    HYBRID: {
        "min_ttft": "10.95", "preble": "10.95", "least_loaded": "9.6", "dualmap_released": "11.1",
        "dualmap": "14.8", "dualmap as built": "14.6", "dualmap early binding": "13.2",
        "min_ttft + slo queue": "13.4", "ceiling_central": "15.5", "ceiling_shared_cache": "18.5",
    },
}  # fmt: skip
"""Fair goodput of earlier rough simulations (mean of 4 to 6 seeds): another program, so beside ours, not against it."""

_PAPER_GOODPUT = "The paper: goodput +14.3 to +40 % on Conversation, +16.7 to +48 % on Tool&Agent, own queues."
_PAPER_CAPACITY = "The paper, own queues: 1.41 to 1.8 x on Conversation, up to 2.25 x on Tool&Agent."
_BELOW, _ABOVE = 0.40, 0.90
"""Attainment of the best baseline within which the ratio of effective capacities is read."""


def goodput(desk: Desk) -> Section:
    """Fair goodput of everything."""
    rows = [*jobs.bindings(), *jobs.published(), jobs.same_queue("min_ttft"), jobs.same_queue("preble")]
    rows += [*jobs.ceilings(), *(Trial(name, name, jobs.OURS) for name in desk.extent.peers)]
    if desk.extent.quick:
        wanted = {*jobs.MAIN, "dualmap as built"}
        rows = [one for one in rows if one.label in wanted]
    asked = {name: desk.goodputs(name, rows, 0.9, fair=True) for name in desk.workloads}
    yield
    document = Document("goodput", "Fair goodput at 90 %: 8 instances, TTFT objective 5 s, 7B cost")
    for name in desk.workloads:
        found = _goodput_table(document, desk, name, asked[name], "fair, 90 %", _ROUGH.get(name, {}))
        document.say(_goodput_lead(found))
        bars = {one.label: (one.goodput, *one.spread) for one in found.values()}
        document.picture(desk.folder, f"goodput_{_slug(name)}.svg", draw_bars, f"{name}, fair, 90 %", "req/s", bars)
    document.say(_PAPER_GOODPUT)
    return document


def plain(desk: Desk) -> Section:
    """Plain goodput at 90 % and at 99 % of the main rows."""
    rows = [jobs.trial("dualmap"), *(Trial(name, name, jobs.OURS) for name in ("min_ttft", "preble"))]
    rows += [jobs.same_queue("min_ttft"), *jobs.ceilings()]
    if desk.extent.quick:
        rows = [one for one in rows if one.label in {"dualmap", "min_ttft + slo queue"}]
    asked = {
        (name, target): desk.goodputs(name, rows, target, fair=False)
        for target in (0.9, 0.99)
        for name in desk.workloads
    }
    yield
    document = Document("plain", "Plain goodput at 90 % and 99 %: a policy may drop the longest prompts")
    for (name, target), row in asked.items():
        document.say(_goodput_lead(_goodput_table(document, desk, name, row, f"plain, {target:.0%}", None)))
    document.say(_PAPER_GOODPUT)
    return document


def _goodput_table(  # noqa: PLR0917 - a table and its place
    document: Document, desk: Desk, name: str, asked: Asked, kind: str, beside: dict[str, str] | None
) -> dict[str, GoodputFigure]:
    found = figures(asked)
    bound = desk.bounds[name]
    head = ["policy", "req/s", "range over seeds", "of the bound"] + ([] if beside is None else ["rough simulation"])
    lines = [_goodput_row(one, bound, beside) for one in found.values()]
    document.table(f"{name}, {kind} (bound {bound:.2f} req/s)", head, lines)
    document.data[f"{name}, {kind}"] = {label: list(one.by_seed) for label, one in found.items()}
    return found


def _goodput_row(one: GoodputFigure, bound: float, beside: dict[str, str] | None) -> list[str]:
    row = [one.label, f"{one.goodput:.2f}", f"{one.spread[0]:.2f} to {one.spread[1]:.2f}", f"{one.goodput / bound:.2f}"]
    return row if beside is None else [*row, beside.get(one.label, "")]


def _goodput_lead(found: dict[str, GoodputFigure]) -> str:
    ours = found["dualmap"].goodput
    parts = []
    for what, labels in (("own queue", jobs.BASELINES), ("our queue", ("min_ttft + slo queue", "preble + slo queue"))):
        there = {label: found[label].goodput for label in labels if label in found}
        if there:
            other = best(there)
            parts.append(f"best of the others with {what}: {other}, ours is {ours / there[other] - 1:+.1%}")
    return "; ".join(parts).capitalize() + "."


def shape(desk: Desk) -> Section:
    """Hit rate against balance, attainment against rate, keys."""
    trials = [jobs.trial("dualmap"), *jobs.published()]
    shares = (0.85,) if desk.extent.quick else (0.6, 0.75, 0.85, 1.0)
    asked = {
        (name, share): desk.runs(name, trials, desk.rate(name, share)) for name in desk.workloads for share in shares
    }
    yield
    document = Document("shape", "Hit rate against balance, attainment against rate (the paper's figures 1 and 3)")
    for name in desk.workloads:
        curves: dict[str, list[tuple[float, float]]] = {}
        for share in shares:
            rate = desk.rate(name, share)
            found = _table(document, f"{name} at {rate} req/s", measures(asked[name, share]))
            for label, row in found.items():
                curves.setdefault(label, []).append((rate, means(row)["attainment"]))
            if share == 0.85:
                points = {label: (means(row)["load_cv"], means(row)["hit_rate"]) for label, row in found.items()}
                document.picture(
                    desk.folder, f"trade_off_{_slug(name)}.svg", draw_trade_off, f"{name}, {rate} req/s", points
                )
                depths = found["dualmap"][0].key_depths
                document.say(f"Keys of dualmap, blocks of 512: {_depths(depths)}.")
        file = f"attainment_{_slug(name)}.svg"
        document.picture(desk.folder, file, draw_curves, name, "req/s", "share in SLO", curves)
    document.say("The paper keys Conversation 95 % at 2 blocks; Tool&Agent 45.2 % at 2, 14.9 % at 6, 37.8 % at 13.")
    return document


def capacity(desk: Desk) -> Section:
    """Effective capacity against the best published baseline where it attains 0.40 to 0.90."""
    names = ("min_ttft", "preble", "dualmap_released")
    groups = {"own": [Trial(n, n, jobs.OURS) for n in names], "ours": [jobs.same_queue(n) for n in names]}
    shares = {"own": (0.75, 0.8, 0.85, 0.9, 1.0), "ours": (0.9, 1.0, 1.15, 1.3, 1.5, 1.75)}
    if desk.extent.quick:
        shares = {"own": (0.85,), "ours": (1.3,)}
    asked = {
        (name, queue, share): desk.runs(name, [jobs.trial("dualmap"), *groups[queue]], desk.rate(name, share))
        for name in desk.workloads
        for queue in groups
        for share in shares[queue]
    }
    yield
    document = Document("capacity", "Effective request capacity against the best published baseline")
    head = (
        "req/s",
        "queue of the baselines",
        "best baseline",
        "it attains",
        "dualmap",
        "ratio",
        "fair ratio",
        "counted",
    )
    for name in desk.workloads:
        rows, counted = [], dict[str, list[float]]()
        for queue in groups:
            for share in shares[queue]:
                found = measures(asked[name, queue, share])
                ours = means(found.pop("dualmap"))
                mean = {label: means(row) for label, row in found.items()}
                label = best({label: one["attainment"] for label, one in mean.items()})
                theirs = mean[label]["attainment"]
                inside = _BELOW <= theirs <= _ABOVE
                if inside:
                    counted.setdefault(queue, []).append(ours["attainment"] / theirs)
                fairest = max(one["fair_attainment"] for one in mean.values())
                row = [f"{desk.rate(name, share)}", queue, label, f"{theirs:.3f}", f"{ours['attainment']:.3f}"]
                rows.append(
                    [*row, _ratio(ours["attainment"], theirs), _ratio(ours["fair_attainment"], fairest), _yes(inside)]
                )
        document.table(name, head, rows)
        document.data[name] = {queue: counted.get(queue, []) for queue in groups}
        for queue in groups:
            ratios = counted.get(queue, [])
            told = f"{min(ratios):.2f} to {max(ratios):.2f} x" if ratios else "at no rate"
            document.say(f"With {queue} queue, where the best baseline attains 0.40 to 0.90: {told}.")
    document.say(_PAPER_CAPACITY)
    return document


def parts(desk: Desk) -> Section:
    """Parts off, and d = 1 to 4."""
    document = yield from _near_the_limit(
        desk, "parts", "Parts off, one at a time; d = 1 to 4 candidates", jobs.parts_off()
    )
    document.say(
        "The paper, on Conversation with its 14B: the SLO rule inside the pair P90 -18.5 %, rebalancing -11.3 %."
    )
    return document


def rules(desk: Desk) -> Section:
    """The rule of the decision."""
    return (yield from _near_the_limit(desk, "rules", "The rule of the decision (docs/decisions/0001)", jobs.rules()))


def queues(desk: Desk) -> Section:
    """The order of a queue, and what a pull may take."""
    return (
        yield from _near_the_limit(desk, "queues", "Queue order and pull (docs/decisions/0002, 0003)", jobs.queues())
    )


def _near_the_limit(desk: Desk, name: str, title: str, trials: Sequence[Trial]) -> Section:
    shares = dict(zip(desk.chosen, (0.9, 0.97), strict=False))
    asked = {one: desk.runs(one, trials, desk.rate(one, share)) for one, share in shares.items()}
    yield
    document = Document(name, title)
    for one, runs in asked.items():
        _table(document, f"{one} at {desk.rate(one, shares[one])} req/s", measures(runs))
    return document


def mechanisms(desk: Desk) -> Section:
    """None, rebalance, pull, both, by age of state, routers and stalls."""
    asked = {}
    for name in desk.chosen:
        rate = desk.rate(name, 0.85)
        timetable = jobs.stalls(len(desk.workloads[name].requests) / rate, 8)
        for stalled, table in (("no", ()), ("yes", timetable)):
            for poll_s in (0.1, 1.0):
                for routers in (1, 4):
                    trials = jobs.mechanisms(poll_s, routers, table)
                    asked[name, stalled, poll_s, routers] = desk.runs(name, trials, rate)
    yield
    document = Document("mechanisms", "None, rebalance, pull, both: age of state, routers, stalls")
    for name in desk.chosen:
        rows, data = [], {}
        for (workload, stalled, poll_s, routers), runs in asked.items():
            if workload == name:
                found = measures(runs)
                rows.append([f"{poll_s:g} s", str(routers), stalled, *(_cell(row) for row in found.values())])
                data[f"{poll_s:g} s old, {routers} routers, stalls {stalled}"] = {k: means(v) for k, v in found.items()}
        head = ("age of state", "routers", "stalls", "none", "rebalance", "pull", "both")
        document.table(f"{name} at {desk.rate(name, 0.85)} req/s: share in SLO, fair, p90 s", head, rows)
        document.data[name] = data
    document.say("Stalls: one engine in turn accepts and does not answer for 5 s a minute.")
    return document


def stale(desk: Desk) -> Section:
    """Old state, several routers, n = 64; the same queue for all."""
    settings = ((1.0, 4, 8), (1.0, 4, 64), (0.1, 1, 8))
    asked = {
        (name, *setting): desk.runs(name, jobs.stale(*setting), desk.rate(name, 0.85 * setting[2] / 8))
        for name in desk.workloads
        for setting in settings
    }
    fresh = {name: desk.runs(name, jobs.fresh(), desk.rate(name, 0.85)) for name in desk.workloads}
    yield
    document = Document("stale", "Old state, several routers, many instances; the same queue for every policy")
    for name in desk.workloads:
        tables = {"exact": measures(fresh[name])}
        for setting in settings:
            poll_s, routers, instances = setting
            title = f"{poll_s:g} s old, {routers} routers, n = {instances}"
            tables[title] = measures(asked[name, *setting])
        leads = []
        for title, found in tables.items():
            _table(document, f"{name}, {title}", found)
            leads += [_lead(title, found, other) for other in jobs.SAME_QUEUE if other in found]
        head = ("state", "against", "dualmap", "other", "lead", "sum of both ranges", "leads by more")
        document.table(f"{name}: lead in share in SLO", head, leads)
    return document


def keys(desk: Desk) -> Section:
    """Start depth, and what heat is counted by."""
    asked = {name: desk.runs(name, jobs.keys(), desk.rate(name, 0.88)) for name in desk.chosen}
    yield
    document = Document("keys", "Start depth of the key, and what heat is counted by")
    for name, runs in asked.items():
        found = _table(document, f"{name} at {desk.rate(name, 0.88)} req/s", measures(runs))
        document.say("; ".join(f"{label}: {_depths(row[0].key_depths)}" for label, row in found.items()) + ".")
    return document


def models(desk: Desk) -> Section:
    """The paper's second model."""
    trials = jobs.fourteen()
    rates = {name: round(desk.bound(name, COST_14B) * 0.85, 3) for name in desk.chosen}
    asked = {name: desk.runs(name, trials, rates[name]) for name in desk.chosen}
    yield
    document = Document("models", "The 14B cost: 0.127 ms a token")
    for name, runs in asked.items():
        _table(document, f"{name} at {rates[name]} req/s", measures(runs))
    return document


def decode(desk: Desk) -> Section:
    """Decodes that limit: the prediction with and without the slow-down term."""
    shares = (0.5,) if desk.extent.quick else (0.4, 0.5, 0.6)
    asked = {
        (name, share): desk.runs(name, jobs.decode_limited(), desk.rate(name, share))
        for name in desk.chosen
        for share in shares
    }
    yield
    document = Document("decode", "Decodes that limit: prediction and attainment with and without the slow-down term")
    for (name, share), runs in asked.items():
        _table(document, f"{name} at {desk.rate(name, share)} req/s", measures(runs))
    document.say(
        "Each running sequence adds 2 % to a prefill and 3 % to the time of a token; 20 tokens a second alone. "
        "In the last column what a decision predicted against what came, 90th percentile."
    )
    return document


def elasticity(desk: Desk) -> Section:
    """4 to 8 to 4, and 8 to 16 to 32."""
    name, quick = next(iter(desk.workloads)), desk.extent.quick
    plans = [
        (jobs.elasticity("4 to 8 to 4", 4, ((74.0, 4),), leave_s=150.0 if quick else 400.0), 0.62),
        (jobs.elasticity("8 to 16 to 32", 8, ((15.0, 8), (35.0, 16)) if quick else ((60.0, 8), (130.0, 16))), 2.2),
    ]
    asked = [(one, desk.rate(name, share), desk.time_line(name, one, desk.rate(name, share))) for one, share in plans]
    yield
    document = Document("elasticity", "Instances join and leave")
    for one, rate, future in asked:
        line = future.result()
        rows = [(f"{at_s:.0f}", f"{value:.3f}", str(count)) for at_s, value, count in line]
        title = f"{name}, {one.label}, {rate} req/s"
        document.table(title, ("from s", "share in SLO", "requests"), rows)
        document.data[one.label] = line
        curve = {one.label: [(at_s, value) for at_s, value, _ in line]}
        file = f"elasticity_{_slug(one.label)}.svg"
        document.picture(desk.folder, file, draw_curves, title, "seconds", "share in SLO", curve)
    document.say("The paper: 4 to 8 at t = 74 s brings attainment back to about 90 %.")
    return document


def _table(document: Document, title: str, found: dict[str, list[Measures]]) -> dict[str, list[Measures]]:
    document.runs(title, run_rows(found))
    document.data[title] = {label: means(row) for label, row in found.items()}
    return found


def _cell(row: Sequence[Measures]) -> str:
    mean = means(row)
    return f"{mean['attainment']:.3f}, {mean['fair_attainment']:.3f}, {mean['ttft_p90_s']:.2f}"


def _lead(title: str, found: dict[str, list[Measures]], other: str) -> list[str]:
    ours = [one.attainment for one in found["dualmap"]]
    theirs = [one.attainment for one in found[other]]
    lead = sum(ours) / len(ours) - sum(theirs) / len(theirs)
    ranges = max(ours) - min(ours) + max(theirs) - min(theirs)
    return [title, other, spread(ours), spread(theirs), f"{lead:+.3f}", f"{ranges:.3f}", _yes(lead > ranges)]


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "none"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _depths(depths: dict[int, float]) -> str:
    common = [(share, depth) for depth, share in depths.items() if share >= 0.005]
    return ", ".join(f"{share:.1%} at {depth}" for share, depth in sorted(common, reverse=True))


def _slug(text: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in text.lower())


SECTIONS: dict[str, Callable[[Desk], Section]] = {
    "goodput": goodput,
    "plain": plain,
    "stale": stale,
    "mechanisms": mechanisms,
    "capacity": capacity,
    "shape": shape,
    "parts": parts,
    "rules": rules,
    "queues": queues,
    "keys": keys,
    "models": models,
    "decode": decode,
    "elasticity": elasticity,
}
"""In the order their runs are given out: the longest first."""
