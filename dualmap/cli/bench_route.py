"""The bodies of `bench route`: a router process beside an empty server, variant after variant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import grpc

from dualmap.cli.bench_cluster import ROUTE, ROUTE_STREAM, Bench, Process, View, answer_bytes, empty_target, traced
from dualmap.cli.bench_load import Target, Timed, closed_turn, in_turns, open_turn, stream_turn
from dualmap.cli.bench_raw import RawCaller
from dualmap.cli.bench_report import Comparison, Latency, latency_of
from dualmap.cli.bench_workload import FORMS, HASHES_20, Form

SATURATING = 32
"""Calls in flight that keep one router and this client busy."""

OPEN_THREADS = 16
_WARM_S = 0.5
_PROBES_A_S = 300.0
_UNREACHABLE = "127.0.0.1:9"
"""The discard port: nothing listens there."""


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """``seconds`` of calls for each side of each variant; ``pools``: the other numbers of instances to try."""

    view: View = field(default_factory=View)
    seconds: float = 3.0
    pools: tuple[int, ...] = (64, 1024)


@dataclass(frozen=True, slots=True)
class Overload:
    """What a caller meets before, in and after a flood; calls a second at saturation, and of the flood."""

    saturation_rate: float
    flood_rate: float
    flood_served: float
    quiet: Latency
    under: Latency
    after: Latency
    recovered_s: float


class Pair:
    """A router and the empty server beside it, measured in turns."""

    def __init__(self, bench: Bench, router: Process, empty: Process) -> None:
        self.bench = bench
        self.router = router
        self.empty = empty

    def targets(self, form: Form = HASHES_20) -> tuple[Target, Target]:
        """Fresh targets for the same requests."""
        bodies = self.bench.bodies(form)
        return Target(self.router.address, ROUTE, bodies), empty_target(self.empty, bodies)

    def compare(self, variant: str, seconds: float, turn: Callable[[Target, float], None], form: Form) -> Comparison:
        """Both sides in turns, after a short warming up that does not count."""
        ours, theirs = self.targets(form)
        turns = (lambda s: turn(ours, s), lambda s: turn(theirs, s))
        in_turns(turns, _WARM_S)
        ours.timed, theirs.timed = Timed(), Timed()
        before = self.router.cpu_s, self.empty.cpu_s
        in_turns(turns, seconds)
        spent = self.router.cpu_s - before[0], self.empty.cpu_s - before[1]
        ours.close()
        theirs.close()
        return Comparison(variant, latency_of(ours.timed, spent[0]), latency_of(theirs.timed, spent[1]))

    def closed(self, variant: str, seconds: float, in_flight: int = 1, form: Form = HASHES_20) -> Comparison:
        """So many calls in flight."""
        return self.compare(variant, seconds, lambda target, s: closed_turn(target, in_flight, s), form)

    def open(self, variant: str, seconds: float, rate: float) -> Comparison:
        """Poisson arrivals at the same rate on both sides."""
        return self.compare(variant, seconds, lambda target, s: open_turn(target, rate, OPEN_THREADS, s), HASHES_20)

    def stream(self, seconds: float) -> Comparison:
        """A message on RouteStream against a unary Route, both of this router."""
        bodies = self.bench.bodies(HASHES_20)
        ours = Target(self.router.address, ROUTE_STREAM, bodies)
        theirs = Target(self.router.address, ROUTE, bodies)
        in_turns((lambda s: stream_turn(ours, s), lambda s: closed_turn(theirs, 1, s)), seconds)
        return Comparison("RouteStream", latency_of(ours.timed), latency_of(theirs.timed), "unary Route")


@contextmanager
def pair_of(bench: Bench, tracing: str, environment: Mapping[str, str] | None = None) -> Iterator[Pair]:
    """A router over the bench's view and an empty server that answers as many bytes."""
    with ExitStack() as stack:
        router = stack.enter_context(bench.router(tracing, environment))
        size = answer_bytes(router, bench.bodies(HASHES_20)[0])
        yield Pair(bench, router, stack.enter_context(bench.empty_server(size)))


def route_rows(options: RouteOptions, say: Callable[[str], None]) -> Iterator[Comparison]:
    """Every variant, one changed at a time from: 20 hashes, n = 8, tracing 1 %, unary, one in flight, quiet."""
    seconds = options.seconds
    with Bench(options.view) as bench:
        say("tracing 1 %")
        with pair_of(bench, "1 %") as pair:
            yield pair.closed("20 hashes, 1 in flight", 2 * seconds)
            saturated = pair.closed("saturation, 32 in flight", seconds, SATURATING)
            yield saturated
            yield pair.open("open loop at half of it", 2 * seconds, saturated.router.rate / 2)
            yield pair.closed("8 in flight", seconds, 8)
            yield pair.closed("64 in flight", seconds, 64)
            for form in FORMS[1:]:
                yield pair.closed(form.name, seconds, form=form)
            yield pair.stream(seconds)
        with pair_of(bench, "1 %") as pair:
            say("churn")
            with bench.feeder(2_000):
                yield pair.closed("2,000 block changes/s", 2 * seconds)
        for tracing in ("off", "100 %"):
            say(f"tracing {tracing}")
            with pair_of(bench, tracing) as pair:
                yield pair.closed(f"tracing {tracing}", seconds)
        say("no trace backend")
        with pair_of(bench, "off", traced(1.0, _UNREACHABLE)) as pair:
            yield pair.closed("tracing 100 %, no backend", seconds)
    for count in options.pools:
        say(f"n = {count}")
        with Bench(View(count, options.view.blocks)) as bench, pair_of(bench, "1 %") as pair:
            yield pair.closed(f"n = {count:,}", seconds)


