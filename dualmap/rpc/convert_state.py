"""State messages <-> values; every refusal names its field. What an agent answers is checked like a stranger's word."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dualmap.core.errors import InvalidRequest
from dualmap.core.state import (
    EMPTY_WAITING,
    PRIORITY_CLASSES,
    SLACK_BUCKETS,
    KvSnapshot,
    LoadReport,
    PrefillCost,
    QueuePolicy,
    StateUpdate,
    TicketsSeen,
)
from dualmap.v1 import agent_pb2, state_pb2, types_pb2

MAX_WAIT_MS = 1_000
MAX_INSTANCE_ID_CHARS = 512
MAX_ROUTERS_SEEN = 1_024
"""Routers of one report: those of the last 60 s, replicas and restarts together."""

MAX_CHANGES = 65_536
"""Of one answer; agents keep no more, and who lacks more is told everything."""

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1_000

_RECORD_BYTES = 9
_SEEN_BYTES = 32
_TIERS = 3
_NO_BUCKETS = (0.0,) * SLACK_BUCKETS
_SECONDS = ("rest_s", "stalled_ms", "kv_use", "offered_s", "host_discount", "remote_discount")
_SAME_NAMES = (
    "rest_s",
    "admitting",
    "waiting_requests",
    "waiting_miss_tokens",
    "running_requests",
    "staged_miss_tokens",
    "kv_use",
    "stalled_ms",
    "suspect",
    "moved_out",
    "moved_in",
    "put_back",
    "relays",
    "finished",
    "finished_in_slo",
    "prompt_tokens",
    "cached_tokens",
    "offered_s",
    "prefix_closed",
    "modelled",
    "host_discount",
    "remote_discount",
)


@dataclass(frozen=True, slots=True)
class StateQuery:
    """What a collector asks of an agent: state since a base, or whole; ``wait_ms`` holds an answer without news."""

    instance_id: str
    incarnation: int = 0
    agent_epoch: int = 0
    since_version: int = 0
    full: bool = False
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One instance as an operator is told of it. ``polled_ago_ms`` negative: not polled by who answers."""

    instance_id: str
    incarnation: int
    agent_epoch: int
    version: int
    kv_blocks: int
    kv_digest: int
    load: LoadReport
    reachable: bool
    polled_ago_ms: float
    collector: str


def query_message(query: StateQuery) -> agent_pb2.GetStateRequest:
    """The query as it travels."""
    return agent_pb2.GetStateRequest(
        instance_id=query.instance_id,
        incarnation=query.incarnation,
        agent_epoch=query.agent_epoch,
        since_version=query.since_version,
        full=query.full,
        wait_ms=query.wait_ms,
    )


def query_of(message: agent_pb2.GetStateRequest) -> StateQuery:
    """A checked query. Raises InvalidRequest."""
    if message.wait_ms > MAX_WAIT_MS:
        raise InvalidRequest("wait_ms", f"at most {MAX_WAIT_MS}, got {message.wait_ms}")
    if len(message.instance_id) > MAX_INSTANCE_ID_CHARS:
        raise InvalidRequest("instance_id", f"at most {MAX_INSTANCE_ID_CHARS} characters")
    return StateQuery(
        instance_id=message.instance_id,
        incarnation=message.incarnation,
        agent_epoch=message.agent_epoch,
        since_version=message.since_version,
        full=message.full,
        wait_ms=message.wait_ms,
    )


def state_message(ring_epoch: int, update: StateUpdate) -> agent_pb2.GetStateResponse:
    """An agent's answer."""
    return agent_pb2.GetStateResponse(ring_epoch=ring_epoch, update=update_message(update))


def update_message(update: StateUpdate) -> state_pb2.StateUpdate:
    """The update as it travels."""
    message = state_pb2.StateUpdate(
        instance_id=update.instance_id,
        incarnation=update.incarnation,
        agent_epoch=update.agent_epoch,
        version=update.version,
        since=update.since,
        full=update.full,
        kv_digest=update.kv_digest,
        kv_blocks=update.kv_blocks,
    )
    if update.load is not None:
        message.load.CopyFrom(load_message(update.load))
    if update.snapshot is not None:
        message.snapshot.hashes = update.snapshot.hashes
        message.snapshot.tiers = update.snapshot.tiers
    elif update.changes:
        message.changes.changes = update.changes
    return message


