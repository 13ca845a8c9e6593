"""What the collector counts; labels are pool, instance and reason only."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dualmap.runtime.metrics import count_by_reason

_POLL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


class CollectorMetrics:
    """Series of one collector and pool."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self.pool = pool
        self._polls = Counter(
            "dualmap_collector_polls", "Polls by outcome: ok, or why not.", ["pool", "reason"], registry=registry
        )
        self._seconds = Histogram(
            "dualmap_collector_poll_seconds",
            "Time of a poll that was not held.",
            ["pool"],
            buckets=_POLL_SECONDS,
            registry=registry,
        )
        self._writes = Counter(
            "dualmap_collector_writes",
            "Writes: changes, whole, rewritten, refused, failed.",
            ["pool", "reason"],
            registry=registry,
        )
        self._lies = Counter(
            "dualmap_collector_lies",
            "Answers that contradict themselves or what the agent said before.",
            ["pool", "reason"],
            registry=registry,
        )
        self._marks = Counter(
            "dualmap_collector_unreachable_marks", "Instances said to be unreachable.", ["pool"], registry=registry
        )
        self._polled = Gauge(
            "dualmap_collector_polled_instances", "Instances that this collector polls.", ["pool"], registry=registry
        )
        self._removed = Counter(
            "dualmap_collector_removed_states", "States of departed instances removed.", ["pool"], registry=registry
        )

        self._cut_off = Counter(
            "dualmap_collector_watchers_cut_off", "Watchers that read too slowly.", ["pool"], registry=registry
        )
        self._feed_failures = Counter(
            "dualmap_collector_feed_failures", "Times the changes could not be read.", ["pool"], registry=registry
        )
        self._count_poll = count_by_reason(self._polls, pool)
        self._count_write = count_by_reason(self._writes, pool)
        self._seconds_here = self._seconds.labels(pool=pool)

    def polled(self, reason: str, seconds: float | None = None) -> None:
        """A poll ended; ``seconds`` unless the agent held it."""
        self._count_poll(reason)
        if seconds is not None:
            self._seconds_here.observe(seconds)

    def wrote(self, reason: str) -> None:
        """A write ended."""
        self._count_write(reason)

    def lied(self, reason: str) -> None:
        """An agent contradicted itself."""
        self._lies.labels(pool=self.pool, reason=reason).inc()

    def marked_unreachable(self) -> None:
        """An instance was said to be unreachable."""
        self._marks.labels(pool=self.pool).inc()

    def polling(self, instances: int) -> None:
        """So many instances are this collector's now."""
        self._polled.labels(pool=self.pool).set(instances)

    def removed(self, states: int) -> None:
        """So many states of departed instances were removed."""
        self._removed.labels(pool=self.pool).inc(states)

    def cut_off(self) -> None:
        """A watcher read too slowly."""
        self._cut_off.labels(pool=self.pool).inc()

    def feed_failed(self) -> None:
        """The streams could not be read for the watchers."""
        self._feed_failures.labels(pool=self.pool).inc()
