"""What a ring manager counts, under `dualmap_ringmanager_…`."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge

from dualmap.core.membership import InstanceState, RingSnapshot


class RingManagerMetrics:
    """Metrics of one pool."""

    def __init__(self, registry: CollectorRegistry, pool: str) -> None:
        self._pool = pool

        def gauge(what: str, text: str) -> Gauge:
            return Gauge(f"dualmap_ringmanager_{what}", text, ["pool"], registry=registry).labels(pool=pool)

        def counter(what: str, text: str) -> Counter:
            return Counter(f"dualmap_ringmanager_{what}", text, ["pool"], registry=registry).labels(pool=pool)

        self._members = Gauge("dualmap_ringmanager_members", "Members by state.", ["pool", "state"], registry=registry)
        self._epoch = gauge("epoch", "Epoch of the ring this process knows.")
        self._splits = gauge("splits", "Entries of the split table.")
        self.leader = gauge("leader", "1 while this process leads.")
        self.moved_share = gauge("moved_share_ratio", "Share of pairs that the last change of the ring moved.")
        self.watchers = gauge("watchers", "Open watches.")
        self.cut_off = counter("watchers_cut_off", "Watches ended because their reader was too slow.")
        self.published = counter("published", "Rings published.")
        self.refused = counter("publications_refused", "Rings that Redis did not take: fenced, moved or unanswered.")
        self.failed_turns = counter("turns_without_effect", "Turns that Redis, or another leader, let come to nothing.")
        self.lease_failures = counter("lease_failures", "Calls about the leadership that Redis did not answer.")
        self.taken_over = counter("reigns", "Times this process took over the lead.")
        self.joined = counter("joined", "Instances that joined, again or anew.")
        self.expired = counter("expired", "Instances removed because their lease ended.")
        self.left = counter("left", "Instances that left by word.")
        self.restored = counter("restored", "Times a ring or split table lost by Redis was published again.")
        self.samples = counter("heat_samples", "Sampled chains counted.")
        self.mismatches = counter("parameter_mismatches", "Calls refused because their parameters differ.")

    def ring(self, snapshot: RingSnapshot) -> None:
        """Show a ring."""
        states = Tally(member.state for member in snapshot.members)
        for state in InstanceState:
            if state is not InstanceState.LEFT:
                self._members.labels(pool=self._pool, state=state.name.lower()).set(states[state])
        self._epoch.set(snapshot.epoch)
        self._splits.set(len(snapshot.splits))
