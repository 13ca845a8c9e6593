"""The rebalancer's round in virtual time: list the queues that are in need, let core plan, hand back the moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dualmap.core.choose import RingPicture
from dualmap.core.instance_view import InstanceView
from dualmap.core.rebalance import Move, QueueItem, QueuePicture, plan
from dualmap.simulator.instance import SimInstance
from dualmap.simulator.options import ClusterOptions


def moves_of(
    instances: Iterable[SimInstance],
    views: Mapping[str, InstanceView],
    picture: RingPicture,
    options: ClusterOptions,
    now_s: float,
) -> list[Move]:
    """The plan of one round; instances that can meet all deadlines and make progress are not listed."""
    sources = []
    for instance in instances:
        if not instance.alive or not len(instance.queue):
            continue
        stalled_ms = instance.stalled_ms(now_s)
        given_up = instance.queue.given_up(now_s * 1_000, instance.rest_s(now_s))
        # Who has missed already meets nowhere: moving it saves nobody.
        if stalled_ms > 0 or any(waiting.deadline_ms > now_s * 1_000 for waiting in given_up):
            sources.append(_picture(instance, stalled_ms, now_s))
    return plan(sources, views, picture, options.rebalance, now_s * 1_000) if sources else []


def _picture(instance: SimInstance, stalled_ms: float, now_s: float) -> QueuePicture:
    items = []
    rest_s = instance.rest_s(now_s)
    for waiting in instance.queue.order(now_s * 1_000, rest_s):
        request = instance.held[waiting.request_id]
        items.append(
            QueueItem(
                waiting.request_id,
                waiting.attempt,
                waiting.deadline_ms - now_s * 1_000,
                request.chain,
                waiting.miss_tokens,
                now_s * 1_000 - waiting.submitted_ms,
                candidates=(request.instance, request.backup, *request.candidates),
                key=request.key,
                moved_ago_ms=None if request.moved_s is None else (now_s - request.moved_s) * 1_000,
            )
        )
    return QueuePicture(instance.instance_id, tuple(items), rest_s, stalled_ms, stalled_ms > 2_000)