def update_of(message: state_pb2.StateUpdate) -> StateUpdate:
    """A checked update; a snapshot's order and tiers are left to the index that takes it. Raises InvalidRequest."""
    if not message.instance_id or len(message.instance_id) > MAX_INSTANCE_ID_CHARS:
        raise InvalidRequest("instance_id", f"1 to {MAX_INSTANCE_ID_CHARS} characters")
    for name in ("incarnation", "agent_epoch"):
        if not getattr(message, name):
            raise InvalidRequest(name, "is required")
    snapshot = None
    changes = b""
    if message.full:
        snapshot = KvSnapshot(message.snapshot.hashes, message.snapshot.tiers)
        if len(snapshot.hashes) != 8 * len(snapshot.tiers):
            raise InvalidRequest("snapshot", "hashes and tiers differ in number")
    else:
        changes = message.changes.changes
        if len(changes) > MAX_CHANGES * _RECORD_BYTES:
            raise InvalidRequest("changes", f"at most {MAX_CHANGES}, got {len(changes) // _RECORD_BYTES}")
        if len(changes) % _RECORD_BYTES:
            raise InvalidRequest("changes", f"{len(changes)} bytes are not whole {_RECORD_BYTES}-byte records")
        if changes and max(changes[8::_RECORD_BYTES]) > _TIERS:
            raise InvalidRequest("changes", "a tier is unknown")
    return StateUpdate(
        instance_id=message.instance_id,
        incarnation=message.incarnation,
        agent_epoch=message.agent_epoch,
        version=message.version,
        since=message.since,
        load=load_of(message.load) if message.HasField("load") else None,
        snapshot=snapshot,
        changes=changes,
        kv_digest=message.kv_digest,
        kv_blocks=message.kv_blocks,
    )


def load_message(load: LoadReport) -> state_pb2.Load:
    """A load as it travels."""
    return state_pb2.Load(
        waiting=[
            state_pb2.SlackBuckets(waiting_s=load.waiting_s[start : start + SLACK_BUCKETS])
            for start in range(0, PRIORITY_CLASSES * SLACK_BUCKETS, SLACK_BUCKETS)
        ],
        queue_policy=types_pb2.QueuePolicy.ValueType(load.queue_policy),
        cost=state_pb2.CostModel(
            a_s=load.cost.a_s,
            b_s_per_token=load.cost.b_s_per_token,
            c_s_per_token2=load.cost.c_s_per_token2,
            samples=load.cost.samples,
        ),
        tickets=[
            state_pb2.TicketsSeen(
                router_id=seen.router_id,
                watermark=seen.watermark,
                seen=seen.seen.to_bytes(_SEEN_BYTES, "little").rstrip(b"\0"),
            )
            for seen in load.tickets
        ],
        **{name: getattr(load, name) for name in _SAME_NAMES},
    )


def load_of(message: state_pb2.Load) -> LoadReport:
    """A checked load: numbers finite and not negative, no more classes, buckets or routers than there can be.

    Raises InvalidRequest.
    """
    for name in _SECONDS:
        _check_amount(getattr(message, name), f"load.{name}")
    if len(message.tickets) > MAX_ROUTERS_SEEN:
        raise InvalidRequest("load.tickets", f"at most {MAX_ROUTERS_SEEN} routers, got {len(message.tickets)}")
    try:
        policy = QueuePolicy(message.queue_policy or QueuePolicy.SLO)
    except ValueError as error:
        raise InvalidRequest("load.queue_policy", f"{message.queue_policy} is unknown") from error
    return LoadReport(
        waiting_s=_waiting_of(message.waiting),
        queue_policy=policy,
        cost=_cost_of(message.cost) if message.HasField("cost") else PrefillCost(),
        tickets=tuple(_seen_of(seen) for seen in message.tickets),
        **{name: getattr(message, name) for name in _SAME_NAMES},
    )


