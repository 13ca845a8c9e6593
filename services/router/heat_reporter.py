"""Sends heat samples to the ring managers twice a second from a thread of its own; a failure is counted, never retried.

A late sample would count old traffic as new, so what no ring manager takes is dropped.
"""

from __future__ import annotations

import threading

from dualmap.rpc.convert_ring import HeatReport
from dualmap.rpc.heat_client import HeatAnswer, HeatClient
from dualmap.runtime.logs import get_log
from dualmap.view.cluster_view import ClusterView
from services.router.heat_sampler import HeatSampler, weighted
from services.router.metrics import RouterMetrics

_log = get_log("heat")


class HeatReporter:
    """The thread. `start`, then `stop`, which waits for a report under way."""

    def __init__(
        self, view: ClusterView, sampler: HeatSampler, client: HeatClient, metrics: RouterMetrics, router_id: int
    ) -> None:
        self._view = view
        self._sampler = sampler
        self._client = client
        self._metrics = metrics
        self._router_id = router_id
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._want_splits = False
        self._failing = False
        self._digest = 0

    def start(self, period_s: float) -> None:
        """Report every ``period_s`` until `stop`."""
        self._thread = threading.Thread(target=self._run, args=(period_s,), name="heat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the channels."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._client.close()

    def report(self) -> bool:
        """One report of what was sampled since the last; False when none was due or none was taken."""
        with self._view.lock:
            kept, keyed, requests = self._sampler.take()
            ring = self._view.ring
        if ring is None:
            return False
        digest = ring.parameters.digest()
        if self._digest not in (0, digest):
            # Sampled at least partly under other parameters: no hash of them means anything now.
            kept, keyed = [], 0
        self._digest = digest
        samples = weighted(kept, keyed, requests)
        answer = self._client.report(
            HeatReport(
                router_id=self._router_id,
                samples=samples.samples,
                requests=samples.requests,
                parameters_digest=digest,
                highest_epoch_seen=ring.epoch,
                splits=ring.splits if self._want_splits else None,
                splits_epoch=ring.epoch if self._want_splits else 0,
            )
        )
        if not isinstance(answer, HeatAnswer):
            self._failed(answer.code.name)
            return False
        self._want_splits = answer.want_splits
        self._failing = False
        self._metrics.count("heat_reports")
        self._metrics.count("heat_samples", len(samples.samples))
        return True

    def _run(self, period_s: float) -> None:
        while not self._stop.wait(period_s):
            try:
                self.report()
            except Exception as error:
                self._failed(type(error).__name__)

    def _failed(self, what: str) -> None:
        self._metrics.count("heat_report_failures")
        if not self._failing:
            self._failing = True
            _log.warning("heat_report_failed", problem=what)
