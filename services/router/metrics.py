"""The router's own metrics: plain numbers, turned into series when they are read."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.core.choose import Decision

DEPARTED_KEPT_MS = 300_000.0
_DECISION_S = (5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.05)
_TTFT_S = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 10.0, 30.0, 60.0)

COUNTED = {
    "repeated": "Answers given again for the same request and attempt.",
    "answers_overflowed": "Answers forgotten before their 30 s.",
    "aborted": "Repeated requests whose instance was no longer eligible.",
    "conflicting": "Repeated requests with other content.",
    "superseded": "Bookings released by a higher attempt.",
    "released": "Bookings given back by clients.",
    "expired": "Bookings that no report covered in time.",
    "no_instance": "Requests refused because no instance was eligible.",
    "overloaded": "Requests refused because no instance looked at admits work.",
    "shed": "Calls refused because too many were in hand.",
    "not_ready": "Requests refused because no ring is known yet.",
    "stream_errors": "Streamed requests answered with an error.",
    "streams_refused": "Route streams refused because too many were open.",
    "heat_reports": "Reports of heat samples taken by a ring manager.",
    "heat_report_failures": "Reports of heat samples that no ring manager took.",
    "heat_samples": "Sampled chains sent.",
    "redis_misconfigured": "Checks that found Redis misconfigured.",
}


class PlainHistogram:
    """Counts by bucket: one bisection an observation, no lock of its own."""

    __slots__ = ("_limits", "counts", "total")

    def __init__(self, limits: tuple[float, ...]) -> None:
        self._limits = limits
        self.counts = [0] * (len(limits) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self._limits, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts as Prometheus wants them."""
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for limit, count in zip((*map(str, self._limits), "+Inf"), self.counts, strict=True):
            cumulative += count
            buckets.append((limit, cumulative))
        return buckets


class RouterMetrics(Collector):
    """Counts of one pool. `routed` runs under the decider's lock; a scrape may be one decision behind."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._routes: dict[tuple[str, int], int] = {}
        self._reasons: dict[int, str] = {}
        self._seen_ms: dict[str, float] = {}
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(COUNTED, 0)
        self.decision_s = PlainHistogram(_DECISION_S)
        self.predicted_s = PlainHistogram(_TTFT_S)
        self.regret_s = PlainHistogram(_TTFT_S)
        self.hit_tokens = 0
        self.prompt_tokens = 0

    def count(self, name: str, by: int = 1) -> None:
        """Count a rare event, from any thread."""
        with self._lock:
            self.counts[name] += by

    def routed(self, decision: Decision, prompt_tokens: int) -> None:
        """Count one booked decision."""
        chosen = decision.chosen
        series = (chosen.instance_id, decision.reason)
        self._routes[series] = self._routes.get(series, 0) + 1
        if decision.reason not in self._reasons:
            self._reasons[decision.reason] = decision.reason.name
        self.hit_tokens += chosen.hit_tokens
        self.prompt_tokens += prompt_tokens
        predicted_s = chosen.predicted_ttft_s
        self.predicted_s.observe(predicted_s)
        backup = decision.backup
        if backup is not None:
            self.regret_s.observe(max(0.0, predicted_s - backup.predicted_ttft_s))

    def forget_departed(self, present: Mapping[str, object], now_ms: float) -> None:
        """Drop the series of instances that left the pool five minutes ago."""
        for instance_id in {series[0] for series in self._routes}:
            if instance_id in present:
                self._seen_ms[instance_id] = now_ms
            elif now_ms - self._seen_ms.setdefault(instance_id, now_ms) > DEPARTED_KEPT_MS:
                del self._seen_ms[instance_id]
                for series in [series for series in self._routes if series[0] == instance_id]:
                    del self._routes[series]

    def collect(self) -> Iterator[Metric]:
        """All series."""
        routes = CounterMetricFamily(
            "dualmap_router_routes", "Routes by instance and reason.", labels=("pool", "instance", "reason")
        )
        for (instance_id, reason), count in tuple(self._routes.items()):
            routes.add_metric((self._pool, instance_id, self._reasons[reason]), count)
        yield routes
        for name, help_text in COUNTED.items():
            counter = CounterMetricFamily(f"dualmap_router_{name}", help_text, labels=("pool",))
            counter.add_metric((self._pool,), self.counts[name])
            yield counter
        yield self._tokens("hit_tokens", "Prompt tokens promised as cached.", self.hit_tokens)
        yield self._tokens("prompt_tokens", "Prompt tokens routed.", self.prompt_tokens)
        yield self._histogram("decision_seconds", "From the lock asked for to the booking.", self.decision_s)
        yield self._histogram("predicted_ttft_seconds", "Predicted TTFT of the chosen instance.", self.predicted_s)
        yield self._histogram(
            "regret_seconds", "By how much the other candidate's prediction was lower.", self.regret_s
        )

    def _tokens(self, name: str, help_text: str, value: int) -> Metric:
        counter = CounterMetricFamily(f"dualmap_router_{name}", help_text, labels=("pool",))
        counter.add_metric((self._pool,), value)
        return counter

    def _histogram(self, name: str, help_text: str, histogram: PlainHistogram) -> Metric:
        family = HistogramMetricFamily(f"dualmap_router_{name}", help_text, labels=("pool",))
        family.add_metric((self._pool,), histogram.buckets(), histogram.total)
        return family