def churn_against_quiet(options: RouteOptions) -> Comparison:
    """The same router's latency while 2,000 blocks change a second, against its own with nothing changing.

    Both are routers of their own over the same view, called in turns; only one of the two views is written to.
    """
    with ExitStack() as stack:
        quiet, churned = (stack.enter_context(Bench(options.view)) for _ in range(2))
        still = stack.enter_context(quiet.router("1 %"))
        moved = stack.enter_context(churned.router("1 %"))
        stack.enter_context(churned.feeder(2_000))
        bodies = quiet.bodies(HASHES_20)
        ours, theirs = Target(moved.address, ROUTE, bodies), Target(still.address, ROUTE, bodies)
        turns = (lambda s: closed_turn(ours, 1, s), lambda s: closed_turn(theirs, 1, s))
        in_turns(turns, _WARM_S)
        ours.timed, theirs.timed = Timed(), Timed()
        in_turns(turns, 2 * options.seconds)
    return Comparison("2,000 block changes/s", latency_of(ours.timed), latency_of(theirs.timed), "quiet view")


def workers_row(options: RouteOptions, workers: int = 2) -> Comparison:
    """Saturation of so many workers against one, in calls a second of processor time as well as of the clock."""
    with Bench(options.view) as bench, ExitStack() as stack:
        many = stack.enter_context(bench.router("1 %", {"DUALMAP_ROUTER__WORKERS": str(workers)}))
        one = stack.enter_context(bench.router("1 %"))
        return _saturation(bench, f"{workers} workers", many, one, options.seconds)


def _saturation(bench: Bench, variant: str, many: Process, one: Process, seconds: float) -> Comparison:
    bodies = bench.bodies(HASHES_20)
    # A connection stays with one worker: several, so that each gets some.
    ours, theirs = (Target(server.address, ROUTE, bodies, connections=8) for server in (many, one))
    turns = (lambda s: closed_turn(ours, SATURATING, s), lambda s: closed_turn(theirs, SATURATING, s))
    in_turns(turns, _WARM_S)
    ours.timed, theirs.timed = Timed(), Timed()
    before = many.cpu_s, one.cpu_s
    in_turns(turns, seconds)
    spent = many.cpu_s - before[0], one.cpu_s - before[1]
    return Comparison(variant, latency_of(ours.timed, spent[0]), latency_of(theirs.timed, spent[1]), "one worker")


def overload(options: RouteOptions) -> Overload:
    """A process that sends twice what saturates the router, whatever the answers; a few calls from here are timed."""
    with Bench(options.view) as bench, bench.router("1 %") as router:
        bodies = bench.bodies(HASHES_20)

        def probe(seconds: float) -> Timed:
            target = Target(router.address, ROUTE, bodies)
            in_turns((lambda s: open_turn(target, _PROBES_A_S, OPEN_THREADS, s),), seconds)
            target.close()
            return target.timed

        saturation = _raw_rate(router, bodies, options.seconds)
        quiet = probe(options.seconds)
        with bench.flood(router.address, 2 * saturation) as flood:
            # Most are refused: as many served ones are wanted as in the quiet.
            under = probe(2 * options.seconds)
            sent, served = flood.rates()
        recovered_s = _recovery_s(router, bodies, latency_of(quiet).p99_ms / 1_000)
        after = probe(options.seconds)
    return Overload(saturation, sent, served, latency_of(quiet), latency_of(under), latency_of(after), recovered_s)


def _raw_rate(router: Process, bodies: list[bytes], seconds: float) -> float:
    """Calls a second that the router serves to a caller which costs little itself."""
    caller = RawCaller(router.address, ROUTE, bodies)
    warm_until_s = time.perf_counter() + _WARM_S
    caller.closed(SATURATING, lambda: time.perf_counter() < warm_until_s)
    before, until_s = caller.counts.served, time.perf_counter() + seconds
    caller.closed(SATURATING, lambda: time.perf_counter() < until_s)
    caller.close()
    return (caller.counts.served - before) / seconds


def _recovery_s(router: Process, bodies: list[bytes], good_s: float) -> float:
    """Seconds from the flood's end until ten calls in a row were served within ``good_s``."""
    target = Target(router.address, ROUTE, bodies)
    began_s = now_s = time.perf_counter()
    row = 0
    while row < 10 and now_s - began_s < 10.0:
        try:
            target.call(next(target.bodies))
            row = row + 1 if time.perf_counter() - now_s <= good_s else 0
        except grpc.RpcError:
            row = 0
        now_s = time.perf_counter()
    target.close()
    return now_s - began_s
