"""What the router's view says of itself to Prometheus, read when a scrape comes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.view.cluster_view import ClusterView
from dualmap.view.events import ViewEvent


class ViewMetrics(Collector):
    """Freshness, bookings and index by instance; events of the view by reason."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """All series; the lock is held for the reading of plain numbers only."""
        view, pool = self._view, self._view.pool
        with view.lock:
            now_ms = view.clock_ms()
            rows = [
                (
                    name,
                    found.age_ms(now_ms),
                    len(found.bookings),
                    found.bookings.booked_s,
                    len(found.kv),
                    found.eligible,
                )
                for name, found in view.instances.items()
            ]
            epoch, degraded = view.epoch, view.degraded
            events = {event: view.counts[event] for event in ViewEvent}
        yield _of_pool("degraded", "1: Redis does not answer, or the ring came from the file.", pool, degraded)
        yield _of_pool("ring_epoch", "Epoch of the ring held.", pool, epoch)
        yield _of_instances("state_age_ms", "Age of the state held; negative: never heard.", pool, rows, 1)
        yield _of_instances("bookings", "Bookings not covered by a report.", pool, rows, 2)
        yield _of_instances("booked_seconds", "Work in those bookings.", pool, rows, 3)
        yield _of_instances("kv_blocks", "Blocks in the index held.", pool, rows, 4)
        yield _of_instances("eligible", "1: takes new work.", pool, rows, 5)
        counted = CounterMetricFamily(
            "dualmap_router_view_events", "Fallbacks and repairs of the view.", labels=("pool", "reason")
        )
        for event, count in events.items():
            counted.add_metric((pool, event.value), count)
        yield counted


_Row = tuple[str, float, int, float, int, bool]


def _of_pool(name: str, help_text: str, pool: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"dualmap_router_{name}", help_text, labels=("pool",))
    family.add_metric((pool,), value)
    return family


def _of_instances(name: str, help_text: str, pool: str, rows: list[_Row], column: int) -> Metric:
    family = GaugeMetricFamily(f"dualmap_router_{name}", help_text, labels=("pool", "instance"))
    for row in rows:
        family.add_metric((pool, row[0]), float(row[column]))
    return family
