"""Whose queue is worth a look: instances that stand still, and those where somebody may miss. Pure, loads only.

Calm instances are never asked what waits there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualmap.core.instance_view import InstanceView
from dualmap.core.load import BUCKET_LIMITS, due_before
from dualmap.core.membership import InstanceState
from dualmap.core.state import PRIORITY_CLASSES, SLACK_BUCKETS, LoadReport


@dataclass(frozen=True, slots=True)
class Source:
    """An instance to be listed; ``suspect``: it takes no new work, by its own or the ring's word."""

    instance_id: str
    address: str
    suspect: bool


def sources_of(views: Iterable[InstanceView], default_slo_s: float, stalled_after_ms: float) -> tuple[Source, ...]:
    """Instances to be listed, by id. Who drains hands over by itself, and who cannot be reached cannot answer."""
    found = []
    for view in views:
        member = view.member
        if member is None or not view.reachable or not view.load.waiting_requests:
            continue
        if member.state not in (InstanceState.ACTIVE, InstanceState.SUSPECT):
            continue
        suspect = member.state is InstanceState.SUSPECT or view.load.suspect
        stalled = view.load.stalled_ms >= stalled_after_ms
        if suspect or stalled or may_miss(view.load, default_slo_s):
            found.append(Source(view.instance_id, member.grpc_address, suspect))
    return tuple(sorted(found, key=lambda source: source.instance_id))


def may_miss(load: LoadReport, default_slo_s: float) -> bool:
    """Whether some waiting request can have less slack than work before it and of it.

    Slack is known by bucket only, so the least of the bucket is taken: a queue may be listed for nothing, but none
    that misses is passed over. What was given up cannot meet its deadline anywhere and gives no cause.
    """
    for pclass in range(PRIORITY_CLASSES):
        for bucket in range(1, SLACK_BUCKETS):
            if not load.waiting_s[pclass * SLACK_BUCKETS + bucket]:
                continue
            least_slack_s = 0.0 if bucket == 1 else BUCKET_LIMITS[bucket - 2] * default_slo_s
            if load.rest_s + due_before(load.waiting_s, load.queue_policy, bucket, pclass) > least_slack_s:
                return True
    return False
