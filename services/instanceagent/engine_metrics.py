"""Metrics of real engines and of what is known about their caches; every fallback has a reason here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class EngineMetrics:
    """Every series of the process; `of` gives those of one instance."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self.pool = pool
        names = ["pool", "instance"]
        reasons = [*names, "reason"]
        self.parity_failures = Counter(
            "dualmap_agent_parity_failures", "Self-tests whose blocks were not seen.", reasons, registry=registry
        )
        self.call_failures = Counter(
            "dualmap_agent_engine_call_failures", "Calls to the engine that failed.", reasons, registry=registry
        )
        self.kv_batches = Counter("dualmap_agent_kv_batches", "Batches of events applied.", names, registry=registry)
        self.kv_dropped = Counter(
            "dualmap_agent_kv_dropped", "Events, or parts of them, left out of the index.", reasons, registry=registry
        )
        self.kv_resets = Counter(
            "dualmap_agent_kv_resets", "Indexes dropped: continuity could not be shown.", reasons, registry=registry
        )
        self.kv_replays = Counter("dualmap_agent_kv_replays", "Replays asked for.", reasons, registry=registry)
        self.kv_orphans = Gauge(
            "dualmap_agent_kv_orphan_blocks", "Engine blocks whose parent is unknown.", names, registry=registry
        )
        self.modelled = Gauge(
            "dualmap_agent_kv_modelled_bool",
            "1 while the index is not the engine's own word.",
            names,
            registry=registry,
        )

    def of(self, instance_id: str) -> InstanceEngineMetrics:
        """The series of one instance."""
        return InstanceEngineMetrics(self, instance_id)


class InstanceEngineMetrics:
    """Counts for one instance."""

    def __init__(self, metrics: EngineMetrics, instance_id: str) -> None:
        self._all = metrics
        self._labels = {"pool": metrics.pool, "instance": instance_id}
        self._batches = metrics.kv_batches.labels(**self._labels)
        self._orphans = metrics.kv_orphans.labels(**self._labels)

    def parity_failed(self, reason: str) -> None:
        """A self-test failed."""
        self._all.parity_failures.labels(**self._labels, reason=reason).inc()

    def call_failed(self, reason: str) -> None:
        """A call to the engine failed."""
        self._all.call_failures.labels(**self._labels, reason=reason).inc()

    def kv_applied(self, orphans: int) -> None:
        """A batch was applied; so many orphans are left."""
        self._batches.inc()
        self._orphans.set(orphans)

    def kv_dropped(self, reason: str) -> None:
        """Something of an event was left out."""
        self._all.kv_dropped.labels(**self._labels, reason=reason).inc()

    def kv_reset(self, reason: str) -> None:
        """The index was dropped."""
        self._all.kv_resets.labels(**self._labels, reason=reason).inc()

    def kv_replayed(self, outcome: str) -> None:
        """A replay ended."""
        self._all.kv_replays.labels(**self._labels, reason=outcome).inc()

    def show_modelled(self, *, modelled: bool) -> None:
        """Whether the index is modelled."""
        self._all.modelled.labels(**self._labels).set(modelled)
