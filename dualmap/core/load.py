"""From a load report to a predicted time to first token: the one place router, rebalancer, offers and simulator share.

It refuses to know clocks: slack is what is left of a deadline, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualmap.core.state import PRIORITY_CLASSES, SLACK_BUCKETS, LoadReport, QueuePolicy

BUCKET_LIMITS: tuple[float, ...] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Upper limits of slack buckets 1 to 6 as multiples of the pool's default SLO; bucket 0 is given up, 7 is more."""

GIVEN_UP = 0
"""Slack bucket of work that cannot meet its deadline any more."""


def _parts_before(bucket: int, pclass: int) -> tuple[slice, ...]:
    start = pclass * SLACK_BUCKETS
    if bucket == GIVEN_UP:
        # What was given up goes after all that can still be kept; among its own kind it is the youngest.
        return (slice(start, PRIORITY_CLASSES * SLACK_BUCKETS),)
    firsts = range(start + 1, PRIORITY_CLASSES * SLACK_BUCKETS, SLACK_BUCKETS)
    return tuple(slice(first, first + bucket) for first in firsts)


_BEFORE = tuple(
    tuple(_parts_before(bucket, pclass) for bucket in range(SLACK_BUCKETS)) for pclass in range(PRIORITY_CLASSES)
)
"""By class and bucket of a request, the parts of a flat table that go before it under ``slo``."""

_EVERYTHING = (slice(None),)


_SLO = QueuePolicy.SLO
"""Here because an enum's member is looked up slowly, and this is asked four times a decision."""


def slack_bucket(slack_s: float, default_slo_s: float) -> int:
    """Bucket of a request with ``slack_s`` seconds left to its deadline; 0 when none is left."""
    if slack_s <= 0.0:
        return GIVEN_UP
    share = slack_s / default_slo_s
    if share < 0.4:
        return 1 if share < 0.1 else 2 if share < 0.2 else 3
    if share < 1.6:
        return 4 if share < 0.8 else 5
    return 6 if share < 3.2 else 7


def priority_class(priority: int) -> int:
    """Index of a priority of -1, 0 or 1 in the flat tables; beyond them the nearest."""
    return 0 if priority < 0 else 1 if priority == 0 else PRIORITY_CLASSES - 1


def due_before(waiting_s: Sequence[float], policy: QueuePolicy, bucket: int, pclass: int) -> float:
    """Seconds of ``waiting_s`` (class x 8 + bucket) that go before a request of this bucket and class."""
    total = 0.0
    for part in parts_before(policy, bucket, pclass):
        total += sum(waiting_s[part])
    return total


def parts_before(policy: QueuePolicy, bucket: int, pclass: int) -> tuple[slice, ...]:
    """The parts of a flat table of waiting seconds that go before a request of this bucket and class."""
    return _BEFORE[pclass][bucket] if policy is _SLO else _EVERYTHING


def work_due_before(load: LoadReport, booked: Sequence[float] | None, bucket: int, pclass: int) -> float:
    """Seconds of waiting work, reported and booked, that goes before a request of this slack bucket and class.

    Under ``slo`` that is the work due before its deadline in its own and higher classes (its own bucket counts whole:
    a new request has the latest deadline of it), under ``fifo`` and ``hit_first`` all of it.
    """
    due = due_before(load.waiting_s, load.queue_policy, bucket, pclass)
    if booked is not None:
        due += due_before(booked, load.queue_policy, bucket, pclass)
    return due


def predict_ttft_s(
    load: LoadReport, booked: Sequence[float] | None, bucket: int, pclass: int, prefill_s: float
) -> float:
    """Predicted time to first token, seconds: rest of running and staged, work due before, then the prefill itself."""
    return load.rest_s + work_due_before(load, booked, bucket, pclass) + prefill_s


def drain_s(load: LoadReport, booked_s: float) -> float:
    """Seconds until all that is reported and booked has been prefilled."""
    return load.rest_s + sum(load.waiting_s) + booked_s
