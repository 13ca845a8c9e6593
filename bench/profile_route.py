"""Where a route's microseconds go: `python -m bench.profile_route [form number]`, in process, no server, no threads.

Each part is the best of many short stretches in processor time: what it costs when nothing else disturbs it.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable, Iterable

from bench.router_in_process import full_view, servicer_over
from dualmap.cli.bench_load import Bodies
from dualmap.cli.bench_workload import FORMS, samples
from dualmap.core.choose import ChooseOptions, RouteQuery, book, choose
from dualmap.core.state import TicketsSeen
from dualmap.rpc.convert_route import RouteRules, digest_of, read_route, route_call

CALLS = 16_000
STRETCH = 250


def main() -> None:
    """Print the price of each part, then the profile of the whole."""
    form = FORMS[int(sys.argv[1]) if len(sys.argv) > 1 else 0]
    view = full_view(form)
    servicer = servicer_over(view)
    bodies = Bodies([sample.body for sample in samples(form)])
    gc.collect()
    gc.freeze()
    gc.disable()
    calls = CALLS if form.tokens < 9_000 else CALLS // 8

    def cover() -> None:
        for one in view.instances.values():
            one.bookings.cover(TicketsSeen(1, 1 << 62))

    def report(name: str, work: Callable[..., object], inputs: Iterable[object]) -> None:
        print(f"  {name:28s} {_best(work, list(inputs), cover):7.2f} µs")

    raws = [next(bodies) for _ in range(calls)]
    rules = RouteRules(("default",), view.picture.parameters, 5.0)  # type: ignore[union-attr]
    print(f"{form.name}:")
    report("whole handler", lambda raw: servicer.route(raw, None), raws)  # type: ignore[arg-type]
    cover()
    report("parse", read_route, raws)
    messages = [read_route(raw) for raw in raws]
    report("check and chain", lambda message: route_call(message, 0, rules), messages)
    report("digest", digest_of, raws)
    queries = [route_call(message, 0, rules).query for message in messages]
    options, picture = ChooseOptions(), view.picture

    def decide(query: RouteQuery) -> None:
        choose(query, picture, view.instances, options, 0.0)  # type: ignore[arg-type]

    def decide_and_book(query: RouteQuery) -> None:
        decision = choose(query, picture, view.instances, options, 0.0)  # type: ignore[arg-type]
        book(decision, view.instances[decision.chosen.instance_id], query, 0.0)

    report("choose", decide, queries)
    report("choose and book", decide_and_book, queries)
    if len(sys.argv) > 2:
        more = [next(bodies) for _ in range(calls)]
        profile = cProfile.Profile()
        profile.enable()
        for raw in more:
            servicer.route(raw, None)  # type: ignore[arg-type]
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def _best(work: Callable[..., object], inputs: list[object], between: Callable[[], None]) -> float:
    """Microseconds of one call, best stretch."""
    best = float("inf")
    for first in range(0, len(inputs), STRETCH):
        part = inputs[first : first + STRETCH]
        began = time.thread_time()
        for one in part:
            work(one)
        best = min(best, (time.thread_time() - began) / len(part))
        between()
    return best * 1e6


if __name__ == "__main__":
    main()