def page_size_of(message: state_pb2.ListInstancesRequest) -> int:
    """Instances of one page. Raises InvalidRequest."""
    if message.page_size > MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"at most {MAX_PAGE_SIZE}, got {message.page_size}")
    return message.page_size or DEFAULT_PAGE_SIZE


def page_message(ring_epoch: int, page: Sequence[InstanceFacts], next_token: str) -> state_pb2.ListInstancesResponse:
    """One page."""
    return state_pb2.ListInstancesResponse(
        ring_epoch=ring_epoch, instances=[summary_message(facts) for facts in page], next_page_token=next_token
    )


def instance_message(ring_epoch: int, facts: InstanceFacts) -> state_pb2.GetInstanceResponse:
    """One instance."""
    return state_pb2.GetInstanceResponse(ring_epoch=ring_epoch, instance=summary_message(facts))


def watch_message(
    ring_epoch: int, changed: Sequence[InstanceFacts], left: Sequence[str], *, snapshot: bool
) -> state_pb2.WatchStateResponse:
    """One message of a watch."""
    return state_pb2.WatchStateResponse(
        ring_epoch=ring_epoch,
        instances=[summary_message(facts) for facts in changed],
        left_instance_ids=left,
        snapshot=snapshot,
    )


def summary_message(facts: InstanceFacts) -> state_pb2.InstanceSummary:
    """One instance as it travels."""
    return state_pb2.InstanceSummary(
        instance_id=facts.instance_id,
        incarnation=facts.incarnation,
        agent_epoch=facts.agent_epoch,
        version=facts.version,
        kv_blocks=facts.kv_blocks,
        kv_digest=facts.kv_digest,
        load=load_message(facts.load),
        reachable=facts.reachable,
        polled_ago_ms=facts.polled_ago_ms,
        collector=facts.collector,
    )


def facts_of(message: state_pb2.InstanceSummary) -> InstanceFacts:
    """What an operator's tool reads. Raises InvalidRequest."""
    return InstanceFacts(
        instance_id=message.instance_id,
        incarnation=message.incarnation,
        agent_epoch=message.agent_epoch,
        version=message.version,
        kv_blocks=message.kv_blocks,
        kv_digest=message.kv_digest,
        load=load_of(message.load),
        reachable=message.reachable,
        polled_ago_ms=message.polled_ago_ms,
        collector=message.collector,
    )


def _waiting_of(classes: Sequence[state_pb2.SlackBuckets]) -> tuple[float, ...]:
    if len(classes) > PRIORITY_CLASSES:
        raise InvalidRequest("load.waiting", f"at most {PRIORITY_CLASSES} classes, got {len(classes)}")
    flat: list[float] = []
    for buckets in classes:
        seconds = tuple(buckets.waiting_s)
        if len(seconds) > SLACK_BUCKETS:
            raise InvalidRequest("load.waiting", f"at most {SLACK_BUCKETS} buckets, got {len(seconds)}")
        flat += seconds
        flat += _NO_BUCKETS[len(seconds) :]
    # One look at all of them: a sum is finite only where each is. Each poll comes by here.
    if flat and not (min(flat) >= 0 and math.isfinite(sum(flat))):
        for value in flat:
            _check_amount(value, "load.waiting.waiting_s")
        raise InvalidRequest("load.waiting.waiting_s", "the sum is not finite")
    return tuple(flat) + EMPTY_WAITING[len(flat) :]


def _cost_of(message: state_pb2.CostModel) -> PrefillCost:
    for name in ("a_s", "b_s_per_token", "c_s_per_token2"):
        _check_amount(getattr(message, name), f"load.cost.{name}")
    return PrefillCost(message.a_s, message.b_s_per_token, message.c_s_per_token2, message.samples)


def _seen_of(message: state_pb2.TicketsSeen) -> TicketsSeen:
    if len(message.seen) > _SEEN_BYTES:
        raise InvalidRequest("load.tickets.seen", f"at most {_SEEN_BYTES} bytes, got {len(message.seen)}")
    return TicketsSeen(message.router_id, message.watermark, int.from_bytes(message.seen, "little"))


def _check_amount(value: float, field: str) -> None:
    if not math.isfinite(value) or value < 0:
        raise InvalidRequest(field, f"must be finite and not negative, is {value}")
